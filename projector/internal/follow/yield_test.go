package follow

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// Readers leave a moment after a message came that another program is able to apply, at most once per lease. They ask for
// that program at most once a second.
// Promise: G6.9
func TestReadersLeaveOncePerLease(t *testing.T) {
	t.Parallel()
	var y Yield
	var now time.Time
	var asked int
	p := &model.Projector{Name: "p", Has: []string{"event rated 1"}}
	newer := provider.Capability{Projector: "p", Version: 1, Has: []string{"event rated 1", "event rated 2"}}
	h := &model.Host{
		ID:     "a",
		Config: model.Config{Lease: time.Minute, Timeout: time.Minute, Clock: func() time.Time { return now }, Logger: slog.New(slog.DiscardHandler)},
		Others: func(context.Context) ([]provider.ServiceReport, error) {
			if asked++; asked == 1 {
				return nil, nil // it has not started yet
			}
			return []provider.ServiceReport{{ID: "b", Can: []provider.Capability{newer}}}, nil
		},
	}
	g := &generation.Row{}
	g.Oldest, g.Newest = 1, 1
	of := func(aside *model.Aside) *model.Message {
		return &model.Message{Received: &model.Received{}, Aside: aside}
	}
	applied, failed := of(nil), of(&model.Aside{Cause: errors.New("no")})
	unable := of(&model.Aside{Cause: model.ErrNoType, Needs: "event rated 2"})
	began := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		at    time.Duration
		msgs  []*model.Message
		asked int // in all
		left  bool
	}{
		{0, []*model.Message{applied, failed}, 0, false},
		{0, []*model.Message{applied, unable}, 1, false},
		{999 * time.Millisecond, []*model.Message{unable}, 1, false},
		{time.Second, []*model.Message{failed, unable, unable}, 2, false}, // the other program has started
		{2 * time.Second, []*model.Message{unable}, 2, false},
		{2499 * time.Millisecond, nil, 2, false},
		{2500 * time.Millisecond, nil, 2, true},
		{3499 * time.Millisecond, []*model.Message{unable}, 2, true},
		{3500 * time.Millisecond, []*model.Message{unable}, 2, false}, // no other program has taken the lease
		{62499 * time.Millisecond, []*model.Message{unable}, 2, false},
		{62500 * time.Millisecond, []*model.Message{applied, failed}, 2, false},
		{62500 * time.Millisecond, []*model.Message{unable}, 3, false},
		{64 * time.Second, nil, 3, true},
	} {
		now = began.Add(c.at)
		y.consider(t.Context(), h, p, g, c.msgs)
		require.Equal(t, c.asked, asked, "after %s", c.at)
		require.Equal(t, c.left, y.Left(now, YieldFor), "after %s", c.at)
	}
}
