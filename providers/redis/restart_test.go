package redis_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// times counts how often an event takes effect.
func (s space) times(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
	tx.HIncrBy(ctx, s.prefix+"times", e.ID, 1)
	return nil
}

// The server is killed and started again between messages and during them. With an append-only
// file that it writes before it replies, no acked message is lost. Without one, all are. An
// outage parks no message.
// Promise: G5.13
func TestAKilledAndRestartedServer(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		settings []string
		keeps    bool
	}{
		"with an append-only file":  {[]string{"--appendonly", "yes", "--appendfsync", "always"}, true},
		"without one, as a control": {nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Private(t, c.settings...)
			s, db, f := newSpace(redistest.Client(t, server.URL, oneTry)), newMemory(t), make(subscription)
			list := events(400, 13)
			var retried, ambiguous, acked atomic.Int64
			cfg := projector.RunnerConfig{Concurrency: 4, Observer: projector.RunnerObserver{
				Retried: func(string, projector.Class, time.Duration) { retried.Add(1) },
				Unit: func(_ string, messages int, _ time.Duration, err error) {
					if provider.ClassOf(err) == provider.ClassAmbiguous {
						ambiguous.Add(int64(messages))
					}
				},
				Parked: func(_, _ string, class projector.Class, code string) { t.Errorf("parked: %s %s", class, code) },
			}}
			stop := run(t, provider.Combine(s.units(t), db), f, cfg, define(projector.Options{}, s.times))
			send := func(part []event) {
				for _, e := range part {
					m := e.message()
					f <- m
					go func() { <-m.Acked(); acked.Add(1) }()
				}
			}
			var sends sync.WaitGroup
			sends.Go(func() { send(list[:100]) })
			kills := len(list)/100 - 1
			// 50 of each hundred are acked before a kill; the next hundred is sent after it
			for i := range kills {
				eventually(t, "acks", func() bool { return acked.Load() >= int64(100*i+50) })
				require.NoError(t, server.End("KILL"))
				before := retried.Load()
				sends.Go(func() { send(list[100*(i+1) : 100*(i+2)]) })
				eventually(t, "a unit has met the outage", func() bool { return retried.Load() > before })
				require.NoError(t, server.Begin())
			}
			sends.Wait()
			eventually(t, "all are acked", func() bool { return acked.Load() == int64(len(list)) })
			stop()
			times, err := redistest.Client(t, server.URL).HGetAll(t.Context(), s.prefix+"times").Result()
			require.NoError(t, err)
			missing, again := 0, 0
			for _, e := range list {
				switch times[e.ID] {
				case "":
					missing++
				case "1":
				default:
					again++
				}
			}
			t.Logf("%d kills, %d retries, %d messages in ambiguous units: of %d acked messages %d are missing, and %d took effect more than once",
				kills, retried.Load(), ambiguous.Load(), len(list), missing, again)
			require.LessOrEqual(t, again, int(ambiguous.Load()))
			if c.keeps {
				require.Zero(t, missing)
			} else {
				require.GreaterOrEqual(t, missing, 250, "messages acked before the last kill are missing")
			}
		})
	}
}
