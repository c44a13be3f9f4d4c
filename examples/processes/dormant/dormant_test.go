package dormant_test

import (
	"sync"
	"testing"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/task"

	"github.com/kinora-go/kinora/examples/processes/dormant"
)

// clock is the clock of the store and of the service.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

const day = 24 * time.Hour

// open returns a store and a service with a clock that the test advances.
func open(t *testing.T) (*clock, *memory.DB, *dormant.Service[*memory.Model]) {
	t.Helper()
	c := &clock{now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)}
	db, err := memory.New(&memory.Config{Clock: c.Now})
	check(t, err)
	s, err := dormant.New(db, func(tx *memory.Model) eventstore.TxStore { return db.InTx(tx) }, c.Now)
	check(t, err)
	return c, db, s
}

// project runs the projector until stop is called.
func project(t *testing.T, db *memory.DB, timers *projector.Projector[*memory.Model]) (stop func()) {
	t.Helper()
	runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, timers)
	check(t, err)
	group, err := kinora.Start(t.Context(), runner)
	check(t, err)
	return func() { check(t, group.Stop()) }
}

// Promise: T1.1, T13.1
func TestDormant(t *testing.T) {
	t.Parallel()
	c, db, s := open(t)
	timers := s.Timers()
	t.Cleanup(project(t, db, timers))
	worker, err := s.Worker(task.WorkerConfig{})
	check(t, err)

	do := func(customer string, command func(*dormant.Customer) ([]any, error)) {
		t.Helper()
		at, err := s.Do(t.Context(), customer, command)
		check(t, err)
		check(t, timers.Wait(t.Context(), db, at))
	}
	order := func(customer string) {
		t.Helper()
		do(customer, func(d *dormant.Customer) ([]any, error) { return d.Order(c.Now()) })
	}
	// after advances the clock, runs the tasks that are due, and requires these customers to have
	// become dormant so often.
	after := func(d time.Duration, want map[string]int) {
		t.Helper()
		c.advance(d)
		for n := 1; n > 0; {
			n, err = worker.RunOnce(t.Context())
			check(t, err)
		}
		got := map[string]int{}
		for e, err := range db.ReadLog(t.Context(), eventstore.From{}, eventstore.LogFilter{Types: []string{"customer.dormant"}}) {
			check(t, err)
			got[e.Stream]++
		}
		for _, stream := range []string{"customer-ann", "customer-ben", "customer-cy"} {
			if got[stream] != want[stream] {
				t.Errorf("%s was dormant %d times, want %d", stream, got[stream], want[stream])
			}
		}
	}
	timer := func(id string) task.Task {
		t.Helper()
		found, err := db.Tasks(t.Context(), task.Filter{IDs: []string{id}})
		check(t, err)
		if len(found) != 1 {
			t.Fatalf("%s is missing", id)
		}
		return found[0]
	}
	for _, customer := range []string{"ann", "ben", "cy"} {
		order(customer)
	}
	after(80*day, nil)
	order("ann")                        // postpones
	do("cy", (*dormant.Customer).Leave) // cancels
	if at := timer("dormant-1-ann").NextAt; !at.Equal(c.Now().Add(dormant.After)) {
		t.Errorf("the timer is due at %s", at)
	}
	after(11*day, map[string]int{"customer-ben": 1}) // day 91
	if is := timer("dormant-1-cy"); is.Status != task.Undone {
		t.Errorf("the timer is %s", is.Status)
	}
	after(78*day, map[string]int{"customer-ben": 1}) // day 169
	after(2*day, map[string]int{"customer-ben": 1, "customer-ann": 1})
	order("ben") // the next period
	after(89*day, map[string]int{"customer-ben": 1, "customer-ann": 1})
	after(2*day, map[string]int{"customer-ben": 2, "customer-ann": 1})
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
