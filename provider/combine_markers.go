package provider

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/kinora-go/kinora/claim"
)

// markedPair is a Provider of units that keep markers and checkpoints, and a second store. See Combine.
type markedPair[Tx, Outer any] struct {
	Parking
	Liveness
	claim.Leases
	units MarkerUnits[Tx]
	store Provider[Outer]
}

func newMarkedPair[Tx, Outer any](units MarkerUnits[Tx], store Provider[Outer]) *markedPair[Tx, Outer] {
	return &markedPair[Tx, Outer]{Parking: store, Liveness: store, Leases: store, units: units, store: store}
}

func (p *markedPair[Tx, Outer]) second() any { return p.store }

// Keeps implements Units. The output is kept by the second store.
func (p *markedPair[Tx, Outer]) Keeps() Keeps {
	k := p.units.Keeps()
	k.Output = p.store.Keeps().Output
	return k
}

// ReadyFor calls ReadyChecker of both stores.
func (p *markedPair[Tx, Outer]) ReadyFor(ctx context.Context, service Service) error {
	return errors.Join(readyFor(ctx, service, p.store), readyFor(ctx, service, p.units))
}

// Do implements Units.
func (p *markedPair[Tx, Outer]) Do(ctx context.Context, u Unit, run func(context.Context, Tx, Found) (Closing, error)) error {
	if u.DryRun != nil || u.Switch != nil && u.Switch.Snapshot && u.Switch.Compare == nil {
		return errNotCombined
	}
	if u.Switch != nil {
		if err := CheckSwitch(&u); err != nil {
			return &Error{Class: ClassPermanent, Code: "invalid", Err: err}
		}
		if err := p.compareFirst(ctx, &u); err != nil {
			return err
		}
	}
	one := pairUnit[Tx, Outer]{p: p, u: u}
	err := one.do(ctx, run)
	if err == errEarlier { //nolint:errorlint // it is never wrapped
		if one.firstParked, err = p.firstParked(ctx, &u); err == nil {
			err = one.do(ctx, run)
		}
	}
	if err == errEmits { //nolint:errorlint // it is never wrapped
		if err = p.emit(ctx, u.Projector, one.output); err == nil {
			one.emitted = true
			err = one.do(ctx, run)
		}
	}
	return err
}

// compareFirst looks for differences while other units go on, so that the unit itself, for which they
// wait, looks only at the rows that differed. A Snapshot is not possible, and not needed then.
func (p *markedPair[Tx, Outer]) compareFirst(ctx context.Context, u *Unit) error {
	s := *u.Switch
	s.Snapshot, u.Switch = false, &s
	if s.Compare == nil || s.Compare.Only != nil {
		return nil
	}
	c := *s.Compare
	only, err := p.units.Differing(ctx, c)
	c.Only, s.Compare = append([]Difference{}, only...), &c
	return err
}

// pairUnit is one unit of both stores.
type pairUnit[Tx, Outer any] struct {
	p           *markedPair[Tx, Outer]
	u           Unit
	output      []OutboxMessage
	emitted     bool           // the output is committed
	firstParked map[Lane]int64 // nil: not asked yet
}

var (
	errEmits   = errors.New("the output must be committed first")
	errEarlier = errors.New("an event may be before the parked ones of its lane")
)

func (o *pairUnit[Tx, Outer]) do(ctx context.Context, run func(context.Context, Tx, Found) (Closing, error)) error {
	inner, outer := o.u, o.u
	inner.Careful, inner.Serial = nil, false
	outer.Reader, outer.Advance, outer.Restore, outer.Once = nil, nil, false, true
	outer.Messages = unmarked(o.u.Messages)
	if o.u.Switch != nil {
		own := *o.u.Switch
		own.Last = nil
		inner.Switch, outer.Switch = &own, &Switch{Set: own.Set}
		outer.Switch.Last = func(ctx context.Context, live Live) (msgs []Message, err error) {
			inner.Messages, err = o.last(ctx, live.Checkpoint.Generation)
			return unmarked(inner.Messages), err
		}
	}
	var finish Finish
	var failed error
	err := o.p.store.Do(ctx, outer, func(ctx context.Context, _ Outer, found Found) (c Closing, err error) {
		if o.isEarlier(&inner, &found) {
			return c, errEarlier
		}
		finish, err = o.p.units.DoCombined(ctx, inner, func(ctx context.Context, tx Tx, own Found) (Closing, error) {
			own.Held, own.Live, own.Suspect = found.Held, found.Live, found.Suspect
			own.keepLive()
			var err error
			if c, err = run(ctx, tx, own); err == nil && len(c.Output) > 0 && !o.emitted {
				o.output, err = c.Output, errEmits
			}
			return c, err
		})
		c.Output, failed = nil, err
		return c, err
	})
	if errors.Is(failed, errEmits) || errors.Is(err, errEarlier) {
		return cmp.Or(unwrapped(failed, errEmits), errEarlier)
	}
	end := finish.Commit
	if err != nil {
		end = finish.Rollback
	}
	if end != nil {
		err = cmp.Or(err, end(context.WithoutCancel(ctx)))
	}
	if err == nil && o.u.Switch != nil {
		for _, g := range o.u.Switch.Set { // if this fails, readers and the second store find out
			_ = o.p.units.SetState(ctx, g)
		}
	}
	return err
}

