package projector

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/provider"
)

// Lag is how far a projector is behind a log.
type Lag struct {
	Events   int64     // number of visible events that are neither applied nor parked
	Oldest   time.Time // when the first of them was recorded; zero if there is none
	Position int64     // every event up to it is applied or parked
	Live     bool      // deliveries are applied; if false, the projector catches up with the log
}

// Lag returns how far p is behind the log of s, counted at this moment. It reads the ids of the
// events behind the checkpoint, so it takes about a second per million.
//   - ErrNoCheckpoint: no runner has read a log for p. A projector on a broker without Markers, or
//     with BrokerOnly, has no lag.
//   - ErrOtherLog: the log of s is not the one that p reads; see StateOf.
func (p *Projector[Tx]) Lag(ctx context.Context, s State) (Lag, error) {
	lag, err := p.lag(ctx, s)
	if err != nil {
		return Lag{}, fmt.Errorf("lag of %s: %w", p.name, err)
	}
	return lag, nil
}

func (p *Projector[Tx]) lag(ctx context.Context, s State) (Lag, error) {
	if err := p.types.Err(); err != nil {
		return Lag{}, err
	}
	c, err := s.Checkpoint(ctx, provider.Build{Projector: p.name})
	if err != nil {
		return Lag{}, err
	}
	if c.Mode == 0 {
		return Lag{}, ErrNoCheckpoint
	}
	id, err := s.LogID(ctx)
	if err != nil {
		return Lag{}, err
	}
	if c.Lineage != "" && c.Lineage != id.Lineage {
		return Lag{}, fmt.Errorf("%w: the checkpoint is in log %s, and this one is %s: use StateOf", ErrOtherLog, c.Lineage, id.Lineage)
	}
	lag, takers := Lag{Position: c.Place.Position, Live: c.Mode == provider.ModeLive}, p.takers()
	err = follow.Unsettled(ctx, s, p.Takes(), c.Place.Position, func(events []eventstore.Raw) (bool, error) {
		open := slices.DeleteFunc(events, func(e eventstore.Raw) bool { return c.Applied(e.Stream, e.Position) })
		missing, err := follow.Unapplied(ctx, s, provider.Build{Projector: p.name, Generation: c.Generation}, takers, open)
		if err != nil {
			return false, err
		}
		if lag.Events == 0 && len(missing) > 0 {
			lag.Oldest = missing[0].RecordedAt
		}
		lag.Events += int64(len(missing))
		return true, nil
	})
	if err != nil {
		return Lag{}, err
	}
	return lag, nil
}
