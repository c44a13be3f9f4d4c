package providertest

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var taskUnitCases = []testCase{
	{
		name: "tasks in a unit", play: taskUnit,
		rule: "TasksIn is the tasks in the transaction of a handler: they commit with its writes and its messages or not at all",
	},
	{
		name: "a change refused in a unit", play: taskUnitRefused,
		rule: "A unit whose change is refused, and that returns an error, has no effect",
	},
	{
		name: "another handle", play: taskReopened, unless: Volatile,
		rule: "Another handle on the same data has the same tasks: it lists, claims and changes them",
	},
}

// taskUnit starts, answers, ends and cancels tasks in one unit.
func taskUnit(s *stage) {
	member := s.group("g", "member")
	s.addGroup(member)
	done := s.take("member")
	s.apply(s.begun("waits"), wait("paid", 1, lease))
	s.addTasks(s.draftTask("canceled"))
	undo := errors.New("undo")
	run := func(result error) error {
		return s.do(s.ctx, provider.Unit{}, func(o opened) (provider.Closing, error) {
			s.ok(o.tasks.Enqueue(o.ctx, s.draftTask("new")), "enqueue")
			s.ok(o.tasks.EnqueueGroup(o.ctx, s.group("h", "h1", "h2")), "enqueue a group")
			outcome, err := o.tasks.Answer(o.ctx, provider.TaskAnswer{Task: s.id("waits"), Name: "paid", ID: "m1", Out: json.RawMessage(`1`)})
			s.ok(err, "answer")
			same(s, "outcome", outcome, provider.AnswerTaken)
			ok, err := o.tasks.Cancel(o.ctx, s.id("canceled"))
			s.ok(err, "cancel")
			same(s, "canceled", ok, true)
			got, err := o.tasks.Change(o.ctx, provider.TaskChange{ID: done.ID, Token: done.Token, To: provider.TaskDone, Result: json.RawMessage(`1`)})
			s.ok(err, "finish")
			same(s, "applied, open", []any{got.Applied, got.Group != nil && got.Group.Open == 0}, []any{true, true})
			s.ok(o.add("effects", 1), "add")
			return provider.Closing{Output: []outbox.Message{{ID: s.name, Topic: "tasks " + s.name}}}, result
		})
	}
	was := s.listTasks(provider.TaskFilter{IDs: s.ids("member", "waits", "canceled")})
	err := run(undo)
	s.require(errors.Is(err, undo), "the error %v is that of the function", err)
	same(s, "the tasks after a rollback", s.listTasks(provider.TaskFilter{IDs: s.ids("member", "waits", "canceled")}), was)
	s.noTask("new", "h1", "h2")
	s.openTasks("g", 1)
	same(s, "effects", s.total("effects"), 0)
	s.ok(run(nil), "run a unit")
	same(s, "effects", s.total("effects"), 1)
	same(s, "messages", len(s.entries(outbox.Filter{Topic: "tasks " + s.name})), 1)
	for name, status := range map[string]provider.TaskStatus{
		"new": provider.TaskPending, "h1": provider.TaskPending, "waits": provider.TaskPending, "member": provider.TaskDone, "canceled": provider.TaskPending,
	} {
		same(s, "status of "+name, s.task(name).Status, status)
	}
	s.openTasks("g", 0)
	s.openTasks("h", 2)
	same(s, "direction", s.task("canceled").Undo, true)
}

func taskUnitRefused(s *stage) {
	refused := errors.New("the change was refused")
	t := s.begun("call")
	s.vanish()
	second := s.take("call")
	c := step("charge", 1, `1`)
	err := s.do(s.ctx, provider.Unit{}, func(o opened) (provider.Closing, error) {
		s.ok(o.add("charges", 1), "add")
		c.ID, c.Token = t.ID, t.Token
		got, err := o.tasks.Change(o.ctx, c)
		s.ok(err, "change")
		same(s, "applied, late", []bool{got.Applied, got.Late(t.Token)}, []bool{false, true})
		return provider.Closing{}, refused
	})
	s.require(errors.Is(err, refused), "the error %v is that of the function", err)
	same(s, "charges", s.total("charges"), 0)
	s.apply(second, step("charge", 1, `1`))
}

func taskReopened(s *stage) {
	s.addGroup(s.group("g", "a", "b"))
	t := s.take("a")
	s.apply(s.begun("waits"), wait("paid", 1, time.Hour))
	was := s.listTasks(provider.TaskFilter{IDs: s.ids("a", "b", "waits")})
	again := s.reopen()
	same(s, "the tasks", again.listTasks(provider.TaskFilter{IDs: s.ids("a", "b", "waits")}), was)
	again.openTasks("g", 2)
	same(s, "open after a finish through another handle", again.finish(t).Open, 1)
	same(s, "open after the finish of a task that another handle has claimed", s.finish(again.take("b")).Open, 0)
	same(s, "answer", again.answerTask("waits", "paid", "m1", `1`), provider.AnswerTaken)
	same(s, "attempts", s.take("waits").Attempts, 1)
}
