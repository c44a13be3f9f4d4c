package provider

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Combine returns a Provider with the units of a store that has nothing else, such as Redis, and
// the parked messages, leases and generations of another store, such as PostgreSQL.
//
// A unit of the second store is open while the handlers run, so holds and parked messages are exact. It commits last.
//
// If units keep markers (MarkerUnits), the markers and the checkpoint are next to the read model:
//   - If the second commit does not happen, the messages come again, and their markers show that they are applied.
//   - Output is committed first, in the second store, with a marker for each message of it.
//   - If the read model goes back to an earlier state, so does its checkpoint, and the reader of the log applies the
//     rest again. For that, the second store has a copy of the checkpoint's handlers. If it is a Log, runners read it.
//
// Otherwise there are no markers and no output, and if the second commit does not happen, the messages take effect again.
//
// There are no dry runs, and no snapshots except for comparisons.
func Combine[Tx, Outer any](units Units[Tx], store Provider[Outer]) Provider[Tx] {
	if m, ok := units.(MarkerUnits[Tx]); ok && m.Keeps().Markers {
		return &markedPair[Tx, Outer]{
			Parking: store, Liveness: store, Builds: store, Leases: store, units: m, store: store, pruned: map[Build]time.Time{},
		}
	}
	return &combined[Tx, Outer]{Parking: store, Liveness: store, Records: store, Progress: store, Builds: store, Leases: store, units: units, store: store}
}

type combined[Tx, Outer any] struct {
	Parking
	Liveness
	Records
	Progress
	Builds
	Leases
	units Units[Tx]
	store Provider[Outer]
}

var errNotCombined = &Error{
	Class: ClassPermanent, Code: "not_kept", Err: errors.New("units of two stores have no output, no dry runs and no snapshots"),
}

func (b *combined[Tx, Outer]) Do(ctx context.Context, u Unit, run func(context.Context, Tx, Found) (Closing, error)) error {
	if u.DryRun != nil || u.Switch != nil && u.Switch.Snapshot {
		return errNotCombined
	}
	inner := Unit{Projector: u.Projector, Generation: u.Generation, Messages: u.Messages, Once: true}
	u.Messages, u.Once = unmarked(u.Messages), true // a marker in one store does not prove the commit of the other
	return b.store.Do(ctx, u, func(ctx context.Context, _ Outer, found Found) (c Closing, err error) {
		err = b.units.Do(ctx, inner, func(ctx context.Context, tx Tx, own Found) (Closing, error) {
			found.Begin = own.Begin // statements of the handlers are in this store
			if c, err = run(ctx, tx, found); err == nil && len(c.Output) > 0 {
				err = errNotCombined
			}
			return Closing{}, err
		})
		return c, err
	})
}

func (b *combined[Tx, Outer]) Keeps() Keeps { return Keeps{} }

func (b *combined[Tx, Outer]) recorder() any { return b.store }

// LogOf returns the log of a store, or of the second store of Combine if the first one keeps markers; else nil.
func LogOf(store any) Log {
	if pair, ok := store.(interface{ second() any }); ok {
		store = pair.second()
	}
	log, _ := store.(Log)
	return log
}

// ReadyFor implements ReadyChecker.
func (b *combined[Tx, Outer]) ReadyFor(ctx context.Context, service Service) error {
	return readyFor(ctx, service, b.store, b.units)
}

// readyFor calls ReadyChecker of the stores that have it.
func readyFor(ctx context.Context, service Service, stores ...any) (err error) {
	for _, store := range stores {
		if c, ok := store.(ReadyChecker); ok {
			err = errors.Join(err, c.ReadyFor(ctx, service))
		}
	}
	return err
}

// markedPair is a Provider and a Restorer of units that keep markers and checkpoints, and a second store. See Combine.
type markedPair[Tx, Outer any] struct {
	Parking
	Liveness
	Builds
	Leases
	units MarkerUnits[Tx]
	store Provider[Outer]

	mu     sync.Mutex
	pruned map[Build]time.Time
}

func (p *markedPair[Tx, Outer]) second() any { return p.store }

func (p *markedPair[Tx, Outer]) recorder() any { return p.store }

// Keeps implements Units. The output is kept by the second store.
func (p *markedPair[Tx, Outer]) Keeps() Keeps {
	k := p.units.Keeps()
	k.Output = p.store.Keeps().Output
	return k
}

// ReadyFor implements ReadyChecker.
func (p *markedPair[Tx, Outer]) ReadyFor(ctx context.Context, service Service) error {
	return readyFor(ctx, service, p.store, p.units)
}

