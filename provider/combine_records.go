package provider

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/pauses"
)

// live returns b, with the live generation if its number is zero.
func (p *markedPair[Tx, Outer]) live(ctx context.Context, b Build) (Build, error) {
	if b.Generation != 0 {
		return b, nil
	}
	all, err := p.store.Generations(ctx, b.Projector)
	b.Generation = LiveGeneration(all)
	return b, err
}

// Checkpoint implements Progress. If the read model has none, or was emptied for a rebuild that was
// not completed, and the second store has a copy, the copy is returned: the read model has been lost,
// and all its events are applied again. It has no Token, and its Place no ID.
//   - eventstore.ErrInvalid: the second store has a checkpoint that is no copy.
func (p *markedPair[Tx, Outer]) Checkpoint(ctx context.Context, b Build) (Checkpoint, error) {
	b, err := p.live(ctx, b)
	if err != nil {
		return Checkpoint{}, err
	}
	c, err := p.units.Checkpoint(ctx, b)
	if err != nil || c.Mode != 0 {
		return c, err
	}
	is, err := p.store.Checkpoint(ctx, b)
	if err != nil || is.Mode == 0 || is.Mode == ModeEnded {
		return is, err
	}
	if is.Place.Position > 0 { // a copy has no place
		return c, fmt.Errorf("checkpoint of %s: %w", b, &eventstore.InvalidError{Field: "units", Reason: "the projector ran without markers of its own, " +
			"and its read model does not show which events it has: empty the read model, and give the projector another name"})
	}
	is.Place, is.Token, is.Mode, is.Restored = LogPlace{}, claim.Token{}, ModeCatchUp, true
	if len(is.Handlers) > 0 {
		is.Place.Position = slices.MinFunc(is.Handlers, func(a, b Began) int { return cmp.Compare(a.Position, b.Position) }).Position
	}
	return is, nil
}

// SetCheckpoint implements Progress. The copy in the second store is changed first.
func (p *markedPair[Tx, Outer]) SetCheckpoint(ctx context.Context, b Build, from, to Checkpoint) (bool, error) {
	b, err := p.live(ctx, b)
	if err != nil {
		return false, err
	}
	for {
		is, err := p.store.Checkpoint(ctx, b)
		if err != nil || is.Mode == ModeEnded {
			return false, err
		}
		if is.Mode != 0 && is.Lineage == to.Lineage && (KeepsHandlers(from, to) || slices.EqualFunc(is.Handlers, to.Handlers, Began.equal)) {
			break
		}
		next := is
		next.Mode, next.Lineage, next.Handlers = ModeCatchUp, to.Lineage, to.Handlers
		if set, err := p.store.SetCheckpoint(ctx, b, is, next); set || err != nil {
			if err != nil {
				return false, err
			}
			break
		}
	}
	if from.Restored && from.Token == (claim.Token{}) && from.Place.ID == "" { // perhaps the copy
		now, err := p.units.Checkpoint(ctx, b)
		if err != nil {
			return false, err
		}
		if now.Mode == 0 {
			from = Checkpoint{} // it does not exist
		}
	}
	return p.units.SetCheckpoint(ctx, b, from, to)
}

func (p *markedPair[Tx, Outer]) TakeSegment(ctx context.Context, b Build, number int, token claim.Token) (Segment, bool, error) {
	b, err := p.live(ctx, b)
	if err != nil {
		return Segment{}, false, err
	}
	return p.units.TakeSegment(ctx, b, number, token)
}

