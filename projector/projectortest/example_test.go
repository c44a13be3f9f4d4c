package projectortest_test

import (
	"context"
	"testing"

	"github.com/kinora-go/kinora/projector/projectortest"
	"github.com/kinora-go/kinora/providers/memory"
)

// A projector whose read model is in memory. Stars is read with a function of the application.
func ExampleKit() {
	kit := projectortest.New(
		func(t testing.TB) *memory.DB { return openMemory(t) }, inMemory,
		func(ctx context.Context, db *memory.DB) ([]total, error) { return readMemory(ctx, db) })
	events := []projectortest.Event{
		projectortest.In("review-42-ann", posted{"42", "ann", 5}),
		projectortest.In("review-42-ann", edited{"42", "ann", 4, 5}),
		projectortest.In("review-7-bob", posted{"7", "bob", 3}),
	}
	_ = func(t *testing.T) {
		kit.Given(t, events...).Then(total{"42", 4}, total{"7", 3})
		kit.ExactlyOnce(t, events...)
		kit.Commutes(t, events...)
	}
}

// A decision of an aggregate, and one that is refused.
func ExampleGiven() {
	_ = func(t *testing.T) {
		past := posted{"42", "ann", 5}
		projectortest.Given(t, newAccount, past).When(rate(4)).Then(edited{"42", "ann", 4, 5})
		projectortest.Given(t, newAccount, past).When(rate(6)).Then(errStars)
	}
}
