package projector

import (
	"context"
	"testing"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pulse"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// Without an observer, an attempt at a unit allocates what its transaction allocates, and nothing else.
// Promise: G13.2
func TestAnObserverThatIsOffAllocatesNothing(t *testing.T) {
	r := &Runner{process: &process}
	require.NoError(t, r.cfg.validate())
	r.watch.Store(&watch{}) // no process has crashed
	p := &projection{runner: r, name: "p", do: func(
		context.Context, provider.Unit, func(context.Context, caller, provider.Found) (provider.Closing, error),
	) error {
		return nil
	}}
	p.current.Store(&generation{Build: provider.Build{Projector: "p", Generation: 1}})
	w := &worker{projection: p, loop: new(pulse.Loop)}
	defer w.endBackground()
	msgs := []*inbound{{received: logged(eventstore.Raw{ID: "1"}, "log")}}
	count := func(run func(*unit) error) float64 {
		return testing.AllocsPerRun(100, func() {
			if err := run(w.newUnit(msgs)); err != nil {
				t.Error(err)
			}
		})
	}
	off := count(func(u *unit) error { return u.attempt(t.Context(), false) })
	require.Equal(t, count(func(u *unit) error { return u.transact(t.Context()) }), off)

	r.cfg.Observer.Processing = func(string, []eventstore.Raw) (context.Context, func(error)) { return nil, nil }
	require.Greater(t, count(func(u *unit) error { return u.attempt(t.Context(), false) }), off)
}
