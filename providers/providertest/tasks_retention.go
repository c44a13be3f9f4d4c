package providertest

import (
	"errors"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

var taskRetentionCases = []testCase{
	{
		name: "ended tasks are deleted", play: taskDeleted,
		rule: "DeleteTasks deletes the tasks that were done or undone longer ago than keep says, with their trails; others stay, and abandoned ones for ever",
	},
	{
		name: "a limit of deletions", play: taskDeleteLimit,
		rule: "DeleteTasks deletes at most limit tasks, and returns their number",
	},
	{
		name: "groups are deleted", play: taskDeletedGroups,
		rule: "Groups are deleted keep.Done after they were completed; one with an open task stays, with its tasks",
	},
	{
		// Promise: T1.2
		name: "ids of deleted tasks", play: taskDeletedIDs,
		rule: "The id of a deleted task is free; a group that exists is not added again",
	},
	{
		name: "terms of a retention", play: taskRetentionTerms,
		rule: "TaskRetention.WithDefaults: zero means 7 days for done and 30 days for undone tasks; a negative one is claim.ErrTerms",
	},
}

// keep is the retention of the cases.
var keep = provider.TaskRetention{Done: 10 * time.Hour, Undone: 20 * time.Hour}

// deleteTasks deletes until no task is left to be deleted, and returns their number.
func (s *stage) deleteTasks(limit int) (all int) {
	s.Helper()
	for {
		n, err := s.tasks.DeleteTasks(s.ctx, keep, limit)
		s.ok(err, "delete tasks")
		s.require(n <= limit, "%d tasks are deleted at once, with a limit of %d", n, limit)
		if all += n; n == 0 {
			return all
		}
	}
}

// deleteAll deletes what other cases have left.
func (s *stage) deleteAll() {
	s.Helper()
	s.advance(100 * time.Hour)
	s.deleteTasks(100)
}

// ended makes tasks that are done, undone and abandoned.
func (s *stage) ended(suffix string) {
	s.Helper()
	s.apply(s.begun("done"+suffix), provider.TaskChange{To: provider.TaskDone})
	t := s.begun("undone" + suffix)
	s.cancelTask("undone" + suffix)
	s.apply(t, provider.TaskChange{To: provider.TaskUndone})
	s.apply(s.begun("abandoned"+suffix), provider.TaskChange{To: provider.TaskAbandoned, Code: "x"})
}

func taskDeleted(s *stage) {
	s.deleteAll()
	s.ended("-1")
	s.addTasks(s.draftTask("pending"))
	s.apply(s.begun("waiting"), wait("paid", 1, 0))
	s.apply(s.begun("failed"), provider.TaskChange{To: provider.TaskFailed, After: 1000 * time.Hour})
	same(s, "deleted at once", s.deleteTasks(100), 0)
	s.advance(9 * time.Hour)
	s.ended("-2")
	same(s, "deleted after 9h", s.deleteTasks(100), 0)
	s.advance(2 * time.Hour)
	same(s, "deleted after 11h", s.deleteTasks(100), 1)
	s.noTask("done-1")
	same(s, "records of a deleted task", len(s.records("done-1")), 0)
	same(s, "records of a task that stays", len(s.records("done-2")), 1)
	s.advance(10 * time.Hour)
	same(s, "deleted after 21h", s.deleteTasks(100), 2)
	s.noTask("undone-1", "done-2")
	same(s, "records of a deleted task", len(s.records("undone-1")), 0)
	s.trailed("undone-2", "canceled", "undone")
	s.advance(10_000 * time.Hour)
	same(s, "deleted a year later", s.deleteTasks(100), 1)
	for _, name := range []string{"pending", "waiting", "failed", "abandoned-1", "abandoned-2"} {
		s.task(name)
	}
	s.trailed("abandoned-1", "abandoned x")
}

func taskDeleteLimit(s *stage) {
	s.deleteAll()
	s.crowdOf("k", 25)
	for _, t := range s.claimAll(s.query("k"), 25) {
		s.require(s.try(t, provider.TaskChange{To: provider.TaskDone}).Applied, "the task is done")
	}
	s.advance(11 * time.Hour)
	left := 25
	for _, want := range []int{10, 10, 5, 0} {
		n, err := s.tasks.DeleteTasks(s.ctx, keep, 10)
		s.ok(err, "delete tasks")
		same(s, "deleted", n, want)
		left -= want
		same(s, "tasks left", len(s.listTasks(provider.TaskFilter{Kind: s.kind("k")})), left)
	}
}

func taskDeletedGroups(s *stage) {
	s.deleteAll()
	s.addGroup(s.group("complete", "c1", "c2"))
	s.addGroup(s.group("blocked", "b1", "b2"))
	s.finish(s.take("c1"))
	s.finish(s.take("b1"))
	s.apply(s.take("b2"), provider.TaskChange{To: provider.TaskAbandoned})
	s.advance(8 * time.Hour)
	s.finish(s.take("c2"))
	s.advance(8 * time.Hour)
	same(s, "deleted after 8h", s.deleteTasks(100), 1)
	s.task("b1")
	s.openTasks("complete", 0)
	s.openTasks("blocked", 1)
	s.advance(8 * time.Hour)
	same(s, "deleted after 16h", s.deleteTasks(100), 1)
	_, ok := s.taskGroup("complete")
	same(s, "a group that was completed 16h ago", ok, false)
	s.advance(1000 * time.Hour)
	same(s, "deleted long after", s.deleteTasks(100), 0)
	s.openTasks("blocked", 1)
	_, err := s.tasks.RequeueTasks(s.ctx, provider.TaskFilter{IDs: s.ids("b2")}, ann)
	s.ok(err, "requeue")
	same(s, "open after the last finish", s.finish(s.take("b2")).Open, 0)
	same(s, "deleted once the group is complete", s.deleteTasks(100), 1)
	s.noTask("b1")
}

func taskDeletedIDs(s *stage) {
	s.deleteAll()
	s.ended("")
	s.addGroup(s.group("g", "a", "b"))
	s.finish(s.take("a"))
	s.advance(11 * time.Hour)
	same(s, "deleted", s.deleteTasks(100), 1)
	s.noTask("done")
	other := s.draftTasks("free", "done")
	s.addTasks(other...)
	same(s, "the task under a deleted one's id", s.task("done").Kind, s.kind("free"))

	err := s.inTask(s.ctx, func(v taskView) error { return v.EnqueueGroup(s.ctx, s.group("g", "a", "b")) })
	s.ok(err, "enqueue the same group")
	s.openTasks("g", 1)
	same(s, "open after the last finish", s.finish(s.take("b")).Open, 0)
	s.advance(11 * time.Hour)
	s.deleteTasks(100)
	s.addGroup(s.group("g", "a", "b"))
	s.openTasks("g", 2)
}

func taskRetentionTerms(s *stage) {
	full, err := provider.TaskRetention{}.WithDefaults()
	s.ok(err, "defaults")
	same(s, "defaults", full, provider.TaskRetention{Done: 7 * 24 * time.Hour, Undone: 30 * 24 * time.Hour})
	for _, r := range []provider.TaskRetention{{Done: -1}, {Undone: -1}} {
		_, err := r.WithDefaults()
		s.require(errors.Is(err, claim.ErrTerms), "%s", fmt.Sprintf("%+v: the error %v is ErrTerms", r, err))
	}
	s.apply(s.begun("call"), provider.TaskChange{To: provider.TaskDone})
	n, err := s.tasks.DeleteTasks(s.ctx, full, 10)
	s.ok(err, "delete")
	same(s, "deleted with the defaults", n, 0)
	s.task("call")
}
