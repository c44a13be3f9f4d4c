package projector

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

const (
	waitMin  = time.Millisecond
	waitMax  = 50 * time.Millisecond
	waitPage = 500 // questions per query
)

// Wait returns nil after p has applied all events of an append: each is at or before the checkpoint
// of p, or has the markers of all its handlers. It polls s, so it works in any process. If
// a.Count is 0 (nothing was appended), it waits for the last event of the stream. It returns nil at
// once if the stream has no events, or if p has no handler for any of the events.
//   - An event that s does not show yet, because its transaction is open or s is a replica, is
//     waited for.
//   - ErrParked: an event is stuck, or waits behind a stuck one. While a runner tries it again,
//     Wait continues.
//   - ErrSkipped: an event was skipped.
//   - ErrPruned: an event has no marker, and markers of that age are deleted.
//   - ErrNoMarkers: p has no Options.Markers and no checkpoint, or the store of a runner in this
//     process keeps no markers. In another process Wait cannot know the latter, and waits until
//     ctx ends.
//   - ErrInput: a is the zero Appended.
//   - ErrOtherLog: the events were appended to another database or schema than that of s.
//   - ErrNoEvent: the log of s does not have the event, and the append is over: it was rolled back.
//     This is known once the log has a later event.
//   - ErrNotTaken: a handler of p began to read the log behind the event (Options.From, or a handler
//     that was added later), so it does not get it.
//   - The error of ctx after it ends.
func (p *Projector[Tx]) Wait(ctx context.Context, s State, a eventstore.Appended) (err error) {
	defer check.Wrap(&err, "wait for %s", p.name)
	if err := p.types.Err(); err != nil {
		return err
	}
	if a.Stream == "" {
		return fmt.Errorf("%w: the zero Appended names no events: pass the result of an append", ErrInput)
	}
	if err := p.isRecorded(ctx, s); err != nil {
		return err
	}
	if a.Log != "" {
		id, err := s.LogID(ctx)
		if err != nil {
			return err
		}
		if id.Lineage != a.Log {
			return fmt.Errorf("%w: log %s, and this one is %s", ErrOtherLog, a.Log, id.Lineage)
		}
	}
	types := map[string]string{} // by message id
	open, err := p.visible(ctx, s, a, types)
	if err == nil {
		err = p.begun(ctx, s, open, types)
	}
	if err != nil {
		return err
	}
	for page := range slices.Chunk(open, waitPage) {
		for pause := waitMin; ; pause = min(2*pause, waitMax) {
			if page, err = p.ask(ctx, s, a.Stream, page); err != nil {
				return err
			}
			if len(page) == 0 {
				break
			}
			if model.Wait(ctx, pause); ctx.Err() != nil {
				return ctx.Err()
			}
		}
	}
	return nil
}

