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

func newMarkedPair[Tx, Outer any](units MarkerUnits[Tx], store Provider[Outer]) *markedPair[Tx, Outer] {
	return &markedPair[Tx, Outer]{
		Parking: store, Liveness: store, Builds: store, Leases: store, units: units, store: store,
		pruned: map[Build]time.Time{},
	}
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

// unmarked returns the messages without Mark: the second store has no markers of them.
func unmarked(msgs []Message) []Message {
	msgs = slices.Clone(msgs)
	for i := range msgs {
		msgs[i].Mark = false
	}
	return msgs
}

// isStale reports whether a message is recorded as parked that was not known to be so: its lane may be held
// now.
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

// emit commits output of a unit in the second store, with a marker for each message of it, unless it has
// that marker.
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
