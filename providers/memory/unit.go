package memory

import (
	"context"
	"errors"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// Do implements provider.Units. It calls run once. Since transactions run one after another, the opening waits for
// nothing but its turn: no marker and no lane can be in the hands of another unit.
func (db *DB) Do(ctx context.Context, u provider.Unit, run func(ctx context.Context, tx *Model, found provider.Found) (provider.Closing, error)) error {
	var changes []provider.Change
	err := db.unit(ctx, func(tx *Model) error {
		if u.DryRun != nil {
			tx.wrote = map[cell]struct{}{}
		}
		found := tx.staged.openUnit(u, db.now())
		closing, err := run(ctx, tx, found)
		if err != nil {
			return err
		}
		if err := db.InTx(tx).Enqueue(ctx, closing.Output...); err != nil {
			return classify(err, provider.ClassUnknown)
		}
		tx.staged.closeUnit(u, found, closing.Park, db.now())
		changes, err = tx.changes()
		return err
	})
	if err == nil && u.DryRun != nil {
		u.DryRun(changes)
	}
	return err
}

// Switch implements provider.Units.
func (db *DB) Switch(ctx context.Context, projector string, fn func(ctx context.Context, tx *Model, live int) (int, error)) error {
	return db.unit(ctx, func(tx *Model) error {
		next, err := fn(ctx, tx, tx.staged.generation(projector))
		tx.staged.live = tx.staged.live.put(projector, next)
		return err
	})
}

// Keeps implements provider.Units.
func (db *DB) Keeps() provider.Keeps {
	return provider.Keeps{Atomic: true, Markers: true, Output: true, DryRun: true}
}

// unit runs fn in a transaction, and returns an *Error. A dry run is not committed.
func (db *DB) unit(ctx context.Context, fn func(tx *Model) error) error {
	tx, err := db.begin(ctx)
	if err != nil {
		return classify(err, provider.ClassTransient) // it waited for other units: the messages are not to blame
	}
	defer tx.end()
	defer tx.breakOff(ctx)()
	if err := fn(tx); err != nil {
		return ofRun(err)
	}
	if tx.wrote == nil {
		err = tx.commit(ctx)
	} else {
		err = ctx.Err()
	}
	if err != nil {
		return classify(err, provider.ClassUnknown)
	}
	return nil
}

// openUnit finds what u has to run, and inserts its markers.
func (s *state) openUnit(u provider.Unit, now time.Time) provider.Found {
	n := len(u.Messages)
	found := provider.Found{Fresh: make([][]bool, n), Held: make([]bool, n), Begin: func(int) {}}
	if n > 0 && u.Messages[0].Parked != nil {
		found.Live = s.liveOf(u, now)
	}
	generation := s.generation(u.Projector)
	for i, m := range u.Messages {
		gone := found.Live != nil && !found.Live[i]
		found.Fresh[i] = make([]bool, len(m.Handlers))
		for j, h := range m.Handlers {
			found.Fresh[i][j] = !gone && (!m.Mark || s.mark(h, generation, m.ID, now))
		}
		found.Held[i] = m.Parked == nil && s.holds.has(laneKey(u.Projector, m.Lane))
	}
	if w := u.Careful; w != nil {
		found.Suspect = make([]bool, n)
		for i, m := range u.Messages {
			found.Suspect[i] = s.isNamed(u.Projector, m.ID, w.Runner)
		}
		s.names = s.names.drop(workerKey(*w))
	}
	return found
}

// liveOf says which parked messages of u are still as they were listed, and first in their lanes.
func (s *state) liveOf(u provider.Unit, now time.Time) []bool {
	live := make([]bool, len(u.Messages))
	last := map[provider.Lane]int64{} // the last live message of the lane
	for i, m := range u.Messages {
		h, _ := s.holds.get(laneKey(u.Projector, m.Lane))
		next := s.after(h, last[m.Lane])
		counted := m.Parked.Attempts > 0 // Try has put the lane off for this unit
		open := u.DryRun != nil || next.State == provider.StateWaiting && (counted || h.isDue(now))
		if live[i] = open && next.Seq == m.Parked.Seq && isAsListed(next, *m.Parked); live[i] {
			last[m.Lane] = next.Seq
		}
	}
	return live
}

// closeUnit parks messages, or says what became of those that were parked.
func (s *state) closeUnit(u provider.Unit, found provider.Found, park []provider.Aside, now time.Time) {
	stay := map[int]provider.Aside{}
	for _, a := range park {
		if stay[a.Message] = a; found.Live == nil {
			s.park(a, now)
		}
	}
	after := map[int64]time.Duration{} // by Seq, of those that stay
	for i, live := range found.Live {
		a, stays := stay[i]
		switch p, _ := s.parked.get(u.Messages[i].Parked.Seq); {
		case live && stays:
			if len(a.Parked.Handlers) > 0 {
				p.Handlers = a.Parked.Handlers
			}
			s.fail(p, a.Parked, a.After < 0)
			after[p.Seq] = a.After
		case live && p.By != "":
			p.State, p.ResolvedAt = provider.StateReplayed, now
			s.keep(p)
		case live:
			s.forget(p)
		}
	}
	for i, live := range found.Live {
		if lane := u.Messages[i].Lane; live {
			h, _ := s.holds.get(laneKey(u.Projector, lane))
			s.schedule(u.Projector, lane, now.Add(after[s.after(h, 0).Seq]))
		}
	}
}

// ofRun gives an error of run a class, unless it has one.
func ofRun(err error) error {
	if _, ok := errors.AsType[*provider.Error](err); ok {
		return err
	}
	return refused(err)
}

// refused is permanent for what no retry can help, else unknown.
func refused(err error) *provider.Error {
	switch {
	case errors.Is(err, eventstore.ErrInvalid):
		return &provider.Error{Class: provider.ClassPermanent, Code: "invalid", Err: err}
	case errors.Is(err, eventstore.ErrEventIDReused):
		return &provider.Error{Class: provider.ClassPermanent, Code: "event_id_reused", Err: err}
	}
	return &provider.Error{Class: provider.ClassUnknown, Err: err}
}

// classify gives a class to an error of the provider itself; deadline is the class of a deadline that has passed.
func classify(err error, deadline provider.Class) *provider.Error {
	switch {
	case errors.Is(err, context.Canceled):
		return &provider.Error{Class: provider.ClassShutdown, Err: err}
	case errors.Is(err, context.DeadlineExceeded):
		return &provider.Error{Class: deadline, Code: provider.CodeDeadline, Err: err}
	}
	return refused(err)
}
