package memory

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kinora-go/kinora/projector"
)

// tally counts an attempt.
type tally struct {
	n        int
	at       time.Time // of the last one
	vanished bool      // one of them was a runner's that died
}

// nameOf is what an attempt is counted under, and named.
func nameOf(a projector.Attempt) string {
	if a.Handler == "" {
		a.Handler = a.Projector + "/"
	}
	return pair(a.Handler, a.MessageID)
}

// Apart implements projector.Journal.
func (db *DB) Apart() *sync.RWMutex { return &db.apart }

// Begin implements projector.Journal. What is done is taken back first: an attempt may be among both.
func (db *DB) Begin(ctx context.Context, runner string, attempts, done []projector.Attempt) (verdicts []projector.Verdict, err error) {
	err = db.Tx(ctx, func(tx *Model) error {
		for _, a := range done {
			tx.staged.names = tx.staged.names.drop(pair(nameOf(a), runner))
		}
		for _, a := range attempts {
			v := tx.staged.verdict(runner, a)
			if verdicts = append(verdicts, v); v == projector.Clear {
				tx.staged.names = tx.staged.names.put(pair(nameOf(a), runner), db.now())
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("begin attempts: %w", err)
	}
	return verdicts, nil
}

func (s *state) verdict(runner string, a projector.Attempt) projector.Verdict {
	switch {
	case s.settled(a):
		return projector.Settled
	case s.isHeld(a):
		return projector.Held
	case len(s.others(runner, a)) > 0 || s.hasVanished(a):
		return projector.Suspect
	default:
		return projector.Clear
	}
}

// settled tells whether the message is parked, or was skipped, by more than what is replayed.
func (s *state) settled(a projector.Attempt) bool {
	for _, p := range s.parked.from(0) {
		if (a.Seq == 0 || p.Seq < a.Seq) && p.State != projector.Replayed && p.Projector == a.Projector &&
			p.MessageID != "" && p.MessageID == a.MessageID && isOf(p, a.Handler, a.Was) {
			return true
		}
	}
	return false
}

// others are the other runners that have named a.
func (s *state) others(runner string, a projector.Attempt) (others []string) {
	of := pair(nameOf(a), "")
	for at := range s.names.from(of) {
		other, ok := strings.CutPrefix(at, of)
		if !ok {
			break
		}
		if other != runner {
			others = append(others, other)
		}
	}
	return others
}

// BeginAlone implements projector.Journal.
func (db *DB) BeginAlone(ctx context.Context, runner string, a projector.Attempt, limit int) (attempts, alive int, err error) {
	err = db.Tx(ctx, func(tx *Model) error {
		now := db.now()
		for _, other := range tx.staged.others(runner, a) {
			if until, _ := tx.staged.runners.get(other); until.After(now) {
				alive++
				continue
			}
			tx.staged.count(a, now, true)
			tx.staged.names = tx.staged.names.drop(pair(nameOf(a), other))
		}
		counted, _ := tx.staged.attempts.get(nameOf(a))
		if attempts = counted.n; limit < 0 || attempts+alive < limit {
			tx.staged.names = tx.staged.names.put(pair(nameOf(a), runner), now)
		}
		return nil
	})
	if err != nil {
		return 0, 0, fmt.Errorf("begin an attempt alone: %w", err)
	}
	return attempts, alive, nil
}

// CountAttempt implements projector.Journal.
func (db *DB) CountAttempt(ctx context.Context, runner string, a projector.Attempt, limit int) (n int, err error) {
	err = db.Tx(ctx, func(tx *Model) error {
		counted, _ := tx.staged.attempts.get(nameOf(a))
		if n = counted.n + 1; runner != "" && limit >= 0 && n >= limit {
			return nil
		}
		tx.staged.names = tx.staged.names.drop(pair(nameOf(a), runner))
		n = tx.staged.count(a, db.now(), false)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("count an attempt: %w", err)
	}
	return n, nil
}

func (s *state) count(a projector.Attempt, now time.Time, vanished bool) int {
	counted, _ := s.attempts.get(nameOf(a))
	s.attempts = s.attempts.put(nameOf(a), tally{counted.n + 1, now, counted.vanished || vanished})
	return counted.n + 1
}

func (s *state) hasVanished(a projector.Attempt) bool {
	counted, _ := s.attempts.get(nameOf(a))
	return counted.vanished
}

// Alive implements projector.Journal.
func (db *DB) Alive(ctx context.Context, runner string, lease time.Duration) error {
	err := db.Tx(ctx, func(tx *Model) error {
		if lease > 0 {
			tx.staged.runners = tx.staged.runners.put(runner, db.now().Add(lease))
			return nil
		}
		tx.staged.runners = tx.staged.runners.drop(runner)
		for at := range tx.staged.names.from("") {
			if second(at) == runner {
				tx.staged.names = tx.staged.names.drop(at)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("say that a runner lives: %w", err)
	}
	return nil
}

// DueParked implements projector.Journal.
func (db *DB) DueParked(ctx context.Context, name string, types []string, after int64, limit int) ([]projector.Parked, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list due messages: %w", err)
	}
	s := db.committed.Load()
	var due []projector.Parked
	for seq, p := range s.parked.from(after + 1) {
		if len(due) >= limit {
			break
		}
		waits := p.Class == projector.HeldClass && s.due.has(seq)
		known := p.Code == "unregistered" && slices.Contains(types, p.Type)
		if p.State == projector.StillParked && p.Projector == name && (waits || known) {
			due = append(due, ownParked(p))
		}
	}
	return due, nil
}

// FailParked implements projector.Journal.
func (db *DB) FailParked(ctx context.Context, runner string, p projector.Parked, a projector.Attempt) error {
	err := db.Tx(ctx, func(tx *Model) error {
		s := &tx.staged
		if p.Class != projector.HeldClass {
			s.attempts, s.names = s.attempts.drop(nameOf(a)), s.names.drop(pair(nameOf(a), runner))
		}
		is, ok := s.parked.get(p.Seq)
		if !ok || is.State != projector.StillParked || p.Class == projector.HeldClass && !s.isHeld(a) {
			return nil
		}
		s.due = s.due.drop(p.Seq)
		if p.Class != projector.HeldClass {
			is.Class, is.Code, is.Attempts, is.Version = p.Class, p.Code, p.Attempts, p.Version
			s.parked = s.parked.put(p.Seq, is)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("fail parked message %d: %w", p.Seq, err)
	}
	return nil
}

// PruneJournal implements projector.Journal.
func (db *DB) PruneJournal(ctx context.Context, name string, keep time.Duration, limit int) (n int, err error) {
	err = db.Tx(ctx, func(tx *Model) error {
		s, before := &tx.staged, db.now().Add(-keep)
		n = s.forgetParked(name, before, limit) + s.forgetAttempts(name, before, limit) + s.forgetNames(before, limit)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("prune the journal: %w", err)
	}
	return n, nil
}

func (s *state) forgetParked(of string, before time.Time, limit int) (n int) {
	for seq, p := range s.parked.from(0) {
		if n < limit && p.Projector == of && p.State != projector.StillParked && p.ResolvedAt.Before(before) {
			s.parked = s.parked.drop(seq)
			n++
		}
	}
	return n
}

func (s *state) forgetAttempts(of string, before time.Time, limit int) (n int) {
	for at, counted := range s.attempts.from("") {
		if n < limit && strings.HasPrefix(first(at), of+"/") && counted.at.Before(before) {
			s.attempts = s.attempts.drop(at)
			n++
		}
	}
	return n
}

// forgetNames forgets those of runners that have not said for long that they live, and then those runners.
func (s *state) forgetNames(before time.Time, limit int) (n int) {
	named := map[string]bool{}
	for at, since := range s.names.from("") {
		runner := second(at)
		until, _ := s.runners.get(runner)
		if n < limit && until.Before(before) && since.Before(before) {
			s.names = s.names.drop(at)
			n++
		} else {
			named[runner] = true
		}
	}
	for runner, until := range s.runners.from("") {
		if until.Before(before) && !named[runner] {
			s.runners = s.runners.drop(runner)
		}
	}
	return n
}