func (p *markedPair[Tx, Outer]) DropAhead(ctx context.Context, b Build, position int64, lost map[Lane]bool) error {
	// Units that have looked at the read model before may still park messages: it waits for these.
	fence := Unit{Projector: b.Projector, Generation: b.Generation, Once: true, Switch: &Switch{}}
	if err := p.store.Do(ctx, fence, func(context.Context, Outer, Found) (Closing, error) { return Closing{}, nil }); err != nil {
		return err
	}
	recorded, err := p.units.Asides(ctx, b)
	if err != nil {
		return err
	}
	c, err := p.Checkpoint(ctx, b)
	if err != nil {
		return err
	}
	keeps := map[Lane]bool{}
	var ahead []Parked
	err = p.eachParked(ctx, ParkedFilter{Projector: b.Projector, Generation: b.Number()}, func(row Parked) {
		own, is := recorded[row.MessageID]
		at := max(positionOf(&row, c.Lineage), own)
		again := lost[row.Lane] && at > 0 || !is && at > position
		if keeps[row.Lane] = keeps[row.Lane] || !again; !keeps[row.Lane] {
			ahead = append(ahead, row)
		}
	})
	if err != nil {
		return err
	}
	for page := range slices.Chunk(ahead, 100) {
		if err := p.drop(ctx, b, page); err != nil {
			return err
		}
	}
	return nil
}

// eachParked calls do for each parked message that f selects, in order of Seq.
func (p *markedPair[Tx, Outer]) eachParked(ctx context.Context, f ParkedFilter, do func(Parked)) error {
	for f.Limit = 1000; ; {
		rows, err := p.store.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			return err
		}
		for _, row := range rows {
			f.After = row.Seq
			do(row)
		}
	}
}

// drop resolves parked messages without applying them. While another unit has locked their lane, it asks again.
func (p *markedPair[Tx, Outer]) drop(ctx context.Context, b Build, rows []Parked) error {
	f := ParkedFilter{Projector: b.Projector, Generation: b.Number()}
	for i := range rows {
		f.Seqs = append(f.Seqs, rows[i].Seq)
	}
	for {
		if _, err := p.store.Decide(ctx, f, StateWaiting, Decision{}); err != nil { // stuck ones cannot be resolved
			return err
		}
		rows, err := p.store.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			return err
		}
		u := Unit{Projector: b.Projector, Generation: b.Generation}
		for i := range rows {
			u.Messages = append(u.Messages, Message{ID: rows[i].MessageID, Lane: rows[i].Lane, Parked: &rows[i]})
		}
		var live []bool
		err = p.store.Do(ctx, u, func(_ context.Context, _ Outer, found Found) (Closing, error) {
			live = found.Live
			return Closing{}, nil
		})
		if err != nil || !slices.Contains(live, false) {
			return err
		}
		if pauses.Wait(ctx, dropAgain, nil); ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// dropAgain is the pause before drop asks again.
const dropAgain = 5 * time.Millisecond

func (p *markedPair[Tx, Outer]) CanReplay(ctx context.Context, b Build) (bool, error) {
	c, err := p.Checkpoint(ctx, b)
	return err == nil && !c.Restored && !c.Restoring, err
}

func (p *markedPair[Tx, Outer]) Unapplied(ctx context.Context, b Build, messages []Message) ([]bool, error) {
	b, err := p.live(ctx, b)
	if err != nil {
		return nil, err
	}
	return p.units.Unapplied(ctx, b, messages)
}

func (p *markedPair[Tx, Outer]) PruneApplied(ctx context.Context, b Build, handlers []string, limit int) (int, error) {
	b, err := p.live(ctx, b)
	if err != nil {
		return 0, err
	}
	return p.units.PruneApplied(ctx, b, handlers, limit)
}

// Outcomes implements Records. The parked messages come first: one that is applied meanwhile has a marker.
func (p *markedPair[Tx, Outer]) Outcomes(ctx context.Context, questions []Question) ([]Outcome, error) {
	outcomes, err := p.store.Outcomes(ctx, questions)
	if err != nil {
		return nil, err
	}
	questions = slices.Clone(questions)
	for i := range questions {
		q := &questions[i]
		b, err := p.live(ctx, Build{q.Projector(), q.Generation})
		if err != nil {
			return nil, err
		}
		q.Generation = b.Generation
		for j := i + 1; j < len(questions); j++ { // usually all are of one projector
			if o := &questions[j]; o.Generation == 0 && o.Projector() == b.Projector {
				o.Generation = b.Generation
			}
		}
	}
	own, err := p.units.Outcomes(ctx, questions)
	if err != nil {
		return nil, err
	}
	for i, o := range outcomes {
		if o != OutcomeWaiting && o != OutcomeStuck && o != OutcomeSkipped {
			outcomes[i] = own[i]
		}
	}
	return outcomes, nil
}

// lostEvery is how often Prune looks for records of messages that were skipped.
const lostEvery = time.Minute

// Prune implements Records. Before it deletes the rows of skipped messages, it deletes their records.
func (p *markedPair[Tx, Outer]) Prune(ctx context.Context, projector string, handlers []string, window time.Duration, limit int) (n int, err error) {
	all, err := p.store.Generations(ctx, projector)
	if err != nil {
		return 0, err
	}
	if len(all) == 0 {
		all = []Generation{{Build: Build{projector, 1}}}
	}
	for _, g := range all {
		if p.isTime(g.Build) {
			if _, err := p.Lost(ctx, g.Build); err != nil {
				return n, err
			}
		}
		some, err := p.units.Prune(ctx, g.Build, handlers, window, limit)
		if n += some; err != nil {
			return n, err
		}
	}
	some, err := p.store.Prune(ctx, projector, append(slices.Clone(handlers), projector+outputHandler), window, limit)
	return n + some, err
}

// isTime reports once in lostEvery that it is time to look for skipped messages of a generation.
func (p *markedPair[Tx, Outer]) isTime(b Build) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now() //nolint:forbidigo // only how often
	if now.Sub(p.pruned[b]) < lostEvery {
		return false
	}
	p.pruned[b] = now
	return true
}

