package providertest

import (
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var taskAnswerCases = []testCase{
	{
		// Promise: T5.1
		name: "outcomes of an answer", play: taskOutcomes,
		rule: "AnswerTaken: it fills the slot; AnswerAgain: the slot has it already; AnswerLate: the slot has another value; AnswerNotFound: no such task",
	},
	{
		// Promise: T5.1
		name: "an answer before the wait", play: taskAnswerFirst,
		rule: "An answer fills the slot also before the task waits, or before it is claimed at all; the wait is then refused",
	},
	{
		// Promise: T5.1
		name: "an answer after the timeout", play: taskAnswerLate,
		rule: "A decided timeout fills the slot: an answer is late. Until it is decided, an answer is taken",
	},
	{
		name: "an answer to an endless wait", play: taskAnswerEndless,
		rule: "A task that waits without end becomes pending by the answer",
	},
	{
		name: "an answer in a transaction", play: taskAnswerTx,
		rule: "An answer commits with its transaction or not at all; an invalid one is an *InvalidError, and leaves the transaction usable",
	},
	{
		name: "an answer to a task that is enqueued with it", play: taskAnswerNew,
		rule: "A transaction sees the tasks that it added, and its answers, cancellations and postponements",
	},
	{
		name: "ids and values of answers", play: taskAnswerValues,
		rule: "An answer is kept as a JSON value, under an id of up to 255 bytes of any text",
	},
	{
		// Promise: T13.1
		name: "postpone", play: taskPostponed,
		rule: "Postpone makes a pending, failed or claimed task that goes forward due at a time, with no attempts counted; the result of a run does not count",
	},
	{
		// Promise: T13.1
		name: "postpone refused", play: taskNotPostponed,
		rule: "Postpone returns false, and changes nothing, for a task with slots or a result, one that is waiting, abandoned, final or to be undone, and one that does not exist",
	},
	{
		// Promise: T13.1
		name: "postpone and cancel in a transaction", play: taskTimerTx,
		rule: "Postpone and Cancel commit with their transaction or not at all; invalid arguments are an *InvalidError, and leave the transaction usable",
	},
}

func taskOutcomes(s *stage) {
	s.addTasks(s.draftTask("call"))
	for _, a := range []struct {
		slot, id, out string
		want          provider.AnswerOutcome
	}{
		{"paid", "m1", `1`, provider.AnswerTaken},
		{"paid", "m1", `1`, provider.AnswerAgain},
		{"paid", "m1", `2`, provider.AnswerAgain}, // the id is that of the message
		{"paid", "m2", `1`, provider.AnswerLate},
		{"paid", "M1", `1`, provider.AnswerLate},
		{"shipped", "m1", `3`, provider.AnswerTaken}, // one message can answer two waits
		{"shipped", "m2", `3`, provider.AnswerLate},
	} {
		version := s.task("call").Version
		same(s, "outcome of "+a.slot+" by "+a.id, s.answerTask("call", a.slot, a.id, a.out), a.want)
		if a.want == provider.AnswerTaken {
			version++
		}
		same(s, "version", s.task("call").Version, version)
	}
	same(s, "answer to no task", s.answerTask("nothing", "paid", "m1", `1`), provider.AnswerNotFound)
	s.sameJSON("the first answer", s.task("call").State["paid"].Out, `1`)
	s.trailed("call", "answered paid", "answered shipped")
}

func taskAnswerFirst(s *stage) {
	s.addTasks(s.draftTask("call"))
	same(s, "answer to a pending task", s.answerTask("call", "paid", "m1", `1`), provider.AnswerTaken)
	t := s.take("call")
	s.sameJSON("answer in the claimed task", t.State["paid"].Out, `1`)
	got := s.refuse(t, wait("paid", 1, time.Hour))
	same(s, "late", got.Late(t.Token), false)
	same(s, "answer to a claimed task", s.answerTask("call", "shipped", "m2", `2`), provider.AnswerTaken)
	got = s.refuse(t, wait("shipped", 2, time.Hour))
	s.sameJSON("answer in the refused change", got.Now.State["shipped"].Out, `2`)
	s.apply(t, provider.TaskChange{To: provider.TaskDone, Slots: map[string]provider.Slot{"paid": {Call: 1, Out: got.Now.State["paid"].Out, By: "m1"}}})
}

func taskAnswerLate(s *stage) {
	for _, name := range []string{"timeout", "answer"} {
		s.apply(s.begun(name), wait("paid", 1, time.Hour))
	}
	s.advance(2 * time.Hour)
	timeout := provider.TaskChange{
		To: provider.TaskClaimed, After: lease, Slots: map[string]provider.Slot{"paid": {Call: 1, Timeout: true}}, Open: "paid", Progress: true,
	}
	t := s.take("timeout")
	s.apply(t, timeout)
	was := s.task("timeout")
	same(s, "answer after the timeout", s.answerTask("timeout", "paid", "m1", `1`), provider.AnswerLate)
	same(s, "the task", s.task("timeout"), was)
	t = s.take("answer")
	same(s, "TimedOut", t.TimedOut, true)
	same(s, "answer before the timeout is decided", s.answerTask("answer", "paid", "m1", `1`), provider.AnswerTaken)
	got := s.refuse(t, timeout)
	same(s, "slot of the refused change", []any{got.Now.State["paid"].Timeout, got.Now.State["paid"].By, got.Late(t.Token)}, []any{false, "m1", false})

	s.apply(s.begun("waiting"), wait("paid", 1, time.Hour))
	s.advance(2 * time.Hour)
	same(s, "answer to a task whose time is over and that nobody has claimed", s.answerTask("waiting", "paid", "m1", `1`), provider.AnswerTaken)
	t = s.take("waiting")
	same(s, "filled", t.State["paid"].Filled(), true)
	s.refuse(t, timeout)
}

func taskAnswerEndless(s *stage) {
	s.apply(s.begun("call"), wait("paid", 1, 0))
	s.advance(lease)
	same(s, "answer under another name", s.answerTask("call", "shipped", "m1", `1`), provider.AnswerTaken)
	s.notDue("call")
	same(s, "answer", s.answerTask("call", "paid", "m2", `1`), provider.AnswerTaken)
	t := s.take("call")
	same(s, "the claimed task", []any{t.TimedOut, t.Waits}, []any{false, "paid"})
}

func taskAnswerTx(s *stage) {
	undo := errors.New("undo")
	t := s.begun("call")
	s.apply(t, wait("paid", 1, time.Hour))
	was := s.task("call")
	good := provider.TaskAnswer{Task: t.ID, Name: "paid", ID: "m1", Out: json.RawMessage(`1`)}
	err := s.inTask(s.ctx, func(v taskView) error {
		got, err := v.Answer(s.ctx, good)
		s.ok(err, "answer")
		same(s, "outcome", got, provider.AnswerTaken)
		return undo
	})
	s.require(errors.Is(err, undo), "the error %v is that of the function", err)
	same(s, "the task after a rollback", s.task("call"), was)
	s.trailed("call")
	for name, change := range map[string]func(a *provider.TaskAnswer){
		"no task": func(a *provider.TaskAnswer) { a.Task = "" }, "a long id of a task": func(a *provider.TaskAnswer) { a.Task = strings.Repeat("x", 256) },
		"no name": func(a *provider.TaskAnswer) { a.Name = "" }, "a bad name": func(a *provider.TaskAnswer) { a.Name = "Paid" },
		"the name of an undo": func(a *provider.TaskAnswer) { a.Name = provider.UndoSlot("paid") },
		"no id":               func(a *provider.TaskAnswer) { a.ID = "" }, "an id with NUL": func(a *provider.TaskAnswer) { a.ID = "\x00" },
		"no answer": func(a *provider.TaskAnswer) { a.Out = nil }, "no JSON": func(a *provider.TaskAnswer) { a.Out = json.RawMessage(`{`) },
		"a NUL": func(a *provider.TaskAnswer) { a.Out = json.RawMessage(`"\u0000"`) }, "a lone surrogate": func(a *provider.TaskAnswer) { a.Out = json.RawMessage(`"\ud800"`) },
		"a large number": func(a *provider.TaskAnswer) { a.Out = json.RawMessage(`1e131072`) },
		"a large answer": func(a *provider.TaskAnswer) {
			a.Out = json.RawMessage(`"` + strings.Repeat("x", provider.MaxTaskState) + `"`)
		},
	} {
		bad := good
		change(&bad)
		s.ok(s.inTask(s.ctx, func(v taskView) error {
			_, err := v.Answer(s.ctx, bad)
			s.invalid(err, name)
			return v.add("after "+name, 1)
		}), "commit after "+name)
		same(s, "total", s.total("after "+name), 1)
	}
	same(s, "the task after invalid answers", s.task("call"), was)
	same(s, "answer", s.answerTask("call", "paid", "m1", `1`), provider.AnswerTaken)
}

func taskAnswerNew(s *stage) {
	at := s.taskClock().Truncate(time.Millisecond).Add(time.Hour + 1)
	s.ok(s.inTask(s.ctx, func(v taskView) error {
		s.ok(v.Enqueue(s.ctx, s.draftTask("answered"), s.draftTask("canceled"), s.draftTask("postponed")), "enqueue")
		a := provider.TaskAnswer{Task: s.id("answered"), Name: "paid", ID: "m1", Out: json.RawMessage(`1`)}
		for _, want := range []provider.AnswerOutcome{provider.AnswerTaken, provider.AnswerAgain} {
			got, err := v.Answer(s.ctx, a)
			s.ok(err, "answer")
			same(s, "outcome", got, want)
		}
		for _, want := range []bool{true, false} {
			ok, err := v.Cancel(s.ctx, s.id("canceled"))
			s.ok(err, "cancel")
			same(s, "canceled", ok, want)
		}
		ok, err := v.Postpone(s.ctx, s.id("postponed"), at)
		s.ok(err, "postpone")
		same(s, "postponed", ok, true)
		return v.Enqueue(s.ctx, s.draftTask("answered"))
	}), "commit")
	same(s, "the answer", s.task("answered").State["paid"].Filled(), true)
	same(s, "the cancellation", s.task("canceled").Undo, true)
	s.notDue("postponed")
	s.require(!s.task("postponed").NextAt.Before(at), "a postponed task is not due before its time: %v, %v", s.task("postponed").NextAt, at)
	s.trailed("answered", "answered paid")
}

func taskAnswerValues(s *stage) {
	s.addTasks(s.draftTask("call"))
	for i, out := range []string{
		`null`, `true`, `0`, `-0.25`, `1e2`, `12345678901234567890123456789`, `""`, `"\u00e9\"\\ '; --"`, `[]`, `{}`, `{"b":1,"a":[null,{"out":null}]}`,
		` [ 1 , 2 ] `, `"日本"`, strings.Repeat("[", 900) + strings.Repeat("]", 900),
	} {
		name := "a" + strings.Repeat("x", i)
		id := "o'hara \"日本\" \n\t;-- %_\\" + strings.Repeat("x", i)
		if i == 0 {
			id = strings.Repeat("é", 127) + "x" // 255 bytes
		}
		id = strings.NewReplacer("\n", "", "\t", "").Replace(id)
		same(s, "answer of "+out, s.answerTask("call", name, id, out), provider.AnswerTaken)
		same(s, "answer again", s.answerTask("call", name, id, out), provider.AnswerAgain)
		slot := s.task("call").State[name]
		s.sameJSON("answer", slot.Out, out)
		same(s, "id of the answer", slot.By, id)
	}
	trail := s.records("call")
	same(s, "records", len(trail), 14)
	same(s, "By of a record", trail[0].By, strings.Repeat("é", 127)+"x")
}

func taskPostponed(s *stage) {
	s.addTasks(s.draftTask("pending"))
	t := s.begun("failed")
	s.apply(t, provider.TaskChange{To: provider.TaskFailed, Code: "x"})
	s.apply(s.take("failed"), provider.TaskChange{To: provider.TaskFailed, After: lease, Code: "x"})
	claimed := s.begun("claimed")
	for _, name := range []string{"pending", "failed", "claimed"} {
		was := s.task(name)
		at := s.taskClock().Add(3 * time.Hour)
		same(s, "postpone a task that is "+name, s.postpone(name, at), true)
		now := s.task(name)
		same(s, "the postponed task", []any{now.Version, now.Attempts, now.Undo, now.Status != provider.TaskClaimed}, []any{was.Version + 1, 0, false, true})
		off := now.NextAt.Sub(at)
		s.require(off > -time.Second && off < time.Second, "the task is due at %v, and was postponed to %v", now.NextAt, at)
		s.notDue(name)
	}
	s.outdated(claimed)
	s.advance(2 * time.Hour)
	s.notDue("pending", "failed", "claimed")
	same(s, "postpone again", s.postpone("pending", s.taskClock().Add(3*time.Hour)), true)
	s.advance(2 * time.Hour)
	s.notDue("pending")
	for _, name := range []string{"failed", "claimed"} {
		same(s, "attempts of a claim", s.take(name).Attempts, 1)
	}
	same(s, "postpone to the past", s.postpone("pending", s.taskClock().Add(-time.Hour)), true)
	s.take("pending")
	s.trailed("pending", "postponed", "postponed", "postponed")
	s.addTasks(s.draftTask("far"))
	far := time.Date(9000, 1, 2, 3, 4, 5, 0, time.UTC)
	same(s, "postpone to the year 9000", s.postpone("far", far), true)
	same(s, "NextAt", s.task("far").NextAt, far)
	s.notDue("far")
}

func taskNotPostponed(s *stage) {
	s.apply(s.begun("stepped"), step("charge", 1, `1`))
	s.apply(s.begun("kept"), provider.TaskChange{To: provider.TaskPending, Result: json.RawMessage(`1`)})
	s.addTasks(s.draftTask("answered"))
	s.answerTask("answered", "paid", "m1", `1`)
	s.apply(s.begun("waiting"), wait("paid", 1, time.Hour))
	s.apply(s.begun("endless"), provider.TaskChange{To: provider.TaskWaiting, Open: "paid"})
	s.apply(s.begun("abandoned"), provider.TaskChange{To: provider.TaskAbandoned})
	s.apply(s.begun("done"), provider.TaskChange{To: provider.TaskDone})
	s.addTasks(s.draftTask("canceled"))
	s.cancelTask("canceled")
	u := s.begun("undone")
	s.cancelTask("undone")
	s.apply(u, provider.TaskChange{To: provider.TaskUndone})
	at := s.taskClock().Add(time.Hour)
	for _, name := range []string{"stepped", "kept", "answered", "waiting", "endless", "abandoned", "done", "canceled", "undone"} {
		was, trail := s.task(name), len(s.records(name))
		same(s, "postpone a task that is "+name, s.postpone(name, at), false)
		same(s, "the task", s.task(name), was)
		same(s, "records", len(s.records(name)), trail)
	}
	same(s, "postpone a task that does not exist", s.postpone("nothing", at), false)
}

func taskTimerTx(s *stage) {
	undo := errors.New("undo")
	s.addTasks(s.draftTask("a"), s.draftTask("b"))
	was := s.listTasks(provider.TaskFilter{IDs: s.ids("a", "b")})
	at := s.taskClock().Add(time.Hour)
	err := s.inTask(s.ctx, func(v taskView) error {
		ok, err := v.Postpone(s.ctx, s.id("a"), at)
		s.ok(err, "postpone")
		same(s, "postponed", ok, true)
		ok, err = v.Cancel(s.ctx, s.id("b"))
		s.ok(err, "cancel")
		same(s, "canceled", ok, true)
		return undo
	})
	s.require(errors.Is(err, undo), "the error %v is that of the function", err)
	same(s, "the tasks after a rollback", s.listTasks(provider.TaskFilter{IDs: s.ids("a", "b")}), was)
	s.trailed("a")
	s.trailed("b")
	for name, bad := range map[string]struct {
		id string
		at time.Time
	}{
		"a zero time": {s.id("a"), time.Time{}}, "a year past 9999": {s.id("a"), year(10_000)}, "a year before 1": {s.id("a"), year(-5000)},
		"a bad id": {"\x00", at}, "a long id": {strings.Repeat("x", 256), at},
	} {
		s.ok(s.inTask(s.ctx, func(v taskView) error {
			_, err := v.Postpone(s.ctx, bad.id, bad.at)
			s.invalid(err, name)
			return v.add("after "+name, 1)
		}), "commit after "+name)
		same(s, "total", s.total("after "+name), 1)
	}
	same(s, "the tasks", s.listTasks(provider.TaskFilter{IDs: s.ids("a", "b")}), was)
}
