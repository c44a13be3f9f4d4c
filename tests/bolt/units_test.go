package bolt

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/kinora-go/kinora/provider"
)

func (db *DB) Keeps() provider.Keeps {
	return provider.Keeps{Atomic: true, Markers: true, Output: true}
}

type runFunc = func(ctx context.Context, tx *Tx, found provider.Found) (provider.Closing, error)

func (db *DB) Do(ctx context.Context, u provider.Unit, run runFunc) error {
	if u.DryRun != nil && u.Switch == nil {
		return invalidUnit(fmt.Errorf("%w: a file of bbolt has no dry runs", provider.ErrInput))
	}
	wait, cancel := ctx, context.CancelFunc(func() {})
	if u.Switch != nil {
		if err := provider.CheckSwitch(&u); err != nil {
			return invalidUnit(err)
		}
		wait, cancel = context.WithTimeout(ctx, time.Second)
	}
	defer cancel()
	tx, err := db.begin(wait)
	switch {
	case err == nil:
	case errors.Is(err, provider.ErrInTransaction):
		return provider.HandlerError(err)
	case u.Switch != nil && ctx.Err() == nil:
		return &provider.Error{Class: provider.ClassTransient, Code: provider.CodeBusy, Err: err}
	default: // the unit waited for others: its messages are not to blame
		return ended(err, provider.ClassTransient)
	}
	rollback := func() { _ = tx.end(false, nil) }
	defer rollback()
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, rollback) })
	defer stop()
	if err := tx.work(ctx, u, run); err != nil {
		if _, ok := errors.AsType[*provider.Error](err); ok {
			return err
		}
		return provider.HandlerError(err)
	}
	if s := u.Switch; s != nil && s.Snapshot {
		return nil
	}
	if err := tx.end(true, ctx.Err()); err != nil {
		return ended(err, provider.ClassUnknown)
	}
	return nil
}

// ended returns the error of a unit that was not begun or not committed.
func ended(err error, late provider.Class) *provider.Error {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return &provider.Error{Class: late, Code: provider.CodeDeadline, Err: err}
	case errors.Is(err, context.Canceled):
		return &provider.Error{Class: provider.ClassShutdown, Err: err}
	}
	return &provider.Error{Class: provider.ClassTransient, Err: err}
}

func invalidUnit(err error) error {
	return &provider.Error{Class: provider.ClassPermanent, Code: "invalid", Err: err}
}

// work opens u, runs it and closes it.
func (tx *Tx) work(ctx context.Context, u provider.Unit, run runFunc) error {
	inside := context.WithValue(ctx, insideKey{tx.db.file}, tx)
	if s := u.Switch; s != nil {
		var live provider.Live
		err := tx.use(func(s *session) error {
			if !provider.CanSet(s.generationsOf(u.Projector), u.Switch.Set...) {
				return &provider.Error{Class: provider.ClassTransient, Code: provider.CodeFenced, Err: provider.ErrFenced}
			}
			b := s.build(provider.Build{Projector: u.Projector})
			live.Checkpoint = s.checkpoint(b)
			live.Unapplied = func(_ context.Context, messages []provider.Message) (unapplied []bool, err error) {
				err = tx.use(func(s *session) error { unapplied = s.unapplied(b, messages); return nil })
				return unapplied, err
			}
			return nil
		})
		if err == nil && s.Last != nil {
			u.Messages, err = s.Last(inside, live)
		}
		if err != nil {
			return err
		}
	}
	var found provider.Found
	err := tx.use(func(s *session) (err error) {
		found, err = s.openUnit(&u)
		return err
	})
	if err != nil {
		return err
	}
	closing, err := run(inside, tx, found)
	if err != nil {
		return err
	}
	// the commit checks ctx
	if err := tx.db.InTx(tx).Enqueue(context.WithoutCancel(ctx), closing.Output...); err != nil {
		return err
	}
	if u.Switch != nil && len(closing.Park) > 0 {
		return invalidUnit(fmt.Errorf("%w: a unit with Switch cannot park messages", provider.ErrInput))
	}
	return tx.use(func(s *session) error {
		s.now = tx.db.now()
		s.closeUnit(&u, found, &closing)
		if u.Switch != nil {
			for _, g := range u.Switch.Set {
				s.setGeneration(g)
			}
		}
		return nil
	})
}

