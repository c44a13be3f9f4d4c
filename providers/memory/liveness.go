package memory

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// naming is what a worker is about to run.
type naming struct {
	runner, projector string
	messages          []string
}

func workerKey(w provider.Worker) string { return pair(w.Runner, strconv.Itoa(w.Number)) }

// Beat implements provider.Liveness.
func (db *DB) Beat(ctx context.Context, runner string, lease, record time.Duration) (health provider.Health, err error) {
	err = db.Tx(ctx, func(tx *Model) error {
		s, now := &tx.staged, db.now()
		if s.runners = s.runners.put(runner, now.Add(lease)); lease == 0 {
			s.forgetRunner(runner)
		}
		health.Now = now
		for other, ended := range s.runners.from("") {
			switch {
			case ended.Before(now.Add(-record)):
				s.forgetRunner(other)
			case !ended.After(now) && ended.After(health.Crashed):
				health.Crashed = ended
			}
		}
		return nil
	})
	if err != nil {
		return provider.Health{}, fmt.Errorf("renew the lease of a runner: %w", err)
	}
	return health, nil
}

func (s *state) forgetRunner(runner string) {
	s.runners = s.runners.drop(runner)
	for worker, n := range s.names.from("") {
		if n.runner == runner {
			s.names = s.names.drop(worker)
		}
	}
}

// Name implements provider.Liveness.
func (db *DB) Name(ctx context.Context, projector string, w provider.Worker, messages []string) error {
	err := db.Tx(ctx, func(tx *Model) error {
		tx.staged.names = tx.staged.names.put(workerKey(w), naming{w.Runner, projector, slices.Clone(messages)})
		return nil
	})
	if err != nil {
		return fmt.Errorf("name messages: %w", err)
	}
	return nil
}

// isNamed says whether a worker of another runner has named the message.
func (s *state) isNamed(projector, message, runner string) bool {
	for _, n := range s.names.from("") {
		if n.runner != runner && n.projector == projector && slices.Contains(n.messages, message) {
			return true
		}
	}
	return false
}
