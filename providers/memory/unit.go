package memory

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Do implements provider.Units. It calls run once. Transactions run one after another, so the
// opening waits only for the write lock: no other unit can hold a marker or a lane.
func (db *Provider) Do(ctx context.Context, u provider.Unit, run func(ctx context.Context, tx *Model, found provider.Found) (provider.Closing, error)) error {
	var changes []provider.Change
	err := db.unit(ctx, func(tx *Model) error {
		if u.DryRun != nil {
			tx.wrote = map[cell]struct{}{}
		}
		found, err := tx.staged.openUnit(&u, db.now())
		if err != nil {
			return err
		}
		closing, err := run(ctx, tx, found)
		if err != nil {
			return err
		}
		// the commit checks ctx
		if err := (&Tx{tx: tx, db: db}).Enqueue(context.WithoutCancel(ctx), closing.Output...); err != nil {
			return err
		}
		tx.staged.closeUnit(&u, found, &closing, db.now())
		changes, err = tx.changes()
		return err
	})
	if err == nil && u.DryRun != nil {
		u.DryRun(changes)
	}
	return err
}

// Switch implements provider.Units.
func (db *Provider) Switch(ctx context.Context, projector string, fn func(ctx context.Context, tx *Model, live int) (int, error)) error {
	return db.unit(ctx, func(tx *Model) error {
		next, err := fn(ctx, tx, tx.staged.generation(projector))
		tx.staged.live = tx.staged.live.put(projector, next)
		return err
	})
}

// Keeps implements provider.Units.
func (db *Provider) Keeps() provider.Keeps {
	return provider.Keeps{Atomic: true, Markers: true, Output: true, DryRun: true}
}

// unit is tx, but releases the write lock if fn does not return after ctx has ended. It returns a
// *provider.Error.
func (db *Provider) unit(ctx context.Context, fn func(tx *Model) error) error {
	var failed error
	late := provider.ClassTransient // the unit waited for others: its messages are not to blame
	err := db.tx(ctx, func(tx *Model) error {
		defer tx.endLate(ctx)()
		late, failed = provider.ClassUnknown, fn(tx)
		return failed
	})
	_, classed := errors.AsType[*provider.Error](err)
	switch {
	case err == nil, classed:
		return err
	case failed != nil:
		return provider.HandlerError(err)
	case errors.Is(err, context.DeadlineExceeded):
		return &provider.Error{Class: late, Code: provider.CodeDeadline, Err: err}
	}
	return &provider.Error{Class: provider.ClassShutdown, Err: err}
}

// openUnit determines which handlers and messages u runs, and inserts its markers.
func (s *state) openUnit(u *provider.Unit, now time.Time) (provider.Found, error) {
	found, generation := u.NewFound(false), s.generation(u.Projector)
	checkpoint := s.checkpoint(u.Projector)
	if err := found.SetProgress(u, checkpoint); err != nil {
		return found, err
	}
	if u.IsReplay() {
		var fronts []provider.Parked
		due := map[provider.Lane]bool{}
		for _, lane := range u.Lanes() {
			front := s.front(laneKey(u.Projector, lane), len(u.Messages))
			fronts, due[lane] = append(fronts, front...), isDue(front, now)
		}
		found.SetLive(u, fronts, due)
	}
	positions := map[string]int64{}
	for i := range u.Messages {
		if m := &u.Messages[i]; !checkpoint.Covers(m) && (found.Left == nil || !found.Left[i]) {
			positions[m.ID] = m.Position
		}
	}
	found.SetFresh(u, func(m provider.Marker) bool {
		if u.Advance != nil {
			return !s.markers.has(markerKey(m, generation))
		}
		position, ok := positions[m.MessageID]
		return ok && s.mark(m, generation, marker{now, position})
	})
	if err := found.SetProgress(u, checkpoint); err != nil {
		return found, err
	}
	if a := u.Advance; a != nil {
		checkpoint.Place = a.To
		s.setCheckpoint(u.Projector, checkpoint)
	}
	for i := range u.Messages {
		found.Held[i] = !u.IsReplay() && s.lanes.has(laneKey(u.Projector, u.Messages[i].Lane))
	}
	if w := u.Careful; w != nil {
		found.Suspect = make([]bool, len(u.Messages))
		for i := range u.Messages {
			id := pair(u.Projector, u.Messages[i].ID)
			for worker, ids := range s.inFlight.from("") {
				found.Suspect[i] = found.Suspect[i] || first(worker) != w.Runner && slices.Contains(ids, id)
			}
		}
		s.inFlight = s.inFlight.drop(workerKey(*w))
	}
	return found, nil
}

// closeUnit parks messages of a delivery unit, or stores the results of a replay.
func (s *state) closeUnit(u *provider.Unit, found provider.Found, c *provider.Closing, now time.Time) {
	if !u.IsReplay() {
		for _, a := range c.Park {
			s.park(a, now)
		}
		return
	}
	resolution := c.Resolution(u, found)
	for _, seq := range resolution.Applied {
		p, _ := s.parked.get(seq)
		if s.resolve(p, provider.StateReplayed, now); p.By == "" {
			s.parked = s.parked.drop(seq)
		}
	}
	for _, a := range resolution.Failed {
		p, _ := s.parked.get(u.Messages[a.Message].Parked.Seq)
		as := ownParked(a.Parked)
		p.Class, p.Code, p.Attempts, p.Handler, p.Version = as.Class, as.Code, as.Attempts, as.Handler, as.Version
		if len(as.Handlers) > 0 {
			p.Handlers = as.Handlers
		}
		s.keep(p, a.After, now)
	}
}
