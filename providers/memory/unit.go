package memory

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Do implements provider.Units. It calls run once. No other unit can hold a marker or a lane.
func (db *Provider) Do(ctx context.Context, u provider.Unit, run func(ctx context.Context, tx *Model, found provider.Found) (provider.Closing, error)) error {
	if u.Switch != nil {
		if err := provider.CheckSwitch(&u); err != nil {
			return &provider.Error{Class: provider.ClassPermanent, Code: "invalid", Err: err}
		}
	}
	var changes []provider.Change
	err := db.unit(ctx, u.Switch, func(tx *Model) (err error) {
		if u.DryRun != nil {
			tx.discard, tx.wrote = true, map[cell]struct{}{}
		}
		if u.Switch != nil {
			if err := u.OpenSwitch(ctx, tx.staged.generationsOf(u.Projector), tx.live); err != nil {
				return err
			}
		}
		if err := tx.work(ctx, &u, run); err != nil {
			return err
		}
		changes, err = tx.changes()
		return err
	})
	if err == nil && u.DryRun != nil {
		u.DryRun(changes)
	}
	return err
}

// work opens u, runs it and closes it.
func (m *Model) work(ctx context.Context, u *provider.Unit, run func(ctx context.Context, tx *Model, found provider.Found) (provider.Closing, error)) error {
	found, err := m.staged.openUnit(u, m.db.now())
	if err != nil {
		return err
	}
	if u.Switch != nil {
		m.staged.reset(u.Switch.Reset)
	}
	closing, err := run(m.inside(ctx), m, found)
	if err != nil {
		return err
	}
	// the commit checks ctx
	if err := (&Tx{tx: m, db: m.db}).Enqueue(context.WithoutCancel(ctx), closing.Output...); err != nil {
		return err
	}
	if err := u.CheckClosing(&closing); err != nil {
		return err
	}
	now := m.db.now()
	if m.staged.closeUnit(u, found, &closing, now); u.Switch == nil {
		return nil
	}
	return m.finish(u.Switch, now)
}

// Keeps implements provider.Units.
func (db *Provider) Keeps() provider.Keeps {
	return provider.Keeps{Atomic: true, Markers: true, Output: true, DryRun: true, Tables: true, Reset: true}
}

// unit is tx with endLate. It returns a *provider.Error.
func (db *Provider) unit(ctx context.Context, s *provider.Switch, fn func(tx *Model) error) error {
	begin := db.begin
	if s != nil {
		begin = func(ctx context.Context) (*Model, error) { return db.beginSwitch(ctx, s) }
	}
	var failed error
	late := provider.ClassTransient // the unit waited for others: its messages are not to blame
	tx, err := begin(ctx)
	if err == nil {
		err = tx.run(ctx, func(tx *Model) error {
			defer tx.endLate(ctx)()
			late, failed = provider.ClassUnknown, fn(tx)
			return failed
		})
	}
	_, classed := errors.AsType[*provider.Error](err)
	switch {
	case err == nil, classed:
		return err
	case failed != nil, errors.Is(err, provider.ErrInTransaction):
		return provider.HandlerError(err)
	case errors.Is(err, context.DeadlineExceeded):
		return &provider.Error{Class: late, Code: provider.CodeDeadline, Err: err}
	}
	return &provider.Error{Class: provider.ClassShutdown, Err: err}
}

// openUnit determines which handlers and messages u runs, and inserts its markers.
func (s *state) openUnit(u *provider.Unit, now time.Time) (provider.Found, error) {
	found, build := u.NewFound(false), u.Build()
	checkpoint := s.checkpoint(build).InSegment(u.Segment)
	if err := found.SetProgress(u, checkpoint); err != nil {
		return found, err
	}
	if u.IsReplay() {
		var fronts []provider.Parked
		due := map[provider.Lane]bool{}
		for _, lane := range u.Lanes() {
			front := s.front(laneKey(build, lane), len(u.Messages))
			fronts, due[lane] = append(fronts, front...), len(front) > 0 && front[0].IsDue(now)
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
			return !s.markers.has(markerKey(m, build))
		}
		position, ok := positions[m.MessageID]
		return ok && s.mark(m, build, marker{now, position})
	})
	if err := found.SetProgress(u, checkpoint); err != nil {
		return found, err
	}
	if a := u.Advance; a != nil {
		to := s.checkpoint(build)
		if u.Segment == 0 {
			to.Place = a.To
		} else {
			to.SetSegment(provider.Segment{Number: u.Segment, Place: a.To, Token: a.Token})
		}
		s.setCheckpoint(build, to)
	}
	for i := range u.Messages {
		found.Held[i] = !u.IsReplay() && s.lanes.has(laneKey(build, u.Messages[i].Lane))
	}
	if w := u.Careful; w != nil {
		found.Suspect = s.suspects(u, w)
		s.inFlight = s.inFlight.drop(workerKey(*w))
	}
	return found, nil
}

// suspects reports for each message whether workers of other runners have it in flight.
func (s *state) suspects(u *provider.Unit, w *provider.Worker) []bool {
	suspect := make([]bool, len(u.Messages))
	for i := range u.Messages {
		id := pair(buildKey(u.Build()), u.Messages[i].ID)
		for worker, ids := range s.inFlight.from("") {
			suspect[i] = suspect[i] || first(worker) != w.Runner && slices.Contains(ids, id)
		}
	}
	return suspect
}

// closeUnit parks messages of a delivery unit, or stores the results of a replay.
func (s *state) closeUnit(u *provider.Unit, found provider.Found, c *provider.Closing, now time.Time) {
	if !u.IsReplay() {
		for _, a := range c.Park {
			s.park(u.Build(), a, now)
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
		p.Fail(a.Parked)
		s.keep(p, a.After, now)
	}
}