// unwrapped returns target if err contains it, else nil.
func unwrapped(err, target error) error {
	if errors.Is(err, target) {
		return target
	}
	return nil
}

// unmarked returns the messages without Mark: the second store has no markers of them.
func unmarked(msgs []Message) []Message {
	msgs = slices.Clone(msgs)
	for i := range msgs {
		msgs[i].Mark = false
	}
	return msgs
}

// keepLive makes parked messages that are not live not fresh.
func (f *Found) keepLive() {
	for i := range f.Live {
		if !f.Live[i] {
			clear(f.Fresh[i])
		}
	}
}

// last returns the messages of Switch.Last, with the checkpoint of the read model's store.
func (o *pairUnit[Tx, Outer]) last(ctx context.Context, live int) ([]Message, error) {
	if o.u.Switch.Last == nil {
		return nil, nil
	}
	b := Build{o.u.Projector, live}
	c, err := o.p.units.Checkpoint(ctx, b)
	if err != nil {
		return nil, err
	}
	return o.u.Switch.Last(ctx, Live{Checkpoint: c, Unapplied: func(ctx context.Context, m []Message) ([]bool, error) {
		return o.p.units.Unapplied(ctx, b, m)
	}})
}

// isEarlier reports whether an event of the reader is in a held lane, and may be before the parked
// messages of that lane: the read model went back to an earlier state. Such an event is not held.
func (o *pairUnit[Tx, Outer]) isEarlier(inner *Unit, found *Found) bool {
	if inner.Reader == nil && inner.Advance == nil {
		return false
	}
	for i := range found.Held {
		m := &inner.Messages[i]
		if !found.Held[i] || m.Position == 0 {
			continue
		}
		if o.firstParked == nil {
			return true
		}
		first, known := o.firstParked[m.Lane]
		found.Held[i] = !known || m.Position >= first
	}
	return false
}

// firstParked returns the positions of the first parked messages of the unit's lanes.
func (p *markedPair[Tx, Outer]) firstParked(ctx context.Context, u *Unit) (map[Lane]int64, error) {
	first := map[Lane]int64{}
	for _, lane := range u.Lanes() {
		first[lane] = 0
	}
	f := ParkedFilter{Projector: u.Projector, Generation: u.Build().Number(), Limit: 1000}
	for {
		rows, err := p.store.Parked(ctx, f)
		if err != nil || len(rows) == 0 {
			maps.DeleteFunc(first, func(_ Lane, position int64) bool { return position == 0 })
			return first, err
		}
		for i := range rows {
			f.After = rows[i].Seq
			if at, asked := first[rows[i].Lane]; asked && at == 0 {
				first[rows[i].Lane] = positionOf(&rows[i])
			}
		}
	}
}

// positionOf returns the position of a parked event, or -1: then nothing is before it.
func positionOf(p *Parked) int64 {
	if n, err := strconv.ParseInt(p.Headers[HeaderPosition], 10, 64); err == nil && n > 0 {
		return n
	}
	return -1
}

// outputHandler is the handler in the markers of output. No handler of a projector has this name.
const outputHandler = "/ output"