// begun waits until the checkpoint of p, if it has one, lists the handlers of all questions: before
// that, a program without them moves it. It returns ErrNotTaken if a handler began behind an event.
func (p *Projector[Tx]) begun(ctx context.Context, s State, open []provider.Question, types map[string]string) error {
	for pause := waitMin; ; pause = min(2*pause, waitMax) {
		c, err := s.Checkpoint(ctx, provider.Build{Projector: p.name})
		if err != nil || c.Mode == 0 {
			return err
		}
		missing := false
		for i := range open {
			q := &open[i]
			at := slices.IndexFunc(c.Handlers, func(b provider.Began) bool {
				return b.Type == types[q.MessageID] && b.Is(provider.Handler{Name: q.Handler, Was: q.Was})
			})
			if missing = missing || at < 0; at >= 0 && q.Position <= c.Handlers[at].Position {
				return fmt.Errorf("%w: handler %s began at position %d, behind the event at %d",
					ErrNotTaken, q.Handler, c.Handlers[at].Position, q.Position)
			}
		}
		if !missing {
			return nil
		}
		if model.Wait(ctx, pause); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// isRecorded returns ErrNoMarkers if nothing records which events p has applied.
func (p *Projector[Tx]) isRecorded(ctx context.Context, s State) error {
	if p.logged.Load() || p.opts.Markers && !p.unmarked.Load() {
		return nil
	}
	c, err := s.Checkpoint(ctx, provider.Build{Projector: p.name})
	if err == nil && c.Mode == 0 {
		return ErrNoMarkers
	}
	return err
}

// ask returns the questions, about events of a stream, whose events are not applied yet. The checkpoint
// may be behind the segment of the stream. It is read first: an event that the segment has passed was
// applied or parked before.
func (p *Projector[Tx]) ask(ctx context.Context, s State, stream string, page []provider.Question) (open []provider.Question, err error) {
	var c provider.Checkpoint
	if p.opts.Segments > 1 {
		if c, err = s.Checkpoint(ctx, provider.Build{Projector: p.name}); err != nil {
			return nil, err
		}
	}
	outcomes, err := s.Outcomes(ctx, page)
	if err != nil {
		return nil, err
	}
	for i, o := range outcomes {
		switch o {
		case provider.OutcomeUnseen, provider.OutcomeWaiting:
			if o == provider.OutcomeWaiting || len(c.Segments) == 0 || !c.Applied(stream, page[i].Position) {
				open = append(open, page[i])
			}
		case provider.OutcomeStuck:
			return nil, ErrParked
		case provider.OutcomeSkipped:
			return nil, ErrSkipped
		case provider.OutcomePruned:
			return nil, fmt.Errorf("%w: %s at %s", ErrPruned, page[i].MessageID, page[i].Handler)
		}
	}
	return open, nil
}

// visible waits until s shows the events of an append, and returns their questions.
func (p *Projector[Tx]) visible(ctx context.Context, s State, a eventstore.Appended, types map[string]string) ([]provider.Question, error) {
	for pause := waitMin; ; pause = min(2*pause, waitMax) {
		gone, err := isGone(ctx, s, a) // before the stream is read
		if err != nil {
			return nil, err
		}
		open, last, err := p.questions(ctx, s, a, types)
		if err != nil || last == a.Version {
			return open, err
		}
		if gone {
			return nil, fmt.Errorf("%w: version %d of %s", ErrNoEvent, a.Version, a.Stream)
		}
		if model.Wait(ctx, pause); ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

// isGone reports whether the position of an append is settled. If the event is not visible then, it
// never will be. On a replica the answer is no.
func isGone(ctx context.Context, s State, a eventstore.Appended) (bool, error) {
	if a.Position < 1 || a.Version == 0 {
		return false, nil
	}
	page, err := s.LogPage(ctx, provider.LogQuery{After: a.Position - 1, Limit: 1, NoData: true})
	if errors.Is(err, eventstore.ErrUnsafeLog) {
		return false, nil
	}
	return page.End.Position >= a.Position, err
}

// questions returns one question for each handler of each event of an append, in the order of the
// stream, and the version of the last event that s shows; 0 if s shows none of them.
func (p *Projector[Tx]) questions(
	ctx context.Context, s State, a eventstore.Appended, types map[string]string,
) (open []provider.Question, last int64, err error) {
	if a.Version == 0 {
		return nil, 0, nil
	}
	takers := p.takers()
	for raw, err := range s.ReadStream(ctx, a.Stream, a.Version-int64(max(a.Count, 1))) {
		if err != nil {
			return nil, 0, err
		}
		if raw.Version > a.Version {
			break
		}
		last, types[raw.ID] = raw.Version, raw.Type
		if raw.Version == a.Version && a.Position > 0 && raw.Position != a.Position {
			return nil, 0, fmt.Errorf("%w: version %d of %s is at position %d, not %d: this append was rolled back",
				ErrNoEvent, a.Version, a.Stream, raw.Position, a.Position)
		}
		for _, h := range takers[raw.Type] {
			open = append(open, provider.Question{
				Handler: h.Name, Was: h.Was, MessageID: raw.ID, RecordedAt: raw.RecordedAt, Position: raw.Position,
			})
		}
	}
	return open, last, nil
}

// State reads events, and what projectors did with them. Every provider with an event store
// implements it. See Projector.Wait and Projector.Lag.
type State interface {
	modelState
	eventLog
}

// StateOf returns the State of read models whose events are in another database: what projectors
// did is read from model, and events from events.
// The model is a provider, such as provider.Combine returns.
func StateOf(model modelState, events State) State { return twoStores{model, events} }

type twoStores struct {
	modelState
	eventLog
}

// CountLog implements provider.LogCounter.
func (s twoStores) CountLog(ctx context.Context, types []string, after, to int64) (int64, error) {
	if c, ok := s.eventLog.(provider.LogCounter); ok {
		return c.CountLog(ctx, types, after, to)
	}
	return follow.CountPages(ctx, s.eventLog, types, after, to)
}

// modelState is the part of a State that reads what projectors did.
type modelState interface {
	provider.Records
	provider.Progress
	provider.Builds
}

// eventLog is the part of a State that reads events.
type eventLog interface {
	ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error]
	provider.Log
}

// Lag is how far a projector is behind a log.
type Lag struct {
	Events   int64     // number of visible events that are neither applied nor parked
	Oldest   time.Time // when the first of them was recorded; zero if there is none
	Position int64     // every event up to it is applied or parked
	Live     bool      // deliveries are applied; if false, the projector catches up with the log
	// NotBegun are handlers of the projector that do not take events yet. A runner with them has started, next to an older
	// program that reads the log, which records them within about two seconds; or one of this process is about to run.
	NotBegun []string
}

// Lag returns how far p is behind the log of s, counted at this moment. It reads the ids of the
// events behind the checkpoint, so it takes about a second per million.
//   - ErrNoCheckpoint: no runner has read a log for p. A projector on a broker without Markers, or
//     with BrokerOnly, has no lag.
//   - ErrOtherLog: the log of s is not the one that p reads; see StateOf.
func (p *Projector[Tx]) Lag(ctx context.Context, s State) (_ Lag, err error) {
	defer check.Wrap(&err, "lag of %s", p.name)
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
	if lag.NotBegun, err = p.notBegun(ctx, s, takers, c.Handlers); err != nil {
		return Lag{}, err
	}
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

// notBegun returns the handlers that are not recorded, and that a runner has announced, or one of this process will.
func (p *Projector[Tx]) notBegun(ctx context.Context, s provider.Builds, takers map[string][]provider.Handler, recorded []provider.Began) ([]string, error) {
	added := follow.Handlers{ByType: takers}.Added(recorded)
	if len(added) == 0 || p.logged.Load() && !p.announced.Load() {
		return follow.Names(added), nil
	}
	all, err := generation.All(ctx, s, p.name)
	if err != nil {
		return nil, err
	}
	coming := generation.Live(all).Coming
	return follow.Names(slices.DeleteFunc(added, func(b provider.Began) bool { return !follow.Has(coming, b) })), nil
}
