package unit

import (
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pulse"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// Without an observer, a unit allocates what its transaction allocates, and nothing else.
// Promise: G13.2
func TestAnObserverThatIsOffAllocatesNothing(t *testing.T) {
	h := &model.Host{Config: model.Config{Timeout: time.Minute, Clock: time.Now, Logger: slog.Default()}}
	c := &Crashes{Host: h, Process: new(sync.RWMutex)}
	c.watch.Store(&watch{}) // no process has crashed
	p := &model.Projector{Name: "p", Do: func(context.Context, provider.Unit, model.Body) error { return nil }}
	w := &Worker{Host: h, Projector: p, Group: &Group{}, Crashes: c, Loop: new(pulse.Loop)}
	defer w.Close()
	msgs := []*model.Message{{Received: model.Logged(eventstore.Raw{ID: "1"}, "log")}}
	count := func(run func(context.Context, *Unit) (*Done, error)) float64 {
		return testing.AllocsPerRun(100, func() {
			if _, err := run(t.Context(), w.Of(provider.Build{Projector: "p", Generation: 1}, "", msgs)); err != nil {
				t.Error(err)
			}
		})
	}
	off := count(w.Run)
	require.Equal(t, count(w.Transact), off)

	h.Observer.Processing = func(string, []eventstore.Raw) (context.Context, func(error)) { return nil, nil }
	require.Greater(t, count(w.Run), off)
}
