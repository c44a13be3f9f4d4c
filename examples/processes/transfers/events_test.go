package transfers_test

import (
	"testing"

	"github.com/kinora-go/kinora/eventstore/goldentest"
	"github.com/kinora-go/kinora/examples/processes/transfers"
)

func TestEvents(t *testing.T) { goldentest.Check(t, transfers.Types, "testdata/events") }
