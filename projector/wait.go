package projector

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/marker"
)

// State answers what became of messages. A provider that records marks in its units is one.
type State interface {
	ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error]
	// Outcomes says for each key what became of its message at its handler, in the live generation. A message
	// that was parked before it got to any handler (Parked.Handler empty) is parked, and skipped, for each of its projector's.
	Outcomes(ctx context.Context, keys []marker.Key) ([]Outcome, error)
}

// Outcome is what became of a message at a handler.
type Outcome int

const (
	Unseen    Outcome = iota // no trace of it
	Applied                  // its marker is there
	IsParked                 // it is parked, and its marker is not there
	IsSkipped                // it was parked, and skipped
)

const (
	waitMin = time.Millisecond
	waitMax = 50 * time.Millisecond
)

// Wait returns when p has applied all the events of an append: when each of its handlers that takes one has
// left its marker. It asks s, so it works in any process. Where nothing was appended (Count 0), it waits for
// the stream's last event.
//   - An event that is parked: ErrParked; one that was skipped: ErrSkipped. A projector without markers leaves no trace: ErrNoMarkers.
//   - One without a marker, from a time of which s, a marker.Keeper, has pruned markers: ErrPruned, within a tenth of a second.
//   - ctx's end: ctx's error.
func (p *Projector[Tx]) Wait(ctx context.Context, s State, a eventstore.Appended) error {
	if err := p.types.Err(); err != nil {
		return fmt.Errorf("wait for %s: %w", p.name, err)
	}
	if !p.opts.Markers {
		return fmt.Errorf("wait for %s: %w", p.name, ErrNoMarkers)
	}
	keys, recorded, err := p.keysOf(ctx, s, a)
	if err != nil {
		return fmt.Errorf("wait for %s: %w", p.name, err)
	}
	asked := false
	for pause := waitMin; len(keys) > 0; pause = min(2*pause, waitMax) {
		outcomes, err := s.Outcomes(ctx, keys)
		if err != nil {
			return fmt.Errorf("wait for %s: %w", p.name, err)
		}
		if slices.Contains(outcomes, IsParked) {
			return fmt.Errorf("wait for %s: %w", p.name, ErrParked)
		}
		if slices.Contains(outcomes, IsSkipped) {
			return fmt.Errorf("wait for %s: %w", p.name, ErrSkipped)
		}
		var open []marker.Key
		for i, o := range outcomes {
			if o == Unseen {
				open = append(open, keys[i])
			}
		}
		if keys = open; len(keys) == 0 {
			break
		}
		if pause == waitMax && !asked { // not sooner: most waits are over by then
			asked = true
			if err := arePruned(ctx, s, keys, recorded); err != nil {
				return fmt.Errorf("wait for %s: %w", p.name, err)
			}
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("wait for %s: %w", p.name, ctx.Err())
		}
	}
	return nil
}

// arePruned is ErrPruned where the marker of one of keys may have been pruned.
func arePruned(ctx context.Context, s State, keys []marker.Key, recorded map[string]time.Time) error {
	keeper, ok := s.(marker.Keeper)
	if !ok {
		return nil
	}
	floors := map[string]time.Time{}
	for _, k := range keys {
		for _, name := range append([]string{k.Handler}, k.Was...) {
			floor, known := floors[name]
			if !known {
				var err error
				if floor, err = keeper.Floor(ctx, name); err != nil {
					return err
				}
				floors[name] = floor
			}
			if !recorded[k.MessageID].After(floor) {
				return fmt.Errorf("%w: %s at %s", ErrPruned, k.MessageID, name)
			}
		}
	}
	return nil
}

// keysOf lists the markers that the append's events leave with p, and when the events were recorded, by their ids.
func (p *Projector[Tx]) keysOf(ctx context.Context, s State, a eventstore.Appended) (keys []marker.Key, recorded map[string]time.Time, err error) {
	from := a.Version - int64(max(a.Count, 1))
	if a.Version == 0 {
		return nil, nil, nil
	}
	recorded = map[string]time.Time{}
	for raw, err := range s.ReadStream(ctx, a.Stream, from) {
		if err != nil {
			return nil, nil, err
		}
		if raw.Version > a.Version {
			break
		}
		recorded[raw.ID] = raw.RecordedAt
		for _, h := range p.handlers {
			if slices.Contains(h.match(p.types), raw.Type) {
				keys = append(keys, marker.Key{Handler: p.full(h.name), Was: p.fulls(h.was), MessageID: raw.ID})
			}
		}
	}
	return keys, recorded, nil
}
