package erasure_test

import (
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/processes/erasure"
)

func TestEvents(t *testing.T) { eventstore.GoldenTypes(t, erasure.Types, "testdata/events") }
