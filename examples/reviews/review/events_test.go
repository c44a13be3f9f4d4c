package review_test

import (
	"testing"

	"github.com/kinora-go/kinora/eventstore/goldentest"
	"github.com/kinora-go/kinora/examples/reviews/review"
)

// TestEvents: every event that was ever stored can still be read. Each file of testdata/events has
// samples of one type and schema version.
func TestEvents(t *testing.T) { goldentest.Check(t, review.Types, "testdata/events") }
