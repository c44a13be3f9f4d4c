package providertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
)

// raceGroup lets many finish the tasks of groups at once. Some finishes roll back, and are tried
// again.
func raceGroup(s *stage) {
	const size = 20
	for g := range races() / size {
		name := fmt.Sprintf("g%d", g)
		draft := s.group(name)
		for i := range size {
			draft.Tasks = append(draft.Tasks, s.draftTasks(name, fmt.Sprintf("%s-%d", name, i))...)
		}
		s.addGroup(draft)
		tasks := s.claimAll(s.query(name), size)
		same(s, "tasks", len(tasks), size)
		var mu sync.Mutex
		var counted []int
		var failed error
		together(size, func(i int) {
			open, err := s.finishOnce(tasks[i], i%3 == 0)
			mu.Lock()
			defer mu.Unlock()
			counted = append(counted, open)
			failed = errors.Join(failed, err)
		})
		s.ok(failed, "finish")
		slices.Sort(counted)
		for i, open := range counted {
			same(s, "open tasks that a finisher saw", open, i)
		}
		s.openTasks(name, 0)
		same(s, "completions of the group", s.total("completions of "+name), 1)
	}
}

var errAgain = errors.New("once more")

// finishOnce ends a task, and counts the completion of its group in the same transaction. first
// rolls back once before.
func (s *stage) finishOnce(t provider.Task, first bool) (open int, err error) {
	finish := func(result error) error {
		return s.inTask(s.ctx, func(v taskView) error {
			got, err := v.Change(s.ctx, provider.TaskChange{ID: t.ID, Token: t.Token, To: provider.TaskDone})
			if err != nil {
				return err
			}
			if !got.Applied || got.Group == nil {
				return fmt.Errorf("the finish of %s is applied %t, with group %v", t.ID, got.Applied, got.Group)
			}
			if open = got.Group.Open; open == 0 {
				if err := v.add("completions of "+t.Kind[len(s.name)+1:], 1); err != nil {
					return err
				}
			}
			return result
		})
	}
	if first {
		if err := finish(errAgain); !errors.Is(err, errAgain) {
			return 0, err
		}
	}
	return open, finish(nil)
}

func raceEnqueue(s *stage) {
	for round := range longtest.Or(10, 100) {
		names := make([]string, 30)
		for i := range names {
			names[i] = fmt.Sprintf("r%d-%02d", round, i)
		}
		alone, group := s.draftTasks("alone", names[:15]...), s.group(fmt.Sprintf("g%d", round))
		group.Tasks = s.draftTasks("member", names[15:]...)
		errs := make([]error, 6)
		together(len(errs), func(i int) {
			r := rand.New(rand.NewPCG(uint64(round), uint64(i)))
			ds, g := slices.Clone(alone), group
			g.Tasks = slices.Clone(group.Tasks)
			r.Shuffle(len(ds), func(i, j int) { ds[i], ds[j] = ds[j], ds[i] })
			r.Shuffle(len(g.Tasks), func(i, j int) { g.Tasks[i], g.Tasks[j] = g.Tasks[j], g.Tasks[i] })
			errs[i] = errors.Join(
				s.inTask(s.ctx, func(v taskView) error { return v.Enqueue(s.ctx, ds...) }),
				s.inTask(s.ctx, func(v taskView) error { return v.EnqueueGroup(s.ctx, g) }),
			)
		})
		s.ok(errors.Join(errs...), "enqueue the same tasks at once")
		same(s, "tasks", taskIDs(s.listTasks(provider.TaskFilter{IDs: s.ids(names...)})), s.ids(names...))
		s.openTasks(fmt.Sprintf("g%d", round), 15)
	}
}

func raceBatches(s *stage) {
	const size = 40
	s.crowdOf("k", size)
	tasks := s.claimAll(s.query("k"), size)
	f := provider.TaskFilter{Kind: s.kind("k")}
	errs := make([]error, 8)
	together(len(errs), func(i int) {
		r := rand.New(rand.NewPCG(7, uint64(i)))
		for range longtest.Or(10, 100) {
			some := slices.Clone(tasks)
			r.Shuffle(size, func(i, j int) { some[i], some[j] = some[j], some[i] })
			some = some[:size/2]
			var err error
			switch i {
			case 0:
				_, err = s.tasks.CancelTasks(s.ctx, f, ann)
			case 1:
				_, err = s.tasks.RequeueTasks(s.ctx, f, ann)
			case 2:
				_, err = s.tasks.RenewTasks(s.ctx, some, lease)
			case 3:
				_, err = provider.ClaimTasks(s.ctx, s.tasks, s.query("k"), claim.Terms{Lease: lease, Limit: size})
			default:
				err = s.changeSome(r, some)
			}
			if errs[i] = err; err != nil {
				return
			}
		}
	})
	s.ok(errors.Join(errs...), "change many tasks at once")
}

