package providertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

var taskChangeCases = []testCase{
	{
		name: "a batch of changes", play: taskBatch,
		rule: "ChangeTasks applies changes each on its own, and returns their results in the same order; a refused one does not hinder the others",
	},
	{
		name: "an invalid change", play: taskInvalidChange,
		rule: "A change that CheckTaskChanges refuses is an *InvalidError, and nothing of its batch is changed",
	},
	{
		// Promise: T2.1
		name: "no claim, no change", play: taskNoFence,
		rule: "A change is applied only if the task is claimed with Token",
	},
	{
		// Promise: T5.2
		name: "the end of a wait is set once", play: taskUntilStays,
		rule: "A task that waits again for a slot waits until the time that was set first",
	},
	{
		name: "slots of a change", play: taskSlots,
		rule: "A change sets its slots and leaves the others; names and values are stored as they are",
	},
	{
		// Promise: T5.1
		name: "null is a value", play: taskNull,
		rule: "A slot or a result that is null has a value",
	},
	{
		name: "progress", play: taskProgress,
		rule: "Without Progress a change keeps the attempts, Suspect and the wait; with it they begin again",
	},
	{
		name: "codes", play: taskCodes,
		rule: "The code of TaskFailed, TaskAbandoned and TaskPending is stored; an empty one keeps the last one",
	},
	{
		// Promise: T4.1
		name: "a change in a transaction", play: taskChangeTx,
		rule: "TaskTx.Change commits with its transaction or not at all, and a refused change leaves the transaction usable",
	},
	{
		name: "a large state", play: taskLargeState,
		rule: "The input, the result, and all slots together can have MaxTaskState bytes each",
	},
	{
		// Promise: T7.1
		name: "the step in doubt", play: taskDoubt,
		rule: "A claim sets Doubt unless the direction is undo and returns the former one, TaskWaiting clears it, and the end of a claim and GiveUp set it. Nothing else changes it",
	},
}

func taskBatch(s *stage) {
	var changes []provider.TaskChange
	names := []string{"d", "a", "c", "b", "e"}
	for i, name := range names {
		t := s.begun(name)
		c := provider.TaskChange{ID: t.ID, Token: t.Token, To: provider.TaskDone, Result: json.RawMessage(fmt.Sprint(i))}
		if name == "c" {
			c.Token = claim.NewToken()
		}
		changes = append(changes, c)
	}
	changes = append(changes, provider.TaskChange{ID: s.id("nothing"), Token: claim.NewToken(), To: provider.TaskDone})
	got, err := s.tasks.ChangeTasks(s.ctx, changes)
	s.ok(err, "change tasks")
	same(s, "results", len(got), len(changes))
	for i, name := range names {
		same(s, "applied to "+name, got[i].Applied, name != "c")
		same(s, "id of the result", got[i].Now.ID, s.id(name))
		if name != "c" {
			s.sameJSON("result of "+name, s.task(name).Result, fmt.Sprint(i))
		}
	}
	same(s, "the refused one", plainTask(got[2].Now), s.task("c"))
	same(s, "a task that does not exist", []any{got[5].Applied, got[5].Now.ID, string(got[5].Now.Status), got[5].Late(changes[5].Token)}, []any{false, "", "", true})
	none, err := s.tasks.ChangeTasks(s.ctx, nil)
	s.ok(err, "no changes")
	same(s, "results of no changes", len(none), 0)

	t := s.begun("same") // each on its own: of two for one slot, one is applied
	one, two := step("charge", 1, `1`), step("charge", 1, `2`)
	one.ID, one.Token, two.ID, two.Token = t.ID, t.Token, t.ID, t.Token
	got, err = s.tasks.ChangeTasks(s.ctx, []provider.TaskChange{one, two})
	s.ok(err, "change one task twice")
	s.require(got[0].Applied != got[1].Applied, "one of two changes for one slot is applied: %t, %t", got[0].Applied, got[1].Applied)
	want := `1`
	if got[1].Applied {
		want = `2`
	}
	s.sameState(s.task("same").State, filled("charge", 1, want))
}