// openUnit determines which handlers and messages u runs, and inserts its markers.
func (s *session) openUnit(u *provider.Unit) (provider.Found, error) {
	found, b := u.NewFound(false), u.Build()
	c := s.checkpoint(b).InSegment(u.Segment)
	if err := found.SetProgress(u, c); err != nil {
		return found, err
	}
	if u.IsReplay() {
		var fronts []provider.Parked
		due := map[provider.Lane]bool{}
		for _, lane := range u.Lanes() {
			front := s.front(b, lane, len(u.Messages))
			fronts, due[lane] = append(fronts, front...), isDue(front, s.now)
		}
		found.SetLive(u, fronts, due)
	}
	positions := map[string]int64{}
	for i := range u.Messages {
		if m := &u.Messages[i]; !c.Covers(m) && (found.Left == nil || !found.Left[i]) {
			positions[m.ID] = m.Position
		}
	}
	found.SetFresh(u, func(m provider.Marker) bool {
		k := markerKey(m, b)
		position, ok := positions[m.MessageID]
		isNew := !markers.has(s, k)
		if u.Advance == nil && ok && isNew {
			markers.put(s, k, marker{s.now, position})
		}
		return isNew && (ok || u.Advance != nil)
	})
	if err := found.SetProgress(u, c); err != nil {
		return found, err
	}
	if a := u.Advance; a != nil && u.Segment > 0 {
		s.setSegment(b, provider.Segment{Number: u.Segment, Place: a.To, Token: a.Token})
	} else if a != nil {
		c.Place = a.To
		checkpoints.put(s, buildKey(b), c)
	}
	for i := range u.Messages {
		found.Held[i] = !u.IsReplay() && len(s.front(b, u.Messages[i].Lane, 1)) > 0
	}
	if w := u.Careful; w != nil {
		found.Suspect = make([]bool, len(u.Messages))
		for k, ids := range inFlight.under(s, nil) {
			runner, _ := text(k)
			for i := range u.Messages {
				found.Suspect[i] = found.Suspect[i] || runner != w.Runner && slices.Contains(ids, flying(b, u.Messages[i].ID))
			}
		}
		inFlight.drop(s, key(w.Runner, w.Number))
	}
	return found, nil
}

// closeUnit parks messages of a delivery unit, or stores the results of a replay.
func (s *session) closeUnit(u *provider.Unit, found provider.Found, c *provider.Closing) {
	if !u.IsReplay() {
		for _, a := range c.Park {
			s.park(u.Build(), a)
		}
		return
	}
	resolution := c.Resolution(u, found)
	for _, seq := range resolution.Applied {
		p, _ := parked.get(s, key(seq))
		if s.resolve(p, provider.StateReplayed); p.By == "" {
			parked.drop(s, key(seq))
		}
	}
	for _, a := range resolution.Failed {
		p, _ := parked.get(s, key(u.Messages[a.Message].Parked.Seq))
		p.Fail(a.Parked)
		s.keep(p, a.After)
	}
}

func (db *DB) Beat(ctx context.Context, runner string, lease, record time.Duration) (provider.Health, error) {
	return update(ctx, db, "renew the lease of a runner", nil, func(s *session) (provider.Health, error) {
		health := provider.Health{Now: s.now}
		runners.put(s, key(runner), s.now.Add(lease))
		for k, ends := range runners.under(s, nil) {
			switch {
			case lease == 0 && string(k) == string(key(runner)), ends.Before(s.now.Add(-record)):
				runners.drop(s, k)
				for worker := range inFlight.under(s, k) {
					inFlight.drop(s, worker)
				}
			case !ends.After(s.now) && ends.After(health.Crashed):
				health.Crashed = ends
			}
		}
		return health, nil
	})
}

// flying is a message in flight.
func flying(b provider.Build, id string) string { return strconv.Quote(b.String()) + strconv.Quote(id) }

func (db *DB) InFlight(ctx context.Context, b provider.Build, w provider.Worker, ids []string) error {
	_, err := update(ctx, db, "record the messages in flight", nil, func(s *session) (struct{}, error) {
		all := make([]string, len(ids))
		for i, id := range ids {
			all[i] = flying(b, id)
		}
		inFlight.put(s, key(w.Runner, w.Number), all)
		return struct{}{}, nil
	})
	return err
}
