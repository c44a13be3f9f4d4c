package providertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var taskInspectCases = []testCase{
	{
		name: "filters", play: taskFilters,
		rule: "Tasks lists the tasks that f selects in order of ID; the zero filter selects all, up to 100",
	},
	{
		name: "pages", play: taskPages,
		rule: "TaskFilter.After: only greater ids; Limit: the first ones; zero means 100 for Tasks, and no limit for decisions",
	},
	{
		name: "invalid filters", play: taskBadFilters,
		rule: "A filter with a text that is long, not UTF-8 or has a NUL, or with a negative limit, is an *InvalidError, and nothing is changed",
	},
	{
		name: "counts", play: taskCounted,
		rule: "TaskCounts counts tasks by status, of a kind or of all; each status is in the result, even if the count is zero",
	},
	{
		name: "trails", play: taskTrails,
		rule: "TaskTrail returns the records of a task in order, with who did it, and when",
	},
	{
		name: "a decision needs who and why", play: taskDecisions,
		rule: "A decision that Decision.Validate refuses is ErrInput, and nothing is changed",
	},
	{
		name: "requeue what a filter selects", play: taskRequeueMany,
		rule: "RequeueTasks changes the abandoned and failed tasks that f selects, and returns their number; others are unchanged",
	},
	{
		name: "cancel what a filter selects", play: taskCancelMany,
		rule: "CancelTasks cancels the tasks that f selects, and returns their number; final ones and those that are being undone are unchanged",
	},
	{
		name: "complete only abandoned tasks", play: taskCompleteOnly,
		rule: "CompleteTask is ErrTaskVersion unless the task is abandoned and goes forward; invalid JSON is an *InvalidError",
	},
	{
		name: "patch", play: taskPatched,
		rule: "PatchTask changes the state of a pending, failed, waiting or abandoned task by a JSON merge patch; a null removes a slot",
	},
	{
		name: "patch at another version", play: taskPatchVersion,
		rule: "PatchTask is ErrTaskVersion if the task has another version, or a worker has it, and an *InvalidError if the result is no state",
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

// oneOfEachTask makes a task in every status, with the status as its name and its kind, in the
// order of provider.TaskStatuses. Those in even places are the tasks of a group.
func (s *stage) oneOfEachTask() []provider.Task {
	s.Helper()
	g := s.group("g", "pending", "failed", "done", "abandoned")
	s.addGroup(g)
	s.addTasks(s.draftTask("claimed"), s.draftTask("waiting"), s.draftTask("undone"))
	s.take("claimed")
	s.apply(s.take("failed"), provider.TaskChange{To: provider.TaskFailed, After: lease, Code: "http_500"})
	s.apply(s.take("waiting"), wait("paid", 1, lease))
	s.finish(s.take("done"))
	t := s.take("undone")
	s.cancelTask("undone")
	s.apply(t, provider.TaskChange{To: provider.TaskUndone})
	s.apply(s.take("abandoned"), provider.TaskChange{To: provider.TaskAbandoned, Code: "http_404"})
	var all []provider.Task
	for _, status := range provider.TaskStatuses() {
		all = append(all, s.task(string(status)))
		same(s, "status", all[len(all)-1].Status, status)
	}
	return all
}

func (s *stage) selects(f provider.TaskFilter, names ...string) {
	s.Helper()
	want := s.ids(names...)
	slices.Sort(want)
	same(s, fmt.Sprintf("ids of %+v", f), taskIDs(s.listTasks(f)), want)
}

func taskFilters(s *stage) {
	all := s.oneOfEachTask()
	group, kinds := s.id("g"), s.kind("g")
	mine := s.ids("pending", "claimed", "failed", "waiting", "done", "undone", "abandoned")
	statuses := func(of ...provider.TaskStatus) []provider.TaskStatus { return of }
	s.selects(provider.TaskFilter{IDs: mine}, "pending", "claimed", "failed", "waiting", "done", "undone", "abandoned")
	s.selects(provider.TaskFilter{IDs: s.ids("done", "failed", "nothing")}, "done", "failed")
	s.selects(provider.TaskFilter{IDs: []string{}})
	s.selects(provider.TaskFilter{Kind: s.kind("failed")}, "failed")
	s.selects(provider.TaskFilter{Kind: s.name})
	s.selects(provider.TaskFilter{Group: group}, "pending", "failed", "done", "abandoned")
	s.selects(provider.TaskFilter{GroupKind: kinds}, "pending", "failed", "done", "abandoned")
	s.selects(provider.TaskFilter{Group: group, GroupKind: s.kind("x")})
	s.selects(provider.TaskFilter{IDs: mine, Status: statuses(provider.TaskDone, provider.TaskClaimed)}, "claimed", "done")
	s.selects(provider.TaskFilter{IDs: mine, Status: statuses()}, "pending", "claimed", "failed", "waiting", "done", "undone", "abandoned")
	s.selects(provider.TaskFilter{IDs: mine, Status: statuses("nothing")})
	s.selects(provider.TaskFilter{IDs: mine, Code: "http_404"}, "abandoned")
	s.selects(provider.TaskFilter{Group: group, After: s.id("done")}, "failed", "pending")
	s.selects(provider.TaskFilter{Group: group, Limit: 2}, "abandoned", "done")
	s.selects(provider.TaskFilter{
		IDs: mine, Kind: s.kind("abandoned"), Group: group, GroupKind: kinds, Status: statuses(provider.TaskAbandoned), Code: "http_404", After: s.id("a"), Limit: 5,
	}, "abandoned")
	for _, t := range all {
		s.selects(provider.TaskFilter{IDs: mine, Status: statuses(t.Status)}, string(t.Status))
	}
}

func taskPages(s *stage) {
	names := s.crowdOf("k", 120)
	want := s.ids(names...)
	same(s, "the first page", taskIDs(s.listTasks(provider.TaskFilter{Kind: s.kind("k")})), want[:100])
	same(s, "all", taskIDs(s.listTasks(provider.TaskFilter{Kind: s.kind("k"), Limit: 500})), want)
	got := []string{}
	f := provider.TaskFilter{Kind: s.kind("k"), Limit: 7}
	for page := s.listTasks(f); len(page) > 0; page = s.listTasks(f) {
		got = append(got, taskIDs(page)...)
		f.After = page[len(page)-1].ID
	}
	same(s, "pages of 7", got, want)
	for id := range slices.Values([]string{"a", "B", "é", "_", "a-", "Z"}) { // ordered by bytes
		d := s.draftTasks("bytes", id)
		s.addTasks(d...)
	}
	same(s, "order of ids", taskIDs(s.listTasks(provider.TaskFilter{Kind: s.kind("bytes")})), s.ids("B", "Z", "_", "a", "a-", "é"))
	n, err := s.tasks.CancelTasks(s.ctx, provider.TaskFilter{Kind: s.kind("k"), After: want[9], Limit: 5}, ann)
	s.ok(err, "cancel a page")
	same(s, "canceled", n, 5)
	for i, t := range s.listTasks(provider.TaskFilter{Kind: s.kind("k"), Limit: 500}) {
		same(s, "canceled "+t.ID, t.Undo, i >= 10 && i < 15)
	}
	n, err = s.tasks.CancelTasks(s.ctx, provider.TaskFilter{Kind: s.kind("k")}, ann)
	s.ok(err, "cancel without a limit")
	same(s, "canceled", n, 115)
}

func taskBadFilters(s *stage) {
	s.addTasks(s.draftTask("call"))
	s.apply(s.take("call"), provider.TaskChange{To: provider.TaskFailed})
	was := s.task("call")
	long := strings.Repeat("x", 256)
	for name, f := range map[string]provider.TaskFilter{
		"a long id": {IDs: []string{s.id("call"), long}}, "an id with NUL": {IDs: []string{"\x00"}}, "a kind with NUL": {Kind: "\x00"}, "a long group": {Group: long},
		"a bad kind of a group": {GroupKind: replacement}, "a status with NUL": {Status: []provider.TaskStatus{"\x00"}}, "a long code": {Code: long},
		"a bad page": {After: replacement}, "a negative limit": {Limit: -1},
	} {
		_, err := s.tasks.Tasks(s.ctx, f)
		s.invalid(err, "list: "+name)
		_, err = s.tasks.RequeueTasks(s.ctx, f, ann)
		s.invalid(err, "requeue: "+name)
		_, err = s.tasks.CancelTasks(s.ctx, f, ann)
		s.invalid(err, "cancel: "+name)
	}
	same(s, "the task", s.task("call"), was)
}

func taskCounted(s *stage) {
	counts := func(kind string) map[provider.TaskStatus]int64 {
		s.Helper()
		got, err := s.tasks.TaskCounts(s.ctx, kind)
		s.ok(err, "count tasks")
		return got
	}
	before := counts("")
	same(s, "counts of an unknown kind", counts(s.kind("nothing")), provider.ZeroTaskCounts())
	s.oneOfEachTask()
	s.addTasks(s.draftTasks("pending", "p1", "p2")...)
	for status, n := range counts("") {
		want := before[status] + 1
		if status == provider.TaskPending {
			want += 2
		}
		same(s, "count of "+string(status), n, want)
	}
	for _, status := range provider.TaskStatuses() {
		want := provider.ZeroTaskCounts()
		if want[status] = 1; status == provider.TaskPending {
			want[status] = 3
		}
		same(s, "counts of a kind", counts(s.kind(string(status))), want)
	}
}

func taskTrails(s *stage) {
	same(s, "records of no task", len(s.records("nothing")), 0)
	t := s.begun("call")
	s.answerTask("call", "paid", "m1", `1`)
	s.apply(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, GiveUp: "refused"})
	s.apply(t, provider.TaskChange{To: provider.TaskAbandoned, Code: "x"})
	_, err := s.tasks.RequeueTasks(s.ctx, provider.TaskFilter{IDs: s.ids("call")}, ann)
	s.ok(err, "requeue")
	s.ok(s.tasks.PatchTask(s.ctx, s.id("call"), s.task("call").Version, json.RawMessage(`{"paid":null}`), ann), "patch")
	s.apply(s.take("call"), provider.TaskChange{To: provider.TaskUndone})
	s.trailed("call", "answered paid", "gave_up refused", "abandoned x", "requeued", "patched", "undone")
	trail := s.records("call")
	for i, r := range trail {
		by, reason := "worker", ""
		switch r.What {
		case provider.WhatAnswered:
			by = "m1"
		case provider.WhatRequeued, provider.WhatPatched:
			by, reason = ann.By, ann.Reason
		}
		same(s, "By and Reason of "+r.What, []string{r.By, r.Reason}, []string{by, reason})
		same(s, "kind of a record", []string{r.Kind, r.Group}, []string{s.kind("call"), ""})
		before := trail[max(i-1, 0)].At
		s.require(!r.At.Before(before), "record %d comes after the one before it: %v, %v", i, before, r.At)
		same(s, "zone of a record", r.At.Location(), time.UTC)
	}
	s.addGroup(s.group("g", "member"))
	s.finish(s.take("member"))
	s.trailed("member", "done")
	same(s, "group of a record", s.records("member")[0].Group, s.id("g"))
	s.begun("rolled back")
	same(s, "cancel", s.cancelTask("rolled back"), true)
	s.trailed("rolled back", "canceled")
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
			same(s, "the requeued task", []any{now.Status, now.Attempts, now.Version}, []any{provider.TaskPending, 0, t.Version + 1})
			s.take(name)
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
		same(s, "the canceled task", []any{now.Undo, now.Why, now.Version, now.Doubt}, []any{true, provider.WhyCanceled, t.Version + 1, t.Doubt})
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
	t := s.begun("undo") // abandoned while it was being undone: it cannot be done
	s.cancelTask("undo")
	s.apply(t, provider.TaskChange{To: provider.TaskAbandoned})
	err = s.tasks.CompleteTask(s.ctx, t.ID, json.RawMessage(`1`), ann)
	s.require(errors.Is(err, provider.ErrTaskVersion), "complete a task that is being undone: the error %v is ErrTaskVersion", err)
	same(s, "status", s.task("undo").Status, provider.TaskAbandoned)
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
