package erasure_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/kinora-go/kinora/task"

	"github.com/kinora-go/kinora/examples/processes/erasure"
)

// system is another system. It records each effect by the key of its call.
type system struct {
	mu      sync.Mutex
	calls   int
	effects map[string]int // by key: more than one would be a second effect
	fail    func(call int) (before, after error)
}

func (s *system) Forget(_ context.Context, key, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	before, after := s.fail(s.calls)
	if before != nil {
		return before
	}
	if s.effects == nil {
		s.effects = map[string]int{}
	}
	if s.effects[key] == 0 {
		s.effects[key]++
	}
	return after
}

var errDown = errors.New("503 Service Unavailable")

// Promise: T8.1
func TestErase(t *testing.T) {
	t.Parallel()
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "persons.db"), nil)
	check(t, err)
	t.Cleanup(func() { check(t, db.Close()) })
	check(t, db.Migrate(t.Context()))
	crm := &system{fail: func(call int) (error, error) { // down for the first three calls
		if call <= 3 {
			return errDown, nil
		}
		return nil, nil
	}}
	mail := &system{fail: func(call int) (error, error) { // the first reply is lost
		if call == 1 {
			return nil, context.DeadlineExceeded
		}
		return nil, nil
	}}
	billing := &system{fail: func(int) (error, error) {
		return &provider.Error{Class: provider.ClassPermanent, Code: "legal_hold", Err: errors.New("the account is under a legal hold")}, nil
	}}
	s, err := erasure.New(db, map[string]erasure.System{"crm": crm, "mail": mail, "billing": billing})
	check(t, err)
	for range 2 { // the second one changes nothing
		check(t, s.Erase(t.Context(), "ann"))
	}
	w, err := s.Worker(task.WorkerConfig{Backoff: claim.Backoff{Base: 5 * time.Millisecond}})
	check(t, err)
	group, err := kinora.Start(t.Context(), w)
	check(t, err)
	t.Cleanup(func() { check(t, group.Stop()) })

	held := wait(t, db, "erase-ann-billing", task.Abandoned)
	wait(t, db, "erase-ann-crm", task.Done)
	wait(t, db, "erase-ann-mail", task.Done)
	open, _, err := db.TaskGroup(t.Context(), "erase-ann")
	check(t, err)
	if held.Code != "legal_hold" || open.Open != 1 || erased(t, db) != 0 {
		t.Errorf("code %s, %d open, %d events: want legal_hold, 1 and 0", held.Code, open.Open, erased(t, db))
	}
	// A person has erased the account by hand.
	check(t, db.CompleteTask(t.Context(), held.ID, []byte("true"), task.Decision{By: "ann@example.com", Reason: "erased by hand"}))
	wait(t, db, held.ID, task.Done)
	if n := erased(t, db); n != 1 {
		t.Errorf("%d events, want 1", n)
	}
	for name, c := range map[string]struct {
		*system
		calls, effects int
	}{"crm": {crm, 4, 1}, "mail": {mail, 2, 1}, "billing": {billing, 1, 0}} {
		if c.system.calls != c.calls || len(c.system.effects) != c.effects {
			t.Errorf("%s: %d calls, effects %v; want %d calls and %d effects", name, c.system.calls, c.system.effects, c.calls, c.effects)
		}
	}
}

// erased returns the number of events in the log.
func erased(t *testing.T, db *sqlite.DB) (n int) {
	t.Helper()
	for e, err := range db.ReadLog(t.Context(), eventstore.From{}, eventstore.LogFilter{}) {
		check(t, err)
		if e.Type == "person.erased" {
			n++
		}
	}
	return n
}

// wait returns the task when it has the status.
func wait(t *testing.T, db task.Inspector, id string, status task.Status) task.Task {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	for ctx.Err() == nil {
		found, err := db.Tasks(ctx, task.Filter{IDs: []string{id}, Status: []task.Status{status}})
		check(t, err)
		if len(found) == 1 {
			return found[0]
		}
		time.Sleep(5 * time.Millisecond) // between two polls
	}
	t.Fatalf("%s has not become %s", id, status)
	return task.Task{}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
