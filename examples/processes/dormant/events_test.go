package dormant_test

import (
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/processes/dormant"
)

func TestEvents(t *testing.T) { eventstore.GoldenTypes(t, dormant.Types, "testdata/events") }