func (p *markedPair[Tx, Outer]) Shows(ctx context.Context, pairs []TablePair) (bool, error) {
	return p.units.Shows(ctx, pairs)
}

func (p *markedPair[Tx, Outer]) Lost(ctx context.Context, b Build) (ids []string, err error) {
	recorded, err := p.units.Asides(ctx, b) // first: recorded messages were parked before
	if err != nil || len(recorded) == 0 {
		return nil, err
	}
	var skipped []string
	f := ParkedFilter{Projector: b.Projector, Generation: b.Number(), States: []ParkedState{StateWaiting, StateStuck, StateSkipped}}
	err = p.eachParked(ctx, f, func(row Parked) {
		if _, is := recorded[row.MessageID]; is && row.State == StateSkipped {
			skipped = append(skipped, row.MessageID)
		}
		delete(recorded, row.MessageID)
	})
	if err != nil {
		return nil, err
	}
	for id, position := range recorded {
		if position > 0 {
			ids = append(ids, id)
		} else {
			skipped = append(skipped, id) // it is in no log: it cannot be applied again
		}
	}
	slices.SortFunc(ids, func(a, b string) int { return cmp.Compare(recorded[a], recorded[b]) })
	if len(skipped) > 0 {
		err = p.units.Forget(ctx, b, skipped)
	}
	return ids, err
}

func (p *markedPair[Tx, Outer]) SetGeneration(ctx context.Context, all ...Generation) (bool, error) {
	if err := CheckGeneration(all...); err != nil {
		return false, err
	}
	stored, err := p.store.Generations(ctx, all[0].Projector)
	if err != nil {
		return false, err
	}
	set, err := p.store.SetGeneration(ctx, all...)
	if err != nil || !set {
		return false, err
	}
	for _, g := range all {
		if !slices.ContainsFunc(stored, func(was Generation) bool { return was.Build == g.Build && was.State == g.State }) {
			_ = p.units.SetState(ctx, g) // if this fails, units of the second store check the state too
		}
	}
	return true, nil
}

func (p *markedPair[Tx, Outer]) Unlogged(ctx context.Context, b Build, handler, after string, limit int) ([]string, error) {
	return p.units.Unlogged(ctx, b, handler, after, limit)
}

// ClearGeneration implements Builds. The second store checks the state of the generation.
func (p *markedPair[Tx, Outer]) ClearGeneration(ctx context.Context, b Build, handlers []string, tables []TablePair, limit int) (int, error) {
	if n, err := p.store.ClearGeneration(ctx, b, handlers, nil, limit); n > 0 || err != nil {
		return n, err
	}
	n, err := p.units.ClearGeneration(ctx, b, handlers, tables, limit)
	if err != nil {
		err = fmt.Errorf("clear a generation: %w", err)
	}
	return n, err
}