func taskInvalidChange(s *stage) {
	t := s.begun("call")
	good := provider.TaskChange{ID: t.ID, Token: t.Token, To: provider.TaskDone}
	was := s.task("call")
	for name, c := range map[string]provider.TaskChange{
		"no status":       {},
		"another status":  {To: "parked"},
		"a wait for none": {To: provider.TaskWaiting},
		"negative":        {To: provider.TaskFailed, After: -1},
		"an id with NUL":  {ID: "\x00", To: provider.TaskDone},
		"a long code":     {To: provider.TaskFailed, Code: strings.Repeat("x", 256)},
		"a bad code":      {To: provider.TaskFailed, Code: replacement},
		"a bad why":       {To: provider.TaskClaimed, GiveUp: "\x00"},
	} {
		if c.ID == "" {
			c.ID, c.Token = t.ID, t.Token
		}
		_, err := s.tasks.ChangeTasks(s.ctx, []provider.TaskChange{good, c})
		s.invalid(err, name)
		same(s, "the stored task", s.task("call"), was)
		s.ok(s.inTask(s.ctx, func(v taskView) error {
			_, err := v.Change(s.ctx, c)
			s.invalid(err, name+" in a transaction")
			return v.add("after "+name, 1)
		}), "commit after "+name)
		same(s, "total", s.total("after "+name), 1)
	}
	s.apply(t, good)
}

func taskNoFence(s *stage) {
	t := s.begun("call")
	stranger := t
	stranger.Token = claim.NewToken()
	s.outdated(stranger)
	stranger.Token = claim.Token{}
	s.outdated(stranger)
	s.vanish()
	second := s.take("call")
	s.outdated(t)
	s.apply(second, provider.TaskChange{To: provider.TaskPending})
	s.outdated(second)
	s.outdated(stranger) // a task that is not claimed has no token
	third := s.take("call")
	s.outdated(t)
	s.outdated(second)
	s.apply(third, step("charge", 1, `1`))
	s.vanish() // the lease has ended, and no claim has taken the task: this claim still counts
	s.apply(third, provider.TaskChange{To: provider.TaskDone})
	s.outdated(third)
}

func taskUntilStays(s *stage) {
	ruler := s.draftTask("ruler") // its time moves as that of the wait does, if data is made older
	ruler.After = 100_000 * time.Hour
	s.addTasks(ruler)
	end := func() time.Duration { return s.task("call").NextAt.Sub(s.task("ruler").NextAt) }
	s.apply(s.begun("call"), wait("paid", 1, 3*time.Hour))
	first := end()
	for _, c := range []provider.TaskChange{
		wait("paid", 1, 50*time.Hour), wait("paid", 1, time.Hour), wait("paid", 1, 0),
		{To: provider.TaskWaiting, After: 50 * time.Hour, Open: "paid"}, // without slots
	} {
		s.advance(9 * time.Hour)
		t := s.take("call")
		same(s, "TimedOut", t.TimedOut, true)
		now := s.apply(t, c)
		same(s, "the end of the wait", end(), first)
		same(s, "slot of the wait", []any{now.State["paid"].Call, now.State["paid"].Until != "", now.State["paid"].Filled()}, []any{1, true, false})
	}
	// A patch removes the answer, so the task is claimed before the end of its wait.
	s.apply(s.begun("early"), wait("paid", 1, 9*time.Hour))
	until := s.task("early").State["paid"].Until
	s.answerTask("early", "paid", "m1", `1`)
	s.ok(s.tasks.PatchTask(s.ctx, s.id("early"), s.task("early").Version, json.RawMessage(`{"paid":{"out":null,"by":null,"at":null}}`), ann), "patch")
	now := s.apply(s.take("early"), wait("paid", 1, 50*time.Hour))
	same(s, "Until of the second wait", now.State["paid"].Until, until)
	s.notDue("early")
	s.advance(10 * time.Hour)
	now = s.apply(s.take("early"), wait("next", 2, 50*time.Hour))
	s.require(now.NextAt.Sub(now.CreatedAt) > 40*time.Hour, "another wait has a time of its own: %v after %v", now.NextAt, now.CreatedAt)
	s.notDue("early")
}