func (s *stage) changeSome(r *rand.Rand, some []provider.Task) error {
	changes := make([]provider.TaskChange, len(some))
	for i, t := range some {
		changes[i] = provider.TaskChange{ID: t.ID, Token: t.Token, To: provider.TaskClaimed, After: lease, Progress: true}
		if r.IntN(20) == 0 {
			changes[i].To, changes[i].After = provider.TaskFailed, time.Millisecond
		}
	}
	_, err := s.tasks.ChangeTasks(s.ctx, changes)
	return err
}

var taskWakeCases = []testCase{
	{
		name: "a hint at due tasks", play: taskWakes,
		rule: "TasksDue returns a channel that is closed when tasks are next added, answered or released through this value, after the commit if this value commits (checked if the provider is a provider.TaskWaker)",
	},
	{
		name: "no task is missed", play: taskNoneMissed,
		rule: "A worker that claims whenever TasksDue is closed gets every task, also of transactions that overlap",
	},
}

func (s *stage) taskWaker() (provider.TaskWaker, bool) {
	w, ok := s.tasks.(provider.TaskWaker)
	if !ok {
		s.Log("this provider is not a provider.TaskWaker")
	}
	return w, ok
}

func taskWakes(s *stage) {
	w, ok := s.taskWaker()
	if !ok {
		return
	}
	t := s.begun("released")
	s.apply(s.begun("waits"), wait("paid", 1, lease))
	s.apply(s.begun("abandoned"), provider.TaskChange{To: provider.TaskAbandoned})
	in := func(fn func(v provider.TaskTx) error) {
		s.Helper()
		s.ok(s.do(s.ctx, provider.Unit{}, func(o opened) (provider.Closing, error) { return provider.Closing{}, fn(o.tasks) }), "run a unit")
	}
	for _, c := range []struct {
		what string
		do   func()
	}{
		{"tasks added in a unit", func() {
			in(func(v provider.TaskTx) error { return v.Enqueue(s.ctx, s.draftTask("b")) })
		}},
		{"a group added in a unit", func() {
			in(func(v provider.TaskTx) error { return v.EnqueueGroup(s.ctx, s.group("g", "c")) })
		}},
		{"an answer", func() {
			in(func(v provider.TaskTx) error {
				_, err := v.Answer(s.ctx, provider.TaskAnswer{Task: s.id("waits"), Name: "paid", ID: "m1", Out: json.RawMessage(`1`)})
				return err
			})
		}},
		{"a cancellation", func() {
			in(func(v provider.TaskTx) error {
				_, err := v.Cancel(s.ctx, s.id("abandoned"))
				return err
			})
		}},
		{"a release", func() { s.try(t, provider.TaskChange{To: provider.TaskPending}) }},
	} {
		hint := w.TasksDue()
		select {
		case <-hint:
			s.Fatalf("the hint came before %s", c.what)
		default:
		}
		c.do()
		patience.Receive(s.T, hint, "the hint at %s", c.what)
	}
}

// taskNoneMissed adds tasks in transactions that overlap, and claims only after hints.
func taskNoneMissed(s *stage) {
	w, ok := s.taskWaker()
	if !ok {
		return
	}
	const writers = 4
	rounds := longtest.Or(30, 300)
	for round := range rounds {
		errs := make([]error, writers+1)
		together(writers+1, func(i int) {
			if i < writers {
				errs[i] = s.do(s.ctx, provider.Unit{}, func(o opened) (provider.Closing, error) {
					return provider.Closing{}, o.tasks.Enqueue(s.ctx, s.draftTasks("k", fmt.Sprint(round, "-", i))...)
				})
				return
			}
			for left := writers; left > 0; {
				hint := w.TasksDue()
				got, err := provider.ClaimTasks(s.ctx, s.tasks, s.query("k"), claim.Terms{Lease: lease})
				if errs[i] = err; err != nil {
					return
				}
				if left -= len(got); left > 0 {
					select {
					case <-hint:
					case <-s.ctx.Done():
						errs[i] = fmt.Errorf("round %d: no hint at %d of %d tasks", round, left, writers)
						return
					}
				}
			}
		})
		s.ok(errors.Join(errs...), "claim after hints")
	}
}
