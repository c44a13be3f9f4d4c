package providertest

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
)

func taskAnsweredElsewhere(s *stage) {
	s.addTasks(s.draftTask("pending"))
	claimed := s.begun("claimed")
	s.apply(s.begun("failed"), provider.TaskChange{To: provider.TaskFailed, After: lease, Code: "x"})
	s.apply(s.begun("abandoned"), provider.TaskChange{To: provider.TaskAbandoned, Code: "x"})
	s.apply(s.begun("waiting"), wait("other", 1, time.Hour))
	s.begun("undo")
	same(s, "cancel", s.cancelTask("undo"), true)
	for _, name := range []string{"pending", "claimed", "failed", "abandoned", "waiting", "undo"} {
		was := s.task(name)
		same(s, "answer to a task that is "+name, s.answerTask(name, "paid", "m1", `[1]`), provider.AnswerTaken)
		now := s.task(name)
		slot := now.State["paid"]
		s.sameJSON("answer", slot.Out, `[1]`)
		same(s, "slot", []any{slot.Call, slot.By}, []any{0, "m1"})
		same(s, "version", now.Version, was.Version+1)
		now.State, now.Version, was.State, was.Version = nil, 0, nil, 0
		same(s, "the answered task apart from its slots", now, was)
		same(s, "the same answer again", s.answerTask(name, "paid", "m1", `[1]`), provider.AnswerAgain)
		same(s, "another answer", s.answerTask(name, "paid", "m2", `[1]`), provider.AnswerLate)
	}
	s.apply(claimed, provider.TaskChange{To: provider.TaskDone})
	s.trailed("pending", "answered paid")
}

func taskDone(s *stage) {
	t := s.begun("call")
	s.apply(t, step("charge", 1, `1`))
	now := s.apply(t, provider.TaskChange{To: provider.TaskDone, Result: json.RawMessage(`{"total":12}`), Slots: filled("ship", 2, `2`)})
	s.sameJSON("result", now.Result, `{"total":12}`)
	s.sameState(now.State, map[string]provider.Slot{"charge": {Call: 1, Out: json.RawMessage(`1`)}, "ship": {Call: 2, Out: json.RawMessage(`2`)}})
	s.require(!now.EndedAt.Before(now.CreatedAt), "a task created at %v ended at %v", now.CreatedAt, now.EndedAt)
	s.vanish()
	s.notDue("call")
	s.trailed("call", "done")
}

func taskDoneDespiteUndo(s *stage) {
	t := s.begun("call")
	same(s, "cancel", s.cancelTask("call"), true)
	got := s.refuse(t, provider.TaskChange{To: provider.TaskDone, Result: json.RawMessage(`1`)})
	same(s, "the refused change", []any{got.Now.Undo, got.Now.Why, got.Late(t.Token)}, []any{true, provider.WhyCanceled, false})
	tx := s.changeTx(t, provider.TaskChange{To: provider.TaskDone, Result: json.RawMessage(`1`)})
	same(s, "the change in a transaction", []any{tx.Applied, tx.Group == nil, tx.Now.Undo}, []any{false, true, true})
	now := s.apply(t, provider.TaskChange{To: provider.TaskPending, Result: json.RawMessage(`1`)})
	same(s, "the result that is ignored", string(now.Result), "")

	t = s.begun("gave up")
	s.apply(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, GiveUp: "refused"})
	s.refuse(t, provider.TaskChange{To: provider.TaskDone, Result: json.RawMessage(`1`)})
	s.refuse(t, wait("paid", 1, time.Hour))
}

func taskFailed(s *stage) {
	t := s.begun("call")
	now := s.apply(t, provider.TaskChange{To: provider.TaskFailed, After: 3 * time.Hour, Code: "*net.OpError"})
	same(s, "the failed task", []any{now.Attempts, now.Code, now.Vanished, now.EndedAt.IsZero(), now.ClaimedBy},
		[]any{1, "*net.OpError", 0, true, "worker"})
	backoff := now.NextAt.Sub(now.CreatedAt)
	s.require(backoff >= 3*time.Hour && backoff < 3*time.Hour+patience.Limit(), "a backoff of 3h ends after %v", backoff)
	s.outdated(t)
	s.advance(4 * time.Hour)
	second := s.take("call")
	same(s, "attempts", second.Attempts, 2)
	now = s.apply(second, provider.TaskChange{To: provider.TaskFailed})
	same(s, "the code of a change without one", now.Code, "*net.OpError")
	same(s, "attempts of the third claim", s.take("call").Attempts, 3)
	s.trailed("call", "failed *net.OpError", "failed *net.OpError")
	r := s.records("call")[0]
	same(s, "By of the record", r.By, "worker")
	third := s.task("call")
	s.require(third.LastAttemptedAt.After(r.At) && third.LastAttemptedAt.Before(third.NextAt), "the last attempt at %v is the third", third.LastAttemptedAt)
}

