package transfers_test

import (
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/processes/transfers"
)

func TestEvents(t *testing.T) { eventstore.GoldenTypes(t, transfers.Types, "testdata/events") }
