package bolt

import (
	"cmp"
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
		wait, cancel = context.WithTimeout(ctx, time.Second) // of the contract: a switch waits no longer
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
	// a handler that is late keeps nobody waiting
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

// ended returns the error of a unit that could not begin or commit.
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
			fronts, due[lane] = append(fronts, front...), len(front) > 0 && front[0].IsDue(s.now)
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
	if a := u.Advance; a != nil {
		to := s.checkpoint(b)
		if u.Segment == 0 {
			to.Place = a.To
		} else {
			to.SetSegment(provider.Segment{Number: u.Segment, Place: a.To, Token: a.Token})
		}
		checkpoints.put(s, buildKey(b), to)
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

func flying(b provider.Build, id string) string { return strconv.Quote(b.String()) + strconv.Quote(id) }

func (db *DB) InFlight(ctx context.Context, b provider.Build, w provider.Worker, ids []string) error {
	return db.write(ctx, "record the messages in flight", nil, func(s *session) error {
		all := make([]string, len(ids))
		for i, id := range ids {
			all[i] = flying(b, id)
		}
		inFlight.put(s, key(w.Runner, w.Number), all)
		return nil
	})
}

// Messages that wait or are stuck are in the queue of their lane. A lane is held while its queue is not
// empty, and due when its first message is. The DueAt of the other messages does not count until they
// are first.

func buildOf(p *provider.Parked) provider.Build {
	return provider.Build{Projector: p.Projector, Generation: p.Generation}
}

func buildKey(b provider.Build) []byte { return key(b.Projector, b.Number()) }

func laneKey(p *provider.Parked) []byte {
	return key(p.Projector, buildOf(p).Number(), p.Lane, p.Seq)
}

func idKey(p *provider.Parked) []byte { return key(p.Projector, buildOf(p).Number(), p.MessageID) }

func (s *session) front(b provider.Build, lane provider.Lane, n int) (front []provider.Parked) {
	for k := range lanes.under(s, key(b.Projector, b.Number(), lane)) {
		if len(front) == n {
			break
		}
		p, _ := parked.get(s, key(number(k)))
		front = append(front, p)
	}
	return front
}

// park adds a delivery to the end of its lane, or its handlers to the same message, unless that was skipped.
func (s *session) park(b provider.Build, a provider.Aside) {
	p := a.Parked
	p.Projector, p.Generation = b.Projector, b.Number()
	if seq, ok := parkedIDs.get(s, idKey(&p)); ok {
		if is, _ := parked.get(s, key(seq)); is.State.IsOpen() {
			is.AddHandlers(p.Handlers)
			parked.put(s, key(seq), is)
		}
		return
	}
	p.Seq, p.At, p.ResolvedAt, p.Decision = parked.next(s), s.now, time.Time{}, provider.Decision{}
	lanes.put(s, laneKey(&p), true)
	if p.MessageID != "" {
		parkedIDs.put(s, idKey(&p), p.Seq)
	}
	s.keep(p, a.After)
}

func (s *session) keep(p provider.Parked, after time.Duration) {
	p.Wait(after, s.now)
	parked.put(s, key(p.Seq), p)
}

// resolve removes a message from its lane and makes the next one due.
func (s *session) resolve(p provider.Parked, to provider.ParkedState) {
	p.State, p.ResolvedAt, p.DueAt = to, s.now, time.Time{}
	parked.put(s, key(p.Seq), p)
	if to == provider.StateReplayed {
		parkedIDs.drop(s, idKey(&p))
	}
	lanes.drop(s, laneKey(&p))
	front := s.front(buildOf(&p), p.Lane, 1)
	if len(front) > 0 && front[0].Seq > p.Seq && front[0].State == provider.StateWaiting {
		s.keep(front[0], 0)
	}
}

func (db *DB) Due(ctx context.Context, f provider.DueFilter) ([]provider.Parked, error) {
	return query(ctx, db, "list due messages", provider.CheckDueFilter(f), func(s *session) (due []provider.Parked) {
		for _, b := range f.Builds {
			due = append(due, s.due(b, f)...)
		}
		return due
	})
}

func (s *session) due(b provider.Build, f provider.DueFilter) []provider.Parked {
	return f.Due(s.firsts(b), func(first provider.Parked, n int) []provider.Parked { return s.front(b, first.Lane, n) }, s.now)
}

func (s *session) firsts(b provider.Build) (firsts []provider.Parked) {
	for k := range lanes.under(s, buildKey(b)) {
		if p, _ := parked.get(s, key(number(k))); len(firsts) == 0 || p.Lane != firsts[len(firsts)-1].Lane {
			firsts = append(firsts, p)
		}
	}
	return firsts
}

func (db *DB) Needs(ctx context.Context, after []provider.Need) ([]provider.Need, error) {
	return query(ctx, db, "list needs", provider.CheckNeeds(after), func(s *session) (all []provider.Need) {
		for _, a := range after {
			all = append(all, provider.NeedsOf(a, s.firsts(a.Build))...)
		}
		return all
	})
}

func (db *DB) Try(ctx context.Context, p provider.Parked, limit int, again time.Duration) (bool, error) {
	return update(ctx, db, "try a parked message", nil, func(s *session) (bool, error) {
		front := s.front(buildOf(&p), p.Lane, 1)
		if len(front) == 0 {
			return false, nil
		}
		ok, changed := front[0].Try(&p, limit, again, s.now)
		if changed {
			parked.put(s, key(front[0].Seq), front[0])
		}
		return ok, nil
	})
}

func (db *DB) Parked(ctx context.Context, f provider.ParkedFilter) ([]provider.Parked, error) {
	f.Limit = cmp.Or(f.Limit, 100)
	return query(ctx, db, "list parked messages", provider.CheckParkedFilter(f), func(s *session) []provider.Parked { return s.pickParked(f) })
}

func (db *DB) Decide(ctx context.Context, f provider.ParkedFilter, to provider.ParkedState, d provider.Decision) (int, error) {
	invalid := cmp.Or(provider.CheckDecision(to, d), provider.CheckParkedFilter(f))
	f.States = slices.DeleteFunc(slices.Clone(f.InStates()), func(in provider.ParkedState) bool { return !in.IsOpen() })
	return update(ctx, db, "decide about parked messages", invalid, func(s *session) (int, error) {
		picked := s.pickParked(f)
		for _, p := range picked {
			if d != (provider.Decision{}) {
				p.Decision = d
			}
			if to == provider.StateSkipped {
				s.resolve(p, to)
			} else {
				p.Attempts = 0
				s.keep(p, 0)
			}
		}
		return len(picked), nil
	})
}

// pickParked returns the messages that f selects, with the DueAt of their lanes.
func (s *session) pickParked(f provider.ParkedFilter) []provider.Parked {
	picked := pick(parked.from(s, nil, key(max(f.After, 0)+1)), f.Limit, f.Selects)
	for i := range picked {
		if p := &picked[i]; p.State.IsOpen() {
			p.DueAt = s.front(buildOf(p), p.Lane, 1)[0].DueAt
		}
	}
	return picked
}