func (p *markedPair[Tx, Outer]) Do(ctx context.Context, u Unit, run func(context.Context, Tx, Found) (Closing, error)) (err error) {
	if u.DryRun != nil || u.Switch != nil && u.Switch.Snapshot && u.Switch.Compare == nil {
		return errNotCombined
	}
	if u.Switch != nil {
		if err := CheckSwitch(&u); err != nil {
			return &Error{Class: ClassPermanent, Code: "invalid", Err: err}
		}
		if err := p.compareFirst(ctx, &u); err != nil {
			return notBegun(err)
		}
	}
	one := pairUnit[Tx, Outer]{p: p, u: u, recorded: map[string]bool{}}
	if u.IsReplay() { // it must not be applied before the events that an empty read model has lost
		c, err := p.store.Checkpoint(ctx, u.Build())
		if err != nil {
			return notBegun(err)
		}
		one.u.Checkpointed = c.Mode != 0
	}
	for {
		switch err = one.do(ctx, run); {
		case errors.Is(err, errStale):
		case errors.Is(err, errEmits):
			if err = p.emit(ctx, u, one.output); err != nil {
				return err
			}
			one.emitted = true
		default:
			return err
		}
	}
}

// notBegun returns an error of a query before the unit: no message is to blame for it.
func notBegun(err error) error {
	if _, ok := errors.AsType[*Error](err); ok {
		return err
	}
	return &Error{Class: ClassTransient, Code: "begin", Err: err}
}

// compareFirst looks for differences while other units go on: the unit, for which they wait, looks only at
// these rows. A Snapshot is not possible, and not needed then.
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
	p        *markedPair[Tx, Outer]
	u        Unit
	inner    Unit // as the read model's store gets it
	output   []OutboxMessage
	emitted  bool            // the output is committed
	recorded map[string]bool // ids of messages that were recorded as parked before the second store was asked
}

var (
	errEmits = errors.New("the output must be committed first")
	errStale = errors.New("another unit has parked a message since the second store was asked which lanes are held")
)

func (o *pairUnit[Tx, Outer]) do(ctx context.Context, run func(context.Context, Tx, Found) (Closing, error)) error {
	outer := o.split()
	var commit func(context.Context) error
	err := o.p.store.Do(ctx, outer, func(ctx context.Context, _ Outer, found Found) (c Closing, err error) {
		commit, err = o.p.units.DoCombined(ctx, o.inner, func(ctx context.Context, tx Tx, own Found) (Closing, error) {
			if o.isStale(&own) {
				return c, errStale
			}
			own.Held, own.Suspect = found.Held, found.Suspect
			own.setLive(found.Live)
			var err error
			if c, err = run(ctx, tx, own); err == nil && len(c.Output) > 0 && !o.emitted {
				o.output, err = c.Output, errEmits
			}
			return c, err
		})
		c.Output = nil
		return c, err
	})
	if err == nil && commit != nil {
		err = commit(context.WithoutCancel(ctx))
	}
	if err == nil && o.u.Switch != nil {
		for _, g := range o.u.Switch.Set { // if this fails, readers and the second store find out
			_ = o.p.units.SetState(ctx, g)
		}
	}
	return err
}

// split sets inner, and returns the unit as the second store gets it.
func (o *pairUnit[Tx, Outer]) split() (outer Unit) {
	o.inner, outer = o.u, o.u
	o.inner.Careful, o.inner.Serial = nil, false
	outer.Reader, outer.Advance, outer.Segment, outer.Restore, outer.Once = nil, nil, 0, false, true
	outer.Messages = unmarked(o.u.Messages)
	if o.u.Switch == nil {
		return outer
	}
	own := *o.u.Switch
	own.Last = nil
	o.inner.Switch, outer.Switch = &own, &Switch{Set: own.Set}
	outer.Switch.Last = func(ctx context.Context, live Live) (msgs []Message, err error) {
		o.inner.Messages, err = o.last(ctx, live.Checkpoint.Generation)
		return unmarked(o.inner.Messages), err
	}
	return outer
}

// unmarked returns the messages without Mark.
func unmarked(msgs []Message) []Message {
	msgs = slices.Clone(msgs)
	for i := range msgs {
		msgs[i].Mark = false
	}
	return msgs
}

// isStale reports whether a message is recorded as parked that was not known to be so: its lane may be held.
func (o *pairUnit[Tx, Outer]) isStale(own *Found) (stale bool) {
	for i := range own.Recorded {
		if id := o.inner.Messages[i].ID; own.Recorded[i] && !o.inner.IsReplay() && !o.recorded[id] {
			o.recorded[id], stale = true, true
		}
	}
	return stale
}

// setLive sets Live: a parked message is live if it is so in both stores. Others are not fresh.
func (f *Found) setLive(live []bool) {
	for i := range live {
		live[i] = live[i] && (f.Live == nil || f.Live[i])
		if !live[i] {
			clear(f.Fresh[i])
		}
	}
	f.Live = live
}

// last returns the messages of Switch.Last, with the checkpoint of the read model's store.
func (o *pairUnit[Tx, Outer]) last(ctx context.Context, live int) ([]Message, error) {
	if o.u.Switch.Last == nil {
		return nil, nil
	}
	b := Build{o.u.Projector, live}
	c, err := o.p.Checkpoint(ctx, b)
	if err != nil {
		return nil, err
	}
	return o.u.Switch.Last(ctx, Live{Checkpoint: c, Unapplied: func(ctx context.Context, m []Message) ([]bool, error) {
		return o.p.units.Unapplied(ctx, b, m)
	}})
}