func taskAbandoned(s *stage) {
	t := s.begun("call")
	now := s.apply(t, provider.TaskChange{To: provider.TaskAbandoned, Code: "http_404"})
	same(s, "the abandoned task", []any{now.Code, now.EndedAt.IsZero(), now.Undo}, []any{"http_404", false, false})
	s.advance(10_000 * time.Hour)
	s.notDue("call")
	s.outdated(t)
	s.trailed("call", "abandoned http_404")
}

func taskGivesUp(s *stage) {
	for name, doubt := range map[string]bool{"sure": false, "doubt": true} {
		t := s.begun(name)
		s.apply(t, step("charge", 1, `1`))
		now := s.apply(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, GiveUp: "out_of_stock", Doubt: doubt, Slots: filled("note", 2, `2`)})
		same(s, "the task that gave up", []any{now.Undo, now.Why, now.Doubt, now.Token}, []any{true, "out_of_stock", doubt, t.Token})
		s.trailed(name, "gave_up out_of_stock")
		same(s, "cancel of a task that is being undone", s.cancelTask(name), false)
		now = s.apply(t, provider.TaskChange{
			To: provider.TaskClaimed, After: lease, Progress: true, Open: provider.UndoSlot("charge"), Slots: filled(provider.UndoSlot("charge"), 0, `true`),
		})
		same(s, "the task after an undo", []any{now.Undo, now.Why, now.Doubt, now.State[provider.UndoSlot("charge")].Filled()}, []any{true, "out_of_stock", doubt, true})
		s.apply(t, provider.TaskChange{To: provider.TaskUndone})
		s.trailed(name, "gave_up out_of_stock", "undone")
	}
}

func taskForwardAgain(s *stage) {
	t := s.begun("call")
	s.apply(t, step("charge", 1, `1`))
	s.apply(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, GiveUp: "refused", Doubt: true})
	undo := func(what string, t provider.Task) {
		s.Helper()
		same(s, "direction after "+what, []any{t.Undo, t.Why, t.Doubt}, []any{true, "refused", true})
	}
	s.vanish()
	t = s.take("call")
	undo("a lost lease", t)
	undo("a failure", s.apply(t, provider.TaskChange{To: provider.TaskFailed, Code: "x", Doubt: true}))
	t = s.take("call")
	undo("a claim of a failed task", t)
	undo("a release", s.apply(t, provider.TaskChange{To: provider.TaskPending, Doubt: true}))
	t = s.take("call")
	undo("a claim of a released task", t)
	s.apply(t, provider.TaskChange{To: provider.TaskAbandoned, Code: "x", Doubt: true})
	n, err := s.tasks.RequeueTasks(s.ctx, provider.TaskFilter{IDs: []string{t.ID}}, ann)
	s.ok(err, "requeue")
	same(s, "requeued", n, 1)
	t = s.take("call")
	undo("a requeue", t)
	s.vanish()
	s.take("call")
	s.vanish()
	same(s, "ids of a claim of a suspect among others", taskIDs(s.claimAll(s.query("call"), 10)), []string{})
	t = s.takeAlone("call")
	undo("a claim alone", t)
	s.refuse(t, provider.TaskChange{To: provider.TaskDone})
	s.apply(t, provider.TaskChange{To: provider.TaskUndone})
}

func taskCanceled(s *stage) {
	t := s.begun("claimed")
	was := s.task("claimed")
	same(s, "cancel of a claimed task", s.cancelTask("claimed"), true)
	now := s.task("claimed")
	want := was
	want.Undo, want.Why, want.Doubt, want.Version = true, provider.WhyCanceled, true, was.Version+1
	same(s, "the canceled claimed task", now, want)
	late, err := s.tasks.RenewTasks(s.ctx, []provider.Task{t}, lease)
	s.ok(err, "renew")
	same(s, "late", len(late), 0)
	got := s.try(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, Slots: filled("charge", 1, `1`), Open: "charge", Progress: true})
	same(s, "what the next change reports", []any{got.Applied, got.Now.Undo}, []any{true, true})
	s.apply(t, provider.TaskChange{To: provider.TaskUndone})
	same(s, "cancel of a task that does not exist", s.cancelTask("nothing"), false)
	s.trailed("claimed", "canceled", "undone")
}