func taskSlots(s *stage) {
	t := s.begun("call")
	names := []string{"a", "a-b", "a_b", "n", "out", "by", "until", "timeout", "at", "x" + strings.Repeat("y", 60), provider.UndoSlot("a"), provider.UndoSlot("a-b")}
	values := []string{`1`, `"a"`, `null`, `false`, `[]`, `{}`, `{"out":1}`, `{"timeout":true}`, `"\u00e9 \" \\ '"`, `[[1,{"a":null}]]`, `-0.5`, `12345678901234567890`}
	want := map[string]provider.Slot{}
	for i, name := range names {
		now := s.apply(t, step(name, i+1, values[i]))
		want[name] = provider.Slot{Call: i + 1, Out: json.RawMessage(values[i])}
		s.sameState(now.State, want)
	}
	two := map[string]provider.Slot{"p": {Call: 20, Out: json.RawMessage(`1`)}, "q": {Call: 21, Timeout: true}, "r": {Call: 22}}
	now := s.apply(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, Slots: two})
	want["p"], want["q"], want["r"] = two["p"], two["q"], two["r"]
	s.sameState(now.State, want)
	s.apply(t, step("r", 22, `1`))
	s.answerTask("call", "z", "m1", `"z"`)
	want["r"], want["z"] = provider.Slot{Call: 22, Out: json.RawMessage(`1`)}, provider.Slot{By: "m1", Out: json.RawMessage(`"z"`)}
	s.sameState(s.task("call").State, want)
	s.vanish()
	s.sameState(s.take("call").State, want)
}

func taskNull(s *stage) {
	t := s.begun("call")
	now := s.apply(t, step("charge", 1, `null`))
	same(s, "slot with null", []any{now.State["charge"].Filled(), string(now.State["charge"].Out)}, []any{true, "null"})
	s.refuse(t, step("charge", 1, `"second"`))
	same(s, "answer of null", s.answerTask("call", "paid", "m1", `null`), provider.AnswerTaken)
	same(s, "another answer", s.answerTask("call", "paid", "m2", `1`), provider.AnswerLate)
	same(s, "the answer again", s.answerTask("call", "paid", "m1", `null`), provider.AnswerAgain)
	same(s, "slot with an answer of null", []any{s.task("call").State["paid"].Filled(), string(s.task("call").State["paid"].Out)}, []any{true, "null"})
	same(s, "answer to the name of a step", s.answerTask("call", "charge", "m1", `1`), provider.AnswerLate)
	s.vanish()
	t = s.take("call")
	same(s, "slots of the claimed task", []string{string(t.State["charge"].Out), string(t.State["paid"].Out)}, []string{"null", "null"})
	now = s.apply(t, provider.TaskChange{To: provider.TaskDone, Result: json.RawMessage(`null`)})
	same(s, "result of null", string(now.Result), "null")
	now = s.apply(s.begun("nothing"), provider.TaskChange{To: provider.TaskDone})
	same(s, "no result", now.Result == nil, true)

	w := s.begun("waits")
	s.apply(w, wait("paid", 1, time.Hour))
	same(s, "answer of null to a task that waits", s.answerTask("waits", "paid", "m1", `null`), provider.AnswerTaken)
	w = s.take("waits")
	same(s, "slot", []any{w.State["paid"].Filled(), string(w.State["paid"].Out), w.State["paid"].Call}, []any{true, "null", 1})
	s.refuse(w, wait("paid", 1, time.Hour))

	s.apply(s.begun("by-hand"), provider.TaskChange{To: provider.TaskAbandoned})
	s.ok(s.tasks.CompleteTask(s.ctx, s.id("by-hand"), json.RawMessage(`null`), ann), "complete with null")
	same(s, "result of a completed task", string(s.take("by-hand").Result), "null")
	null := s.draftTask("null")
	null.Input = json.RawMessage(`null`)
	s.addTasks(null, s.draftTask("other"))
	s.addTasks(null)
	same(s, "input of null", string(s.take("null").Input), "null")
}

