package providertest

import (
	"encoding/json"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// taskStore is the provider of the suite of tasks, without its type parameter.
type taskStore interface {
	provider.Tasks
	provider.TaskInspector
}

// taskView is the tasks and the read model in a transaction.
type taskView struct {
	provider.TaskTx
	add func(key string, n int) error
}

// taskLimit is the limit of attempts of most cases.
const taskLimit = 8

// kind returns a kind of the case.
func (s *stage) kind(name string) string { return s.name + "/" + strings.ReplaceAll(name, " ", "-") }

// id returns the id of the case's task of this name.
func (s *stage) id(name string) string { return s.name + " " + name }

// draftTask returns a draft. Its kind is its own, so that a case can claim it alone.
func (s *stage) draftTask(name string) provider.TaskDraft {
	return provider.TaskDraft{ID: s.id(name), Kind: s.kind(name), Input: json.RawMessage(`{"of":"` + name + `"}`)}
}

// draftTasks returns drafts of one kind, in order of their ids.
func (s *stage) draftTasks(kind string, names ...string) []provider.TaskDraft {
	ds := make([]provider.TaskDraft, len(names))
	for i, name := range names {
		ds[i] = s.draftTask(name)
		ds[i].Kind = s.kind(kind)
	}
	return ds
}

// addTasks adds tasks in a separate transaction.
func (s *stage) addTasks(ds ...provider.TaskDraft) {
	s.Helper()
	s.ok(s.inTask(s.ctx, func(v taskView) error { return v.Enqueue(s.ctx, ds...) }), "enqueue tasks")
}

// group returns a draft of a group. Each of its tasks has a kind of its own.
func (s *stage) group(name string, tasks ...string) provider.TaskGroupDraft {
	g := provider.TaskGroupDraft{ID: s.id(name), Kind: s.kind(name), Data: json.RawMessage(`{"group":"` + name + `"}`)}
	for _, t := range tasks {
		g.Tasks = append(g.Tasks, s.draftTask(t))
	}
	return g
}

// addGroup adds a group in a separate transaction.
func (s *stage) addGroup(g provider.TaskGroupDraft) {
	s.Helper()
	s.ok(s.inTask(s.ctx, func(v taskView) error { return v.EnqueueGroup(s.ctx, g) }), "enqueue a group")
}

// taskGroup reads a group.
func (s *stage) taskGroup(name string) (provider.TaskGroup, bool) {
	s.Helper()
	g, ok, err := s.tasks.TaskGroup(s.ctx, s.id(name))
	s.ok(err, "read a group")
	return g, ok
}

// list reads the tasks that f selects.
func (s *stage) listTasks(f provider.TaskFilter) []provider.Task {
	s.Helper()
	all, err := s.tasks.Tasks(s.ctx, f)
	s.ok(err, "list tasks")
	for i := range all {
		all[i] = plainTask(all[i])
	}
	return all
}

// task reads a stored task.
func (s *stage) task(name string) provider.Task {
	s.Helper()
	found := s.listTasks(provider.TaskFilter{IDs: []string{s.id(name)}})
	same(s, "tasks with the id "+s.id(name), len(found), 1)
	return found[0]
}

// noTask fails the case if the task exists.
func (s *stage) noTask(names ...string) {
	s.Helper()
	for _, name := range names {
		same(s, "tasks with the id "+s.id(name), len(s.listTasks(provider.TaskFilter{IDs: []string{s.id(name)}})), 0)
	}
}

// plainTask returns a stored task in a form that reflect.DeepEqual can compare. TimedOut and Spent
// are results of a claim, and are left out.
func plainTask(t provider.Task) provider.Task {
	t.TimedOut, t.Spent = false, false
	for _, at := range []*time.Time{&t.NextAt, &t.CreatedAt, &t.EndedAt, &t.LastAttemptedAt} {
		*at = at.UTC().Round(0)
	}
	if len(t.State) == 0 {
		t.State = nil
	}
	return t
}

// query selects the kinds of these names.
func (s *stage) query(names ...string) provider.TaskQuery {
	q := provider.TaskQuery{Attempts: taskLimit}
	for _, name := range names {
		q.Kinds = append(q.Kinds, s.kind(name))
	}
	return q
}

// claimAll claims at most limit tasks for a lease.
func (s *stage) claimAll(q provider.TaskQuery, limit int) []provider.Task {
	s.Helper()
	taken, err := provider.ClaimTasks(s.ctx, s.tasks, q, claim.Terms{Holder: "worker", Lease: lease, Limit: limit})
	s.ok(err, "claim tasks")
	return taken
}

// take claims the task of this name, which must be due.
func (s *stage) take(name string) provider.Task {
	s.Helper()
	taken := s.claimAll(s.query(name), 10)
	same(s, "ids of a claim of "+name, taskIDs(taken), []string{s.id(name)})
	return taken[0]
}

// takeAlone claims the suspect of this name.
func (s *stage) takeAlone(name string) provider.Task {
	s.Helper()
	q := s.query(name)
	q.Alone = true
	taken := s.claimAll(q, 10)
	same(s, "ids of a claim of the suspect "+name, taskIDs(taken), []string{s.id(name)})
	return taken[0]
}

// notDue fails the case if a claim takes one of these tasks.
func (s *stage) notDue(names ...string) {
	s.Helper()
	q := s.query(names...)
	same(s, "ids of a claim", taskIDs(s.claimAll(q, 10)), []string{})
	q.Alone = true
	same(s, "ids of a claim of a suspect", taskIDs(s.claimAll(q, 10)), []string{})
}

// begun adds a task and claims it.
func (s *stage) begun(name string) provider.Task {
	s.Helper()
	s.addTasks(s.draftTask(name))
	return s.take(name)
}

func taskIDs(tasks []provider.Task) []string {
	ids := make([]string, len(tasks))
	for i, t := range tasks {
		ids[i] = t.ID
	}
	return ids
}

// try makes a change under the claim t.
func (s *stage) try(t provider.Task, c provider.TaskChange) provider.TaskChanged {
	s.Helper()
	c.ID, c.Token = t.ID, t.Token
	got, err := s.tasks.ChangeTasks(s.ctx, []provider.TaskChange{c})
	s.ok(err, "change a task")
	same(s, "results of one change", len(got), 1)
	return got[0]
}

// apply makes a change under the claim t, which must be applied, and returns the stored task.
func (s *stage) apply(t provider.Task, c provider.TaskChange) provider.Task {
	s.Helper()
	before := s.byID(t.ID)
	got := s.try(t, c)
	s.require(got.Applied, "the change to %s is applied to %+v", c.To, before)
	now := s.byID(t.ID)
	same(s, "version after the change", now.Version, before.Version+1)
	same(s, "the result of the change", []any{got.Now.ID, got.Now.Undo, got.Now.Version, got.Now.Group},
		[]any{now.ID, now.Undo, now.Version, now.Group})
	same(s, "status after the change", now.Status, c.To)
	return now
}

// refuse makes a change under the claim t, which must be refused, and change nothing.
func (s *stage) refuse(t provider.Task, c provider.TaskChange) provider.TaskChanged {
	s.Helper()
	before := s.byID(t.ID)
	got := s.try(t, c)
	s.require(!got.Applied, "the change to %s is refused by %+v", c.To, before)
	same(s, "the task of a refused change", plainTask(got.Now), before)
	same(s, "the stored task", s.byID(t.ID), before)
	return got
}

func (s *stage) byID(id string) provider.Task {
	s.Helper()
	return s.task(strings.TrimPrefix(id, s.name+" "))
}

// outdated fails the case unless every change under the claim t is refused as late.
func (s *stage) outdated(t provider.Task) {
	s.Helper()
	for _, c := range everyChange() {
		s.require(s.refuse(t, c).Late(t.Token), "the change to %s is late", c.To)
	}
}

// everyChange returns a change to each status that a change can have.
func everyChange() []provider.TaskChange {
	return []provider.TaskChange{
		{To: provider.TaskClaimed, After: lease, Slots: filled("late", 9, `"late"`), Open: "late", Progress: true},
		{To: provider.TaskClaimed, After: lease, GiveUp: "late", Doubt: true},
		{To: provider.TaskWaiting, After: lease, Slots: asked("late", 9), Open: "late", Progress: true},
		{To: provider.TaskPending, Code: "late"},
		{To: provider.TaskFailed, Code: "late"},
		{To: provider.TaskAbandoned, Code: "late"},
		{To: provider.TaskDone, Result: json.RawMessage(`"late"`)},
		{To: provider.TaskUndone, GiveUp: "late"},
	}
}

// filled returns the slot of a step that was call n.
func filled(name string, n int, out string) map[string]provider.Slot {
	return map[string]provider.Slot{name: {Call: n, Out: json.RawMessage(out)}}
}

// asked returns the slot of a wait that was call n.
func asked(name string, n int) map[string]provider.Slot {
	return map[string]provider.Slot{name: {Call: n}}
}

// step is the change that records a step.
func step(name string, n int, out string) provider.TaskChange {
	return provider.TaskChange{To: provider.TaskClaimed, After: lease, Slots: filled(name, n, out), Open: name, Progress: true}
}

// wait is the change to a wait for a slot; d ≤ 0 is without end.
func wait(name string, n int, d time.Duration) provider.TaskChange {
	return provider.TaskChange{To: provider.TaskWaiting, After: d, Slots: asked(name, n), Open: name, Progress: true}
}

// answerTask answers in a separate transaction.
func (s *stage) answerTask(name, slot, id, out string) (got provider.AnswerOutcome) {
	s.Helper()
	s.ok(s.inTask(s.ctx, func(v taskView) (err error) {
		got, err = v.Answer(s.ctx, provider.TaskAnswer{Task: s.id(name), Name: slot, ID: id, Out: json.RawMessage(out)})
		return err
	}), "answer")
	return got
}

// cancelTask cancels in a separate transaction.
func (s *stage) cancelTask(name string) (ok bool) {
	s.Helper()
	s.ok(s.inTask(s.ctx, func(v taskView) (err error) {
		ok, err = v.Cancel(s.ctx, s.id(name))
		return err
	}), "cancel")
	return ok
}

// postpone postpones in a separate transaction.
func (s *stage) postpone(name string, at time.Time) (ok bool) {
	s.Helper()
	s.ok(s.inTask(s.ctx, func(v taskView) (err error) {
		ok, err = v.Postpone(s.ctx, s.id(name), at)
		return err
	}), "postpone")
	return ok
}

// changeTx makes a change in a separate transaction.
func (s *stage) changeTx(t provider.Task, c provider.TaskChange) (got provider.TaskChanged) {
	s.Helper()
	c.ID, c.Token = t.ID, t.Token
	s.ok(s.inTask(s.ctx, func(v taskView) (err error) {
		got, err = v.Change(s.ctx, c)
		return err
	}), "change a task in a transaction")
	return got
}

// taskClock returns the store's clock.
func (s *stage) taskClock() time.Time {
	s.Helper()
	d := s.draftTask("clock " + newID())
	d.Kind = s.kind("clock")
	s.addTasks(d)
	return s.listTasks(provider.TaskFilter{IDs: []string{d.ID}})[0].CreatedAt
}

// records reads the trail of a task.
func (s *stage) records(name string) []provider.TaskRecord {
	s.Helper()
	trail, err := s.tasks.TaskTrail(s.ctx, s.id(name))
	s.ok(err, "read a trail")
	return trail
}

// trailed fails the case unless these are the records of a task: What, and Detail if there is one.
func (s *stage) trailed(name string, want ...string) {
	s.Helper()
	got := []string{}
	seen := map[string]bool{}
	for _, r := range s.records(name) {
		got = append(got, strings.TrimSpace(r.What+" "+r.Detail))
		s.require(r.ID != "" && !seen[r.ID], "record %+v has an id of its own", r)
		seen[r.ID] = true
		same(s, "task of a record", r.Task, s.id(name))
		s.require(!r.At.IsZero(), "record %+v has a time", r)
	}
	same(s, "trail of "+name, got, append([]string{}, want...))
}

// vanish ends the lease of every claimed task.
func (s *stage) vanish() { s.advance(lease + time.Hour) }

// sameJSON fails the case unless got is the JSON value want.
func (s *stage) sameJSON(what string, got json.RawMessage, want string) {
	s.Helper()
	s.require(sameJSON(got, []byte(want)), "%s: %q is the JSON value %s", what, got, want)
}

// sameState fails the case unless the slots have these calls and values.
func (s *stage) sameState(got, want map[string]provider.Slot) {
	s.Helper()
	same(s, "number of slots", len(got), len(want))
	for name, w := range want {
		g, ok := got[name]
		s.require(ok, "slot %s is in %+v", name, got)
		same(s, "slot "+name, []any{g.Call, g.Timeout, g.By, g.Out == nil}, []any{w.Call, w.Timeout, w.By, w.Out == nil})
		if w.Out != nil {
			s.sameJSON("slot "+name, g.Out, string(w.Out))
		}
	}
}
