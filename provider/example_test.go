package provider_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
)

// timed wraps a provider and reports the duration of each unit. The embedded interface passes
// on Keeps and all other methods of Provider: a wrapper that returned zero Keeps would turn
// markers off. It does not pass on capabilities: a real wrapper also implements ReadyChecker.
type timed[Tx any] struct {
	provider.Provider[Tx]
	report func(projector string, took time.Duration)
}

func (t timed[Tx]) Do(
	ctx context.Context, u provider.Unit, run func(context.Context, Tx, provider.Found) (provider.Closing, error),
) error {
	begin := time.Now()
	defer func() { t.report(u.Projector, time.Since(begin)) }()
	return t.Provider.Do(ctx, u, run)
}

// A wrapper of a provider. Runners take it like the provider itself.
func ExampleUnits() {
	ctx := context.Background()
	db, err := memory.New(nil)
	if err != nil {
		panic(err)
	}
	wrapped := timed[*memory.Model]{db, func(projector string, took time.Duration) {
		fmt.Println(projector, took >= 0)
	}}

	err = wrapped.Do(ctx, provider.Unit{Projector: "ratings"},
		func(_ context.Context, tx *memory.Model, _ provider.Found) (provider.Closing, error) {
			tx.Put("ratings", "42", 5)
			return provider.Closing{}, nil
		})
	fmt.Println(err, wrapped.Keeps() == db.Keeps())

	// Output:
	// ratings true
	// <nil> true
}

// A provider gives a class to each error. Errors of handlers are unknown unless no retry can help.
func ExampleHandlerError() {
	for _, err := range []error{errors.New("no such product"), &eventstore.InvalidError{Field: "stream", Reason: "must not be empty"}} {
		fmt.Println(provider.HandlerError(err))
	}

	// Output:
	// unknown: no such product
	// permanent (invalid): stream: must not be empty
}