// positionOf returns the position of a parked event in a log, or -1: it is not there.
func positionOf(p *Parked, lineage string) int64 {
	of, _, _ := strings.Cut(p.Headers[HeaderLog], "/")
	if n, err := strconv.ParseInt(p.Headers[HeaderPosition], 10, 64); err == nil && n > 0 && of == lineage {
		return n
	}
	return -1
}

// outputHandler is the handler in the markers of output. No handler of a projector has this name.
const outputHandler = "/ output"

// emit commits output of a unit in the second store, unless it was, with a marker for each message of it.
func (p *markedPair[Tx, Outer]) emit(ctx context.Context, of Unit, output []OutboxMessage) error {
	u := Unit{Projector: of.Projector, Generation: of.Generation}
	var all []OutboxMessage
	for _, m := range output {
		id := m.Topic + "/" + m.ID
		if slices.ContainsFunc(u.Messages, func(o Message) bool { return o.ID == id }) {
			continue // one topic never has two messages with an id
		}
		all = append(all, m)
		u.Messages = append(u.Messages, Message{ID: id, Lane: LaneOfMessage(id), Mark: true, Handlers: []Handler{{Name: of.Projector + outputHandler}}})
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

// MarkerUnits are Units of a store that keeps markers and checkpoints next to the read model, and
// nothing else, such as Redis. Keeps().Markers must be true. Combine adds a second store.
//
// Parked messages are in the second store. Next to the read model is a record of each of them (Asides), so that
// one is applied once although the two stores commit one after the other:
//   - A message is parked in the second store first, and then recorded.
//   - The writes of a parked message and the end of its record are one commit. If the second store is not changed
//     after it, the message comes again, has a marker and no record, and is not applied.
type MarkerUnits[Tx any] interface {
	Units[Tx]
	Progress

	// DoCombined is Do for a unit whose parked messages, output and generations are in a second store. Unit.Switch has
	// no Last, and Set is not stored. It calls run once or several times, and commits what run has written.
	//   - Unit.Advance moves the checkpoint up to the first parked message.
	//   - commit, if not nil, must be called after the second store has committed: it records the
	//     parked messages, and moves the checkpoint to Advance.To.
	//   - Unit.Switch shows tables before the second store commits. If that does not commit, the reader
	//     of the live generation notices (Shows), and shows its own.
	DoCombined(ctx context.Context, u Unit, run func(context.Context, Tx, Found) (Closing, error)) (commit func(context.Context) error, err error)

	// Outcomes answers questions with a Generation. A recorded message is OutcomeWaiting.
	Outcomes(ctx context.Context, questions []Question) ([]Outcome, error)

	// Asides returns the recorded messages of a generation: their ids, and positions or 0.
	Asides(ctx context.Context, b Build) (map[string]int64, error)

	// Forget deletes the records of messages that were skipped. Their markers stay.
	Forget(ctx context.Context, b Build, ids []string) error

	// Prune, Unlogged and ClearGeneration are those of Records and Builds, for markers, records and tables.
	Prune(ctx context.Context, b Build, handlers []string, window time.Duration, limit int) (int, error)
	Unlogged(ctx context.Context, b Build, handler, after string, limit int) ([]string, error)
	ClearGeneration(ctx context.Context, b Build, handlers []string, tables []TablePair, limit int) (int, error)

	// SetState changes the checkpoint as Builds.SetGeneration does for the State of g.
	SetState(ctx context.Context, g Generation) error

	// Shows is that of Restorer.
	Shows(ctx context.Context, pairs []TablePair) (bool, error)

	// Differing returns the keys of at most 100,000 rows that differ, while units may change them.
	Differing(ctx context.Context, c Comparison) ([]Difference, error)
}

// Restorer is a capability of a Provider whose read model may go back to an earlier state, as that of Combine.
type Restorer interface {
	// Lost returns the ids, in order of position, of the events that are recorded as parked, although they are neither
	// parked nor applied: the read model has lost them. A unit with Restore applies them again.
	Lost(ctx context.Context, b Build) ([]string, error)

	// DropAhead deletes parked messages that are applied again, in their place among the events that were lost: the
	// first messages of each lane, as far as they are behind the position and the read model has no record of
	// them. In a lane of lost, which are those of Lost events, it deletes all. The log, or Lost, brings them again.
	DropAhead(ctx context.Context, b Build, position int64, lost map[Lane]bool) error

	// CanReplay reports whether parked messages can be applied now: nothing was Lost, or all is applied again.
	CanReplay(ctx context.Context, b Build) (bool, error)

	// Shows reports whether readers see the tables of pairs under their other names.
	Shows(ctx context.Context, pairs []TablePair) (bool, error)
}