func taskUndone(s *stage) {
	t := s.begun("call")
	same(s, "cancel", s.cancelTask("call"), true)
	now := s.apply(t, provider.TaskChange{To: provider.TaskUndone})
	same(s, "the undone task", []any{now.Undo, now.Why, now.EndedAt.IsZero()}, []any{true, provider.WhyCanceled, false})
	s.vanish()
	s.notDue("call")
	s.outdated(t)
	s.trailed("call", "canceled", "undone")

	t = s.begun("at once") // what a task of one transaction does: it has nothing to undo
	now = s.apply(t, provider.TaskChange{To: provider.TaskUndone, GiveUp: "refused"})
	same(s, "the task that gave up and is undone", []any{now.Undo, now.Why}, []any{true, "refused"})
}

func taskReleased(s *stage) {
	t := s.begun("call")
	s.apply(t, provider.TaskChange{To: provider.TaskFailed})
	t = s.take("call")
	same(s, "attempts", t.Attempts, 2)
	now := s.apply(t, provider.TaskChange{To: provider.TaskPending, After: 2 * time.Hour, Code: "audit"})
	same(s, "the released task", []any{now.Attempts, now.Vanished, now.Code, now.EndedAt.IsZero()}, []any{1, 0, "audit", true})
	s.outdated(t)
	s.notDue("call")
	s.advance(3 * time.Hour)
	for range 3 * taskLimit { // releases do not use attempts up
		t = s.take("call")
		same(s, "attempts of a claim after a release", t.Attempts, 2)
		s.apply(t, provider.TaskChange{To: provider.TaskPending})
	}
}

func taskFinal(s *stage) {
	t := s.begun("done")
	s.answerTask("done", "paid", "m1", `1`)
	s.apply(t, provider.TaskChange{To: provider.TaskDone, Result: json.RawMessage(`1`)})
	u := s.begun("undone")
	s.answerTask("undone", "paid", "m1", `1`)
	s.cancelTask("undone")
	s.apply(u, provider.TaskChange{To: provider.TaskUndone})
	for name, t := range map[string]provider.Task{"done": t, "undone": u} {
		was := s.task(name)
		trail := s.records(name)
		s.outdated(t)
		same(s, "cancel", s.cancelTask(name), false)
		same(s, "postpone", s.postpone(name, s.taskClock()), false)
		same(s, "answer", s.answerTask(name, "other", "m1", `1`), provider.AnswerLate)
		same(s, "another answer", s.answerTask(name, "paid", "m2", `2`), provider.AnswerLate)
		same(s, "the answer that it has", s.answerTask(name, "paid", "m1", `1`), provider.AnswerAgain)
		f := provider.TaskFilter{IDs: []string{t.ID}}
		requeued, err := s.tasks.RequeueTasks(s.ctx, f, ann)
		s.ok(err, "requeue")
		canceled, err := s.tasks.CancelTasks(s.ctx, f, ann)
		s.ok(err, "cancel")
		same(s, "requeued, canceled", []int{requeued, canceled}, []int{0, 0})
		for what, err := range map[string]error{
			"complete": s.tasks.CompleteTask(s.ctx, t.ID, json.RawMessage(`2`), ann),
			"patch":    s.tasks.PatchTask(s.ctx, t.ID, was.Version, json.RawMessage(`{"paid":null}`), ann),
		} {
			s.require(errors.Is(err, provider.ErrTaskVersion), "%s: the error %v is ErrTaskVersion", what, err)
		}
		late, err := s.tasks.RenewTasks(s.ctx, []provider.Task{t}, lease)
		s.ok(err, "renew")
		same(s, "late", late, []string{t.ID})
		s.vanish()
		s.notDue(name)
		same(s, "times are older by what the clock was moved", s.task(name).Status, was.Status)
		same(s, "version of a final task", s.task(name).Version, was.Version)
		same(s, "records of a final task", len(s.records(name)), len(trail))
	}
}
