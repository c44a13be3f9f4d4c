package providertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var taskGroupCases = []testCase{
	{
		name: "a group is added at once", play: taskGroupAdded,
		rule: "EnqueueGroup adds a group with all its tasks, if the transaction commits, and only then",
	},
	{
		name: "a group is counted down", play: taskGroupCounted,
		rule: "TaskTx.Change to TaskDone counts the group down in its transaction, and returns the group after it was counted",
	},
	{
		// Promise: T8.1
		name: "a finish that rolls back", play: taskGroupRollback,
		rule: "A finish counts its group only if its transaction commits, and only once",
	},
	{
		// Promise: T8.1
		name: "a group with an abandoned task", play: taskGroupBlocked,
		rule: "An undone or an abandoned task leaves its group open; a completed one is counted when a worker ends it",
	},
	{
		// Promise: T8.1
		name: "a refused finish counts nothing", play: taskGroupRefused,
		rule: "A change that is refused counts no group: without the claim, or with the direction undo",
	},
}

func taskGroupAdded(s *stage) {
	g := s.group("g", "b", "a", "c")
	undo := errors.New("undo")
	err := s.inTask(s.ctx, func(v taskView) error {
		s.ok(v.EnqueueGroup(s.ctx, g), "enqueue a group")
		return undo
	})
	s.require(errors.Is(err, undo), "the error %v is that of the function", err)
	_, ok := s.taskGroup("g")
	same(s, "group after a rollback", ok, false)
	s.noTask("a", "b", "c")
	s.addGroup(g)
	got, ok := s.taskGroup("g")
	same(s, "group", ok, true)
	s.sameJSON("data", got.Data, string(g.Data))
	same(s, "group", []any{got.ID, got.Kind, got.Total, got.Open}, []any{g.ID, g.Kind, 3, 3})
	for _, name := range []string{"a", "b", "c"} {
		t := s.task(name)
		same(s, "task of the group", []any{t.Group, t.GroupKind, t.Kind, t.Status}, []any{g.ID, g.Kind, s.kind(name), provider.TaskPending})
		t = s.take(name)
		same(s, "claimed task of the group", []any{t.Group, t.GroupKind}, []any{g.ID, g.Kind})
	}
}

// finish ends a claimed task in a transaction.
func (s *stage) finish(t provider.Task) *provider.TaskGroup {
	s.Helper()
	got := s.changeTx(t, provider.TaskChange{To: provider.TaskDone, Result: json.RawMessage(`1`)})
	same(s, "applied", got.Applied, true)
	return got.Group
}

// open fails the case unless the group has this many open tasks.
func (s *stage) openTasks(group string, want int) {
	s.Helper()
	g, ok := s.taskGroup(group)
	same(s, "group "+group, ok, true)
	same(s, "open tasks of "+group, g.Open, want)
}

func taskGroupCounted(s *stage) {
	g := s.group("g", "a", "b", "c")
	s.addGroup(g)
	s.addGroup(s.group("other", "x"))
	for i, name := range []string{"b", "a", "c"} {
		t := s.take(name)
		s.openTasks("g", 3-i)
		got := s.finish(t)
		s.require(got != nil, "a finish returns the group")
		s.sameJSON("data", got.Data, string(g.Data))
		same(s, "the counted group", []any{got.ID, got.Kind, got.Total, got.Open}, []any{g.ID, g.Kind, 3, 2 - i})
		s.openTasks("g", 2-i)
		same(s, "status", s.task(name).Status, provider.TaskDone)
	}
	s.openTasks("other", 1)
	s.require(s.finish(s.begun("alone")) == nil, "a task without a group has no group")
	t := s.take("x")
	got := s.changeTx(t, provider.TaskChange{To: provider.TaskFailed})
	same(s, "applied", []bool{got.Applied, got.Group == nil}, []bool{true, true})
	s.openTasks("other", 1)
}

func taskGroupRollback(s *stage) {
	s.addGroup(s.group("g", "a", "b"))
	a, b := s.take("a"), s.take("b")
	undo := errors.New("undo")
	for range 3 {
		err := s.inTask(s.ctx, func(v taskView) error {
			got, err := v.Change(s.ctx, provider.TaskChange{ID: a.ID, Token: a.Token, To: provider.TaskDone})
			s.ok(err, "finish")
			same(s, "applied, open", []any{got.Applied, got.Group.Open}, []any{true, 1})
			return undo
		})
		s.require(errors.Is(err, undo), "the error %v is that of the function", err)
		s.openTasks("g", 2)
	}
	same(s, "open after a finish", s.finish(a).Open, 1)
	for range 3 {
		again := s.changeTx(a, provider.TaskChange{To: provider.TaskDone})
		same(s, "the finish again", []bool{again.Applied, again.Group == nil}, []bool{false, true})
	}
	s.openTasks("g", 1)
	same(s, "open after the last finish", s.finish(b).Open, 0)
}

func taskGroupBlocked(s *stage) {
	s.addGroup(s.group("g", "a", "b", "c"))
	s.finish(s.take("a"))
	b := s.take("b")
	s.apply(b, provider.TaskChange{To: provider.TaskAbandoned, Code: "http_500"})
	c := s.take("c")
	s.cancelTask("c")
	s.apply(c, provider.TaskChange{To: provider.TaskUndone})
	s.openTasks("g", 2)
	s.ok(s.tasks.CompleteTask(s.ctx, b.ID, json.RawMessage(`"by hand"`), ann), "complete")
	s.openTasks("g", 2)
	b = s.take("b")
	got := s.changeTx(b, provider.TaskChange{To: provider.TaskDone, Result: b.Result})
	same(s, "applied, open", []any{got.Applied, got.Group.Open}, []any{true, 1})
	s.openTasks("g", 1)
	found := s.listTasks(provider.TaskFilter{Group: s.id("g"), Status: []provider.TaskStatus{provider.TaskUndone}})
	same(s, "what keeps the group open", taskIDs(found), s.ids("c"))
}

func taskGroupRefused(s *stage) {
	names := []string{"a", "b", "c"}
	s.addGroup(s.group("g", names...))
	for i, name := range names {
		t := s.take(name)
		switch i {
		case 0:
			s.vanish()
			s.take(name)
		case 1:
			s.cancelTask(name)
		case 2:
			s.apply(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, GiveUp: "refused"})
		}
		got := s.changeTx(t, provider.TaskChange{To: provider.TaskDone})
		same(s, fmt.Sprint("refused finish ", i), []bool{got.Applied, got.Group == nil}, []bool{false, true})
		s.openTasks("g", 3)
	}
	s.advance(time.Hour)
}