// emit commits output in the second store, with a marker for each message of it, unless it has that
// marker.
func (p *markedPair[Tx, Outer]) emit(ctx context.Context, projector string, output []OutboxMessage) error {
	u := Unit{Projector: projector}
	var all []OutboxMessage
	for _, m := range output {
		id := m.Topic + "/" + m.ID
		if slices.ContainsFunc(u.Messages, func(o Message) bool { return o.ID == id }) {
			continue // one topic never has two messages with an id
		}
		all = append(all, m)
		u.Messages = append(u.Messages, Message{ID: id, Lane: LaneOfMessage(id), Mark: true, Handlers: []Handler{{Name: projector + outputHandler}}})
	}
	return p.store.Do(ctx, u, func(_ context.Context, _ Outer, found Found) (c Closing, _ error) {
		for i, m := range all {
			if found.Fresh[i][0] {
				c.Output = append(c.Output, m)
			}
		}
		return c, nil
	})
}

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
// and all its events are applied again.
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
	is.Place, is.Token, is.Mode, is.Restored = LogPlace{}, claim.Token{}, ModeCatchUp, true
	for i, h := range is.Handlers {
		if i == 0 || h.Position < is.Place.Position {
			is.Place.Position = h.Position
		}
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
		if is.Mode != 0 && is.Lineage == to.Lineage && slices.Equal(is.Handlers, to.Handlers) {
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
	if from.Restored {
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

// Unapplied implements Progress.
func (p *markedPair[Tx, Outer]) Unapplied(ctx context.Context, b Build, messages []Message) ([]bool, error) {
	b, err := p.live(ctx, b)
	if err != nil {
		return nil, err
	}
	return p.units.Unapplied(ctx, b, messages)
}

// PruneApplied implements Progress.
func (p *markedPair[Tx, Outer]) PruneApplied(ctx context.Context, b Build, handlers []string, limit int) (int, error) {
	b, err := p.live(ctx, b)
	if err != nil {
		return 0, err
	}
	return p.units.PruneApplied(ctx, b, handlers, limit)
}

// Outcomes implements Records. The second store has the parked messages, and is asked first: a message
// that is applied meanwhile is found by its marker then.
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
		if _, err := p.Lost(ctx, g.Build); err != nil {
			return n, err
		}
		some, err := p.units.Prune(ctx, g.Build, handlers, window, limit)
		if n += some; err != nil {
			return n, err
		}
	}
	some, err := p.store.Prune(ctx, projector, append(slices.Clone(handlers), projector+outputHandler), window, limit)
	return n + some, err
}

// Lost implements Restorer.
func (p *markedPair[Tx, Outer]) Lost(ctx context.Context, b Build) (ids []string, err error) {
	recorded, err := p.units.Asides(ctx, b) // first: what is recorded was parked before
	if err != nil || len(recorded) == 0 {
		return nil, err
	}
	var skipped []string
	f := ParkedFilter{
		Projector: b.Projector, Generation: b.Number(), States: []ParkedState{StateWaiting, StateStuck, StateSkipped}, Limit: 1000,
	}
	for {
		rows, err := p.store.Parked(ctx, f)
		if err != nil {
			return nil, err
		}
		if len(rows) == 0 {
			break
		}
		for i := range rows {
			f.After = rows[i].Seq
			if _, is := recorded[rows[i].MessageID]; is && rows[i].State == StateSkipped {
				skipped = append(skipped, rows[i].MessageID)
			}
			delete(recorded, rows[i].MessageID)
		}
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

// Generations implements Builds.
func (p *markedPair[Tx, Outer]) Generations(ctx context.Context, projector string) ([]Generation, error) {
	return p.store.Generations(ctx, projector)
}

// SetGeneration implements Builds.
func (p *markedPair[Tx, Outer]) SetGeneration(ctx context.Context, g Generation) (bool, error) {
	set, err := p.store.SetGeneration(ctx, g)
	if set {
		if err := p.units.SetState(ctx, g); err != nil {
			return true, nil //nolint:nilerr // units of the second store check the state too
		}
	}
	return set, err
}

// Unlogged implements Builds.
func (p *markedPair[Tx, Outer]) Unlogged(ctx context.Context, b Build, handlers []string) (bool, error) {
	return p.units.Unlogged(ctx, b, handlers)
}

// ClearGeneration implements Builds. The second store checks the state of the generation.
func (p *markedPair[Tx, Outer]) ClearGeneration(ctx context.Context, b Build, handlers, tables []string, limit int) (int, error) {
	if n, err := p.store.ClearGeneration(ctx, b, handlers, nil, limit); n > 0 || err != nil {
		return n, err
	}
	n, err := p.units.ClearGeneration(ctx, b, handlers, tables, limit)
	if err != nil {
		return n, fmt.Errorf("clear a generation: %w", err)
	}
	return n, nil
}
