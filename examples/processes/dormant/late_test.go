package dormant_test

import (
	"testing"
	"time"

	"github.com/kinora-go/kinora/task"

	"github.com/kinora-go/kinora/examples/processes/dormant"
)

// The timer is due before the projector has seen the newest order: the customer decides.
func TestOrderThatIsNotProjectedYet(t *testing.T) {
	t.Parallel()
	c, db, s := open(t)
	timers := s.Timers()
	worker, err := s.Worker(task.WorkerConfig{})
	check(t, err)
	order := func(d *dormant.Customer) ([]any, error) { return d.Order(c.Now()) }
	at, err := s.Do(t.Context(), "ann", order)
	check(t, err)
	stop := project(t, db, timers)
	check(t, timers.Wait(t.Context(), db, at))
	stop()
	run := func(d time.Duration, want task.Status, code string) {
		t.Helper()
		c.advance(d)
		_, err := worker.RunOnce(t.Context())
		check(t, err)
		tasks, err := db.Tasks(t.Context(), task.Filter{})
		check(t, err)
		if len(tasks) != 1 || tasks[0].Status != want || tasks[0].Code != code || tasks[0].Attempts > 1 {
			t.Errorf("got %+v, want one that is %s %s", tasks, want, code)
		}
	}
	run(89*day, task.Pending, "")
	c.advance(2 * day)
	at, err = s.Do(t.Context(), "ann", order)
	check(t, err)
	run(0, task.Pending, "ordered")
	t.Cleanup(project(t, db, timers))
	check(t, timers.Wait(t.Context(), db, at))
	run(89*day, task.Pending, "ordered")
	run(2*day, task.Done, "")
}
