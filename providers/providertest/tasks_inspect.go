package providertest

import (
	"context"
	"encoding/json"
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
	behind := map[string]any{"After": "\U0010FFFF"}
	selectsNone(s, "tasks listed", behind, func(f provider.TaskFilter) int { return len(s.listTasks(f)) })
	behind["After"] = nil // alone it is no condition of a decision
	for _, decide := range []func(context.Context, provider.TaskFilter, provider.Decision) (int, error){s.tasks.RequeueTasks, s.tasks.CancelTasks} {
		selectsNone(s, "tasks changed", behind, func(f provider.TaskFilter) int {
			n, err := decide(s.ctx, f, ann)
			s.ok(err, "decide")
			return n
		})
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