func taskProgress(s *stage) {
	t := s.begun("call")
	s.apply(t, wait("paid", 1, time.Hour))
	s.advance(2 * time.Hour)
	t = s.take("call")
	attempts := t.Attempts
	now := s.apply(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, Slots: filled("note", 5, `1`)})
	same(s, "after a change without progress", []any{now.Attempts, now.Waits}, []any{attempts, "paid"})
	s.vanish()
	t = s.take("call")
	same(s, "claimed after it", []any{t.TimedOut, t.Waits, t.Attempts}, []any{true, "paid", attempts + 1})
	now = s.apply(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, Slots: map[string]provider.Slot{"paid": {Call: 1, Timeout: true}}, Open: "paid", Progress: true})
	same(s, "after the timeout was decided", []any{now.Attempts, now.Waits, now.State["paid"].Timeout}, []any{1, "", true})
	s.vanish()
	t = s.take("call")
	same(s, "claimed after that", []any{t.TimedOut, t.Waits, t.Attempts}, []any{false, "", 2})
	same(s, "an answer after the timeout", s.answerTask("call", "paid", "m1", `1`), provider.AnswerLate)
}

func taskCodes(s *stage) {
	t := s.begun("call")
	s.apply(t, provider.TaskChange{To: provider.TaskPending, Code: "a"})
	same(s, "code after a claim", s.take("call").Code, "a")
	for _, c := range []struct {
		to         provider.TaskStatus
		code, want string
	}{
		{provider.TaskFailed, "", "a"},
		{provider.TaskFailed, "b", "b"},
		{provider.TaskPending, "", "b"},
		{provider.TaskFailed, strings.Repeat("x", 255), strings.Repeat("x", 255)},
		{provider.TaskPending, "d", "d"},
		{provider.TaskAbandoned, "", "d"},
	} {
		s.apply(s.retake("call"), provider.TaskChange{To: c.to, Code: c.code})
		same(s, "code", s.task("call").Code, c.want)
	}
}

// retake claims the task of this name, or returns the live claim.
func (s *stage) retake(name string) provider.Task {
	s.Helper()
	if t := s.task(name); t.Status == provider.TaskClaimed {
		return t
	}
	return s.take(name)
}

func taskChangeTx(s *stage) {
	undo := errors.New("undo")
	t := s.begun("call")
	was := s.task("call")
	c := step("charge", 1, `1`)
	c.ID, c.Token = t.ID, t.Token
	err := s.inTask(s.ctx, func(v taskView) error {
		got, err := v.Change(s.ctx, c)
		s.ok(err, "change")
		same(s, "applied", got.Applied, true)
		s.ok(v.add("steps", 1), "add")
		return undo
	})
	s.require(errors.Is(err, undo), "the error %v is that of the function", err)
	same(s, "the task after a rollback", s.task("call"), was)
	same(s, "total after a rollback", s.total("steps"), 0)
	s.ok(s.inTask(s.ctx, func(v taskView) error {
		got, err := v.Change(s.ctx, c)
		s.ok(err, "change")
		same(s, "applied, undo, version", []any{got.Applied, got.Now.Undo, got.Now.Version, got.Group == nil}, []any{true, false, was.Version + 1, true})
		return v.add("steps", 1)
	}), "commit")
	s.sameState(s.task("call").State, filled("charge", 1, `1`))
	s.ok(s.inTask(s.ctx, func(v taskView) error {
		got, err := v.Change(s.ctx, c)
		s.ok(err, "change again")
		same(s, "applied", got.Applied, false)
		same(s, "the task of a refused change", plainTask(got.Now), s.task("call"))
		other := c
		other.Token = claim.NewToken()
		got, err = v.Change(s.ctx, other)
		s.ok(err, "change without the claim")
		same(s, "applied, late", []bool{got.Applied, got.Late(other.Token)}, []bool{false, true})
		return v.add("steps", 1)
	}), "commit after refused changes")
	same(s, "total", s.total("steps"), 2)
}

