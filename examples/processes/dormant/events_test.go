package dormant_test

import (
	"testing"

	"github.com/kinora-go/kinora/eventstore/goldentest"
	"github.com/kinora-go/kinora/examples/processes/dormant"
)

func TestEvents(t *testing.T) { goldentest.Check(t, dormant.Types, "testdata/events") }
