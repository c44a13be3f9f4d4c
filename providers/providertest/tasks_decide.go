package providertest

import (
	"encoding/json"
	"errors"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

var taskDecideCases = []testCase{
	{
		name: "a decision needs who and why", play: taskDecisions,
		rule: "A decision that Decision.Validate refuses is ErrInput, and nothing is changed",
	},
	{
		name: "requeue what a filter selects", play: taskRequeueMany,
		rule: "RequeueTasks makes the abandoned and failed tasks that f selects pending at once, with no attempts counted, and returns their number; slots and direction stay, and others are unchanged",
	},
	{
		name: "cancel what a filter selects", play: taskCancelMany,
		rule: "CancelTasks cancels the tasks that f selects, and returns their number; final ones and those that are being undone are unchanged",
	},
	{
		name: "complete only abandoned tasks", play: taskCompleteOnly,
		rule: "CompleteTask makes an abandoned task pending with a result, and a worker ends it as done. It is ErrTaskVersion for others; invalid JSON is an *InvalidError",
	},
	{
		name: "patch", play: taskPatched,
		rule: "PatchTask changes the state of a pending, failed, waiting or abandoned task by a JSON merge patch; a null removes a slot",
	},
	{
		name: "patch at another version", play: taskPatchVersion,
		rule: "PatchTask is ErrTaskVersion if the task has another version, or a worker has it, ErrTaskEnded if it has ended, and an *InvalidError if the result is no state",
	},
	{
		name: "patch of the slot that a task waits for", play: taskPatchResumes,
		rule: "A patch that fills the slot that a task waits for makes the task pending",
	},
	{
		name: "decisions and claims", play: taskDecisionFence,
		rule: "A decision about a claimed task leaves its claim, and one about another task ends no claim",
	},
}

func taskDecisions(s *stage) {
	s.oneOfEachTask()
	mine := provider.TaskFilter{IDs: s.ids("pending", "claimed", "failed", "waiting", "done", "undone", "abandoned")}
	was := s.listTasks(mine)
	for name, d := range map[string]provider.Decision{
		"none": {}, "no one": {Reason: "why"}, "no reason": {By: "ann"}, "a long name": {By: strings.Repeat("x", 256), Reason: "why"},
		"a long reason": {By: "ann", Reason: strings.Repeat("x", 1001)}, "a NUL": {By: "a\x00", Reason: "why"}, "not UTF-8": {By: "ann", Reason: replacement},
	} {
		_, requeue := s.tasks.RequeueTasks(s.ctx, mine, d)
		_, cancel := s.tasks.CancelTasks(s.ctx, mine, d)
		for what, err := range map[string]error{
			"requeue": requeue, "cancel": cancel,
			"complete": s.tasks.CompleteTask(s.ctx, s.id("abandoned"), json.RawMessage(`1`), d),
			"patch":    s.tasks.PatchTask(s.ctx, s.id("abandoned"), s.task("abandoned").Version, json.RawMessage(`{}`), d),
		} {
			s.require(errors.Is(err, provider.ErrInput), "%s, %s: the error %v is ErrInput", what, name, err)
		}
	}
	same(s, "the tasks", s.listTasks(mine), was)
	s.trailed("abandoned", "abandoned http_404")
}

func taskRequeueMany(s *stage) {
	s.oneOfEachTask()
	mine := provider.TaskFilter{IDs: s.ids("pending", "claimed", "failed", "waiting", "done", "undone", "abandoned")}
	was := s.listTasks(mine)
	f := mine
	f.Code = "http_500"
	n, err := s.tasks.RequeueTasks(s.ctx, f, ann)
	s.ok(err, "requeue by code")
	same(s, "requeued", n, 1)
	same(s, "the failed task", s.task("failed").Status, provider.TaskPending)
	n, err = s.tasks.RequeueTasks(s.ctx, mine, ann)
	s.ok(err, "requeue")
	same(s, "requeued", n, 1)
	n, err = s.tasks.RequeueTasks(s.ctx, mine, ann)
	s.ok(err, "requeue again")
	same(s, "requeued", n, 0)
	for _, t := range was {
		name := string(t.Status)
		if now := s.task(name); t.Status == provider.TaskFailed || t.Status == provider.TaskAbandoned {
			same(s, "the requeued task", []any{now.Status, now.Attempts, now.Vanished, now.EndedAt.IsZero(), now.Version, now.Undo},
				[]any{provider.TaskPending, 0, 0, true, t.Version + 1, t.Undo})
			s.sameState(now.State, t.State)
			records := s.records(name)
			r := records[len(records)-1]
			same(s, "its record", []string{r.What, r.By, r.Reason}, []string{provider.WhatRequeued, ann.By, ann.Reason})
			same(s, "attempts of the next claim", s.take(name).Attempts, 1)
		} else {
			same(s, "a task in another status", now, t)
		}
	}
	s.openTasks("g", 3)
}

func taskCancelMany(s *stage) {
	s.oneOfEachTask()
	mine := provider.TaskFilter{IDs: s.ids("pending", "claimed", "failed", "waiting", "done", "undone", "abandoned")}
	was := s.listTasks(mine)
	n, err := s.tasks.CancelTasks(s.ctx, mine, ann)
	s.ok(err, "cancel")
	same(s, "canceled", n, 5)
	for _, t := range was {
		now := s.task(string(t.Status))
		if t.Status.Final() {
			same(s, "a final task", now, t)
			continue
		}
		status := provider.TaskPending
		if t.Status == provider.TaskClaimed {
			status = t.Status
		}
		same(s, "the canceled task", []any{now.Status, now.Undo, now.Why, now.Version, now.Doubt, now.EndedAt.IsZero()},
			[]any{status, true, provider.WhyCanceled, t.Version + 1, t.Doubt, true})
		last := s.records(string(t.Status))
		r := last[len(last)-1]
		same(s, "its record", []string{r.What, r.By, r.Reason}, []string{provider.WhatCanceled, ann.By, ann.Reason})
	}
	n, err = s.tasks.CancelTasks(s.ctx, mine, ann)
	s.ok(err, "cancel again")
	same(s, "canceled", n, 0)
}

func taskCompleteOnly(s *stage) {
	s.oneOfEachTask()
	for _, name := range []string{"pending", "claimed", "failed", "waiting", "done", "undone"} {
		was := s.task(name)
		err := s.tasks.CompleteTask(s.ctx, s.id(name), json.RawMessage(`1`), ann)
		s.require(errors.Is(err, provider.ErrTaskVersion), "complete a task that is %s: the error %v is ErrTaskVersion", name, err)
		same(s, "the task", s.task(name), was)
	}
	err := s.tasks.CompleteTask(s.ctx, s.id("nothing"), json.RawMessage(`1`), ann)
	s.require(errors.Is(err, provider.ErrTaskVersion), "complete a task that does not exist: the error %v is ErrTaskVersion", err)
	for _, result := range []string{``, `{`, `"\u0000"`, `1e131072`, `{"a":1,"a":2}`} {
		s.invalid(s.tasks.CompleteTask(s.ctx, s.id("abandoned"), json.RawMessage(result), ann), "complete with "+result)
	}
	t := s.begun("undo") // abandoned while it was being undone: a worker ends it as undone
	s.cancelTask("undo")
	s.apply(t, provider.TaskChange{To: provider.TaskAbandoned})
	s.ok(s.tasks.CompleteTask(s.ctx, t.ID, json.RawMessage(`1`), ann), "complete a task that is being undone")
	now := s.task("undo")
	same(s, "the completed task", []any{now.Status, now.Undo, string(now.Result)}, []any{provider.TaskPending, true, "1"})
	done := s.begun("done by hand")
	s.apply(done, provider.TaskChange{To: provider.TaskAbandoned})
	s.ok(s.tasks.CompleteTask(s.ctx, done.ID, json.RawMessage(`{"by":"hand"}`), ann), "complete")
	done = s.take("done by hand")
	s.sameJSON("result of the claimed task", done.Result, `{"by":"hand"}`)
	s.sameJSON("result of the done task", s.apply(done, provider.TaskChange{To: provider.TaskDone, Result: done.Result}).Result, `{"by":"hand"}`)
	// a later cancellation of a completed task drops the result: its steps are undone
	s.ok(s.tasks.CompleteTask(s.ctx, s.id("abandoned"), json.RawMessage(`1`), ann), "complete")
	same(s, "cancel", s.cancelTask("abandoned"), true)
	same(s, "the result of a canceled task", string(s.task("abandoned").Result), "")
	_, err = s.tasks.CancelTasks(s.ctx, provider.TaskFilter{}, ann)
	s.require(errors.Is(err, provider.ErrInput), "cancel all tasks: the error %v is ErrInput", err)
	_, err = s.tasks.CancelTasks(s.ctx, provider.TaskFilter{After: "a", Limit: 3}, ann)
	s.require(errors.Is(err, provider.ErrInput), "cancel any tasks: the error %v is ErrInput", err)
}

func taskPatched(s *stage) {
	s.oneOfEachTask()
	for _, name := range []string{"pending", "failed", "waiting", "abandoned"} {
		was := s.task(name)
		s.ok(s.tasks.PatchTask(s.ctx, was.ID, was.Version, json.RawMessage(`{"charge":{"n":3,"out":{"a":1,"b":[2]}},"late":{"n":4,"timeout":true}}`), ann), "patch")
		now := s.task(name)
		same(s, "version", now.Version, was.Version+1)
		want := map[string]provider.Slot{"charge": {Call: 3, Out: json.RawMessage(`{"a":1,"b":[2]}`)}, "late": {Call: 4, Timeout: true}}
		if name == "waiting" {
			want["paid"] = provider.Slot{Call: 1}
			same(s, "end of the wait", now.State["paid"].Until, was.State["paid"].Until)
		}
		s.sameState(now.State, want)
		now.State, now.Version, was.State, was.Version = nil, 0, nil, 0
		same(s, "the patched task apart from its state", now, was)
		s.ok(s.tasks.PatchTask(s.ctx, now.ID, s.task(name).Version, json.RawMessage(`{"late":null,"charge":{"out":{"b":null,"c":3}},"nothing":null}`), ann), "patch")
		delete(want, "late")
		want["charge"] = provider.Slot{Call: 3, Out: json.RawMessage(`{"a":1,"c":3}`)}
		s.sameState(s.task(name).State, want)
		r := s.records(name)
		same(s, "the last record", []string{r[len(r)-1].What, r[len(r)-1].By}, []string{provider.WhatPatched, ann.By})
	}
	t := s.take("pending")
	s.apply(t, step("late", 4, `1`)) // it runs again
	s.refuse(t, step("charge", 3, `1`))
}

func taskPatchVersion(s *stage) {
	s.oneOfEachTask()
	patch := json.RawMessage(`{"charge":{"n":1,"out":1}}`)
	refused := func(name string, version int64) {
		s.Helper()
		was := s.task(name)
		err := s.tasks.PatchTask(s.ctx, was.ID, version, patch, ann)
		s.require(errors.Is(err, provider.ErrTaskVersion), "patch of a task that is %s: the error %v is ErrTaskVersion", name, err)
		same(s, "the task", s.task(name), was)
	}
	for _, name := range []string{"pending", "failed", "waiting", "abandoned"} {
		version := s.task(name).Version
		refused(name, version+1)
		refused(name, version-1)
		refused(name, 0)
		for _, bad := range []string{``, `{`, `1`, `[]`, `null`, `"x"`, `{"a":1}`, `{"A":{"n":1}}`, `{"a b":{"n":1}}`, `{"a":{"n":-1}}`, `{"a":{"n":"x"}}`, `{"a":{"out":"\u0000"}}`} {
			was := s.task(name)
			s.invalid(s.tasks.PatchTask(s.ctx, was.ID, version, json.RawMessage(bad), ann), "patch "+bad)
			same(s, "the task", s.task(name), was)
		}
		s.ok(s.tasks.PatchTask(s.ctx, s.id(name), version, patch, ann), "patch")
		refused(name, version)
	}
	for _, name := range []string{"claimed", "done", "undone"} {
		refused(name, s.task(name).Version)
		err := s.tasks.PatchTask(s.ctx, s.id(name), s.task(name).Version, patch, ann)
		same(s, "patch of a task that is "+name+": ErrTaskEnded", errors.Is(err, provider.ErrTaskEnded), name != "claimed")
	}
	err := s.tasks.PatchTask(s.ctx, s.id("nothing"), 1, patch, ann)
	s.require(errors.Is(err, provider.ErrTaskVersion), "patch of a task that does not exist: the error %v is ErrTaskVersion", err)
}

func taskPatchResumes(s *stage) {
	s.apply(s.begun("call"), wait("paid", 1, 0))
	s.ok(s.tasks.PatchTask(s.ctx, s.id("call"), s.task("call").Version, json.RawMessage(`{"other":{"out":1}}`), ann), "patch another slot")
	s.notDue("call")
	s.ok(s.tasks.PatchTask(s.ctx, s.id("call"), s.task("call").Version, json.RawMessage(`{"paid":{"out":{"by":"hand"}}}`), ann), "patch")
	t := s.take("call")
	s.sameJSON("the slot", t.State["paid"].Out, `{"by":"hand"}`)
	same(s, "an answer after the patch", s.answerTask("call", "paid", "m1", `1`), provider.AnswerLate)
}

func taskDecisionFence(s *stage) {
	t := s.begun("call")
	f := provider.TaskFilter{IDs: s.ids("call")}
	n, err := s.tasks.RequeueTasks(s.ctx, f, ann)
	s.ok(err, "requeue")
	same(s, "requeued", n, 0)
	n, err = s.tasks.CancelTasks(s.ctx, f, ann)
	s.ok(err, "cancel")
	same(s, "canceled", n, 1)
	same(s, "the claim", []any{s.task("call").Status, s.task("call").Token}, []any{provider.TaskClaimed, t.Token})
	s.apply(t, provider.TaskChange{To: provider.TaskFailed, After: lease})
	n, err = s.tasks.RequeueTasks(s.ctx, f, ann)
	s.ok(err, "requeue")
	same(s, "requeued", n, 1)
	s.outdated(t)
	again := s.take("call")
	same(s, "direction", []any{again.Undo, again.Why}, []any{true, provider.WhyCanceled})
}