func taskLargeState(s *stage) {
	large := func(n int) json.RawMessage { return json.RawMessage(`"` + strings.Repeat("x", n-2) + `"`) }
	d := s.draftTask("call")
	d.Input = large(provider.MaxTaskState)
	s.addTasks(d)
	s.addTasks(d)
	t := s.take("call")
	same(s, "bytes of the input", len(t.Input), provider.MaxTaskState)
	s.apply(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, Slots: map[string]provider.Slot{"a": {Call: 1, Out: large(provider.MaxTaskState - 100)}}, Open: "a", Progress: true})
	now := s.apply(t, provider.TaskChange{To: provider.TaskDone, Result: large(provider.MaxTaskState)})
	same(s, "bytes", []int{len(now.State["a"].Out), len(now.Result)}, []int{provider.MaxTaskState - 100, provider.MaxTaskState})

	d = s.draftTask("answered")
	s.addTasks(d)
	same(s, "large answer", s.answerTask("answered", "paid", "m1", string(large(provider.MaxTaskState-100))), provider.AnswerTaken)
	same(s, "bytes of the answer", len(s.task("answered").State["paid"].Out), provider.MaxTaskState-100)
}

func taskDoubt(s *stage) {
	s.addTasks(s.draftTask("never"))
	s.apply(s.begun("failed"), provider.TaskChange{To: provider.TaskFailed, Doubt: true})
	s.apply(s.begun("released"), provider.TaskChange{To: provider.TaskPending, Doubt: true})
	s.apply(s.begun("abandoned"), provider.TaskChange{To: provider.TaskAbandoned, Doubt: true})
	s.apply(s.begun("sure failed"), provider.TaskChange{To: provider.TaskFailed})
	s.apply(s.begun("sure released"), provider.TaskChange{To: provider.TaskPending})
	s.apply(s.begun("sure abandoned"), provider.TaskChange{To: provider.TaskAbandoned})
	s.apply(s.begun("requeued"), provider.TaskChange{To: provider.TaskAbandoned, Doubt: true})
	_, err := s.tasks.RequeueTasks(s.ctx, provider.TaskFilter{IDs: s.ids("requeued")}, ann)
	s.ok(err, "requeue")
	s.apply(s.begun("stepped"), step("charge", 1, `1`))
	s.begun("claimed")
	s.apply(s.begun("waiting"), wait("paid", 1, lease))
	s.apply(s.begun("answered"), wait("paid", 1, lease))
	s.answerTask("answered", "paid", "m1", `1`)
	s.apply(s.begun("again"), wait("paid", 1, lease))
	s.answerTask("again", "paid", "m1", `1`)
	s.take("again")
	for name, doubt := range map[string]bool{
		"never": false, "failed": true, "released": true, "abandoned": true, "requeued": true, "sure failed": false, "sure released": false, "sure abandoned": false, "stepped": true, "claimed": true,
		"waiting": false, "answered": false, "again": true,
	} {
		same(s, "doubt of the task that is "+name, s.task(name).Doubt, doubt)
		same(s, "cancel", s.cancelTask(name), true)
		same(s, "doubt of the canceled task that was "+name, s.task(name).Doubt, doubt)
		if s.task(name).Status == provider.TaskPending {
			same(s, "doubt of the claimed task that was "+name, s.take(name).Doubt, doubt)
		}
	}
}
