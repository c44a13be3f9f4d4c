package erasure_test

import (
	"testing"

	"github.com/kinora-go/kinora/eventstore/goldentest"
	"github.com/kinora-go/kinora/examples/processes/erasure"
)

func TestEvents(t *testing.T) { goldentest.Check(t, erasure.Types, "testdata/events") }
