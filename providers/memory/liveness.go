package memory

import (
	"context"
	"strconv"
	"time"

	"github.com/kinora-go/kinora/provider"
)

func workerKey(w provider.Worker) string { return pair(w.Runner, strconv.Itoa(w.Number)) }

// Beat implements provider.Liveness.
func (db *Provider) Beat(ctx context.Context, runner string, lease, record time.Duration) (provider.Health, error) {
	return update(ctx, db, "renew the lease of a runner", func(s *state, now time.Time) provider.Health {
		health := provider.Health{Now: now}
		s.runners = s.runners.put(runner, now.Add(lease))
		for other, ends := range s.runners.from("") {
			switch {
			case other == runner && lease == 0, ends.Before(now.Add(-record)):
				s.runners = s.runners.drop(other)
				for worker := range under(s.inFlight, other) {
					s.inFlight = s.inFlight.drop(worker)
				}
			case !ends.After(now) && ends.After(health.Crashed):
				health.Crashed = ends
			}
		}
		return health
	})
}

// InFlight implements provider.Liveness.
func (db *Provider) InFlight(ctx context.Context, b provider.Build, w provider.Worker, messages []string) error {
	ids := make([]string, len(messages))
	for i, id := range messages {
		ids[i] = pair(buildKey(b), id)
	}
	_, err := update(ctx, db, "record the messages in flight", func(s *state, _ time.Time) struct{} {
		s.inFlight = s.inFlight.put(workerKey(w), ids)
		return struct{}{}
	})
	return err
}
