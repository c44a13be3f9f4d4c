package providertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
)

var taskClaimCases = []testCase{
	{
		name: "order within a kind", play: taskOrder,
		rule: "TaskCandidates lists each kind in order of NextAt and ID, and a claim takes at most t.Limit tasks in this order",
	},
	{
		// Promise: T2.2
		name: "kinds take turns", play: taskTurns,
		rule: "Kinds take turns: the first of each kind, the second of each kind, and so on; a backlog of one kind delays no other",
	},
	{
		// Promise: T2.2
		name: "waiting tasks delay no kind", play: taskWaitersAside,
		rule: "Tasks that are not due are no candidates, however many they are",
	},
	{
		name: "kinds of a claim", play: taskClaimKinds,
		rule: "TaskQuery.Kinds: only these; none means no task",
	},
	{
		name: "candidates are read, not taken", play: taskCandidatesRead,
		rule: "TaskCandidates reads due tasks without taking them",
	},
	{
		name: "terms of a claim", play: taskTerms,
		rule: "Terms: a zero lease means 5m, a zero limit 50, a zero token a new one; invalid terms are claim.ErrTerms",
	},
	{
		// Promise: T2.1
		name: "the clock is read once", play: taskClockOnce,
		rule: "The clock is read once per statement: tasks of one call have the same times",
	},
	{
		// Promise: T2.1
		name: "a live lease is never stolen", play: taskLease,
		rule: "A task has at most one live claim. A renewed lease is a live one, and a claimed task that is due can be renewed",
	},
	{
		name: "renewals that are late", play: taskLateRenewals,
		rule: "RenewTasks returns the ids of the tasks that are no longer claimed with their token, and changes nothing of them",
	},
	{
		name: "kinds of a domain", play: taskKinds,
		rule: "TaskKinds returns the kinds of the open tasks of a domain, suspect ones included, sorted",
	},
	{
		name: "no claim in a transaction", play: taskNoClaimInTx,
		rule: "The tasks in a transaction cannot be claimed: a claim is a transaction of its own",
	},
	{
		name: "a claim with an ended context", play: taskClaimEnded,
		rule: "A call whose context has ended returns an error, and nothing changes",
	},
}

// candidates reads the ids of the candidates.
func (s *stage) taskCandidates(q provider.TaskQuery, limit int) []string {
	s.Helper()
	found, err := s.tasks.TaskCandidates(s.ctx, q, limit)
	s.ok(err, "read candidates")
	return taskIDs(found)
}

// claimedIDs claims, and returns the ids in order of ids.
func (s *stage) claimedIDs(q provider.TaskQuery, limit int) []string {
	s.Helper()
	ids := taskIDs(s.claimAll(q, limit))
	slices.Sort(ids)
	return ids
}

func (s *stage) ids(names ...string) []string {
	ids := []string{}
	for _, name := range names {
		ids = append(ids, s.id(name))
	}
	return ids
}

func taskOrder(s *stage) {
	ds := s.draftTasks("k", "e", "d", "c", "b", "a")
	ds[0].After, ds[1].After, ds[2].After, ds[3].After, ds[4].After = time.Hour, 3*time.Hour, 2*time.Hour, 3*time.Hour, 9*time.Hour
	s.addTasks(ds...)
	same(s, "candidates before they are due", s.taskCandidates(s.query("k"), 10), s.ids())
	s.advance(4 * time.Hour)
	s.addTasks(s.draftTasks("k", "0")...) // due after the others, although its id is less
	same(s, "candidates", s.taskCandidates(s.query("k"), 10), s.ids("e", "c", "b", "d", "0"))
	same(s, "two candidates", s.taskCandidates(s.query("k"), 2), s.ids("e", "c"))
	same(s, "a claim of two", s.claimedIDs(s.query("k"), 2), s.ids("c", "e"))
	same(s, "a claim of one", s.claimedIDs(s.query("k"), 1), s.ids("b"))
	same(s, "a claim of the rest", s.claimedIDs(s.query("k"), 10), s.ids("0", "d"))
}

func (s *stage) crowdOf(kind string, n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("%s-%04d", kind, i)
	}
	s.addTasks(s.draftTasks(kind, names...)...)
	return names
}

func taskTurns(s *stage) {
	many := s.crowdOf("many", 1000)
	few := s.crowdOf("few", 10)
	some := s.crowdOf("some", 3)
	q := s.query("many", "few", "some", "none")
	first := s.taskCandidates(q, 9)
	for turn := range 3 {
		same(s, fmt.Sprint("candidates of turn ", turn), slices.Sorted(slices.Values(first[3*turn:3*turn+3])), s.ids(few[turn], many[turn], some[turn]))
	}
	got := map[string]int{}
	for _, t := range s.claimAll(q, 50) {
		got[t.Kind]++
	}
	same(s, "tasks of the first claim", got, map[string]int{s.kind("few"): 10, s.kind("some"): 3, s.kind("many"): 37})
	same(s, "tasks of the next claim", s.claimedIDs(q, 3), s.ids(many[37:40]...))
}

func taskWaitersAside(s *stage) {
	names := s.crowdOf("k", 60)
	for i, t := range s.claimAll(s.query("k"), 60) {
		c := []provider.TaskChange{wait("paid", 1, time.Hour), wait("paid", 1, 0), {To: provider.TaskFailed, After: time.Hour}, {To: provider.TaskClaimed, After: lease}}[i%4]
		c.ID, c.Token = t.ID, t.Token
		_, err := s.tasks.ChangeTasks(s.ctx, []provider.TaskChange{c})
		s.ok(err, "change")
	}
	late := s.draftTasks("k", "zz")
	s.addTasks(late...)
	same(s, "candidates behind tasks that are not due", s.taskCandidates(s.query("k"), 10), s.ids("zz"))
	same(s, "claimed", s.claimedIDs(s.query("k"), 10), s.ids("zz"))
	s.advance(2 * time.Hour)
	same(s, "tasks claimed when half of them are due", len(s.claimAll(s.query("k"), 100)), len(names)/2)
}

func taskClaimKinds(s *stage) {
	s.crowdOf("a", 2)
	s.crowdOf("b", 2)
	for _, q := range []provider.TaskQuery{{}, {Kinds: []string{}}, s.query("nothing"), {Kinds: []string{s.name, s.name + "/", s.name + "/%", "%"}}} {
		same(s, "claimed of no kind", s.claimedIDs(q, 10), s.ids())
	}
	same(s, "claimed of one kind", s.claimedIDs(s.query("b"), 10), s.ids("b-0000", "b-0001"))
	same(s, "claimed of a kind that is asked for twice", s.claimedIDs(s.query("a", "a"), 10), s.ids("a-0000", "a-0001"))
}

func taskCandidatesRead(s *stage) {
	s.crowdOf("k", 3)
	was := s.listTasks(provider.TaskFilter{Kind: s.kind("k")})
	for range 2 {
		found, err := s.tasks.TaskCandidates(s.ctx, s.query("k"), 10)
		s.ok(err, "read candidates")
		for i := range found {
			found[i] = plainTask(found[i])
		}
		same(s, "candidates", found, was)
	}
	same(s, "the stored tasks", s.listTasks(provider.TaskFilter{Kind: s.kind("k")}), was)
}

func taskTerms(s *stage) {
	s.crowdOf("k", 60)
	claimAs := func(t claim.Terms) []provider.Task {
		s.Helper()
		taken, err := provider.ClaimTasks(s.ctx, s.tasks, s.query("k"), t)
		s.ok(err, "claim")
		return taken
	}
	taken := claimAs(claim.Terms{})
	same(s, "tasks of a claim without a limit", len(taken), 50)
	for _, t := range taken {
		d := t.NextAt.Sub(t.CreatedAt)
		s.require(d >= 5*time.Minute && d < 5*time.Minute+patience.Limit(), "the default lease of 5m ends after %v", d)
		s.require(t.Token != claim.Token{} && t.Token == taken[0].Token, "the claim has a new token")
	}
	for _, t := range []claim.Terms{{Lease: -time.Second}, {Lease: time.Microsecond}, {Limit: -1}} {
		_, err := provider.ClaimTasks(s.ctx, s.tasks, s.query("k"), t)
		s.require(errors.Is(err, claim.ErrTerms), "terms %+v: the error %v is ErrTerms", t, err)
	}
	// claimed for ever: NextAt cannot be later than the year 9999
	same(s, "tasks left", len(claimAs(claim.Terms{Lease: 1<<63 - 1})), 10)
	same(s, "tasks of an empty claim", len(claimAs(claim.Terms{})), 0)
}

func taskClockOnce(s *stage) {
	s.crowdOf("k", 100)
	tasks := s.listTasks(provider.TaskFilter{Kind: s.kind("k")})
	for _, t := range tasks {
		same(s, "CreatedAt and NextAt of tasks added together", []time.Time{t.CreatedAt, t.NextAt}, []time.Time{tasks[0].CreatedAt, tasks[0].CreatedAt})
	}
	taken := s.claimAll(s.query("k"), 100)
	same(s, "tasks", len(taken), 100)
	for _, t := range taken {
		same(s, "NextAt of tasks claimed together", t.NextAt, taken[0].NextAt)
	}
	later := s.draftTask("later")
	later.After = 90 * time.Minute
	s.addTasks(later)
	t := s.task("later")
	same(s, "delay", t.NextAt.Sub(t.CreatedAt), 90*time.Minute)
}

func taskLease(s *stage) {
	t := s.begun("call")
	s.advance(lease - time.Hour)
	s.notDue("call")
	renew := func(d time.Duration) {
		s.Helper()
		was := s.task("call")
		late, err := s.tasks.RenewTasks(s.ctx, []provider.Task{t}, d)
		s.ok(err, "renew")
		same(s, "late", len(late), 0)
		now := s.task("call")
		s.require(now.NextAt.After(was.NextAt), "the lease ends later: %v, %v", was.NextAt, now.NextAt)
		now.NextAt = was.NextAt
		same(s, "the renewed task apart from its lease", now, was)
	}
	renew(lease)
	s.advance(2 * time.Hour)
	s.notDue("call")
	s.vanish()
	renew(lease) // the lease has ended, and no claim has taken the task
	s.notDue("call")
	s.vanish()
	same(s, "Vanished", s.take("call").Vanished, 1)
}

func taskLateRenewals(s *stage) {
	live, taken, done, released := s.begun("live"), s.begun("taken"), s.begun("done"), s.begun("released")
	s.apply(done, provider.TaskChange{To: provider.TaskDone})
	s.apply(released, provider.TaskChange{To: provider.TaskPending})
	s.vanish()
	s.take("taken")
	was := []provider.Task{s.task("taken"), s.task("done"), s.task("released")}
	late, err := s.tasks.RenewTasks(s.ctx, []provider.Task{done, live, taken, released}, lease)
	s.ok(err, "renew")
	slices.Sort(late)
	same(s, "late", late, s.ids("done", "released", "taken"))
	same(s, "tasks that are late", []provider.Task{s.task("taken"), s.task("done"), s.task("released")}, was)
	s.notDue("live")
	none, err := s.tasks.RenewTasks(s.ctx, nil, lease)
	s.ok(err, "renew nothing")
	same(s, "late of none", len(none), 0)
}

func taskNoClaimInTx(s *stage) {
	s.ok(s.inTask(s.ctx, func(v taskView) error {
		for name, has := range map[string]bool{
			"ClaimTasks": is[interface {
				ClaimTasks(context.Context, provider.TaskQuery, claim.Terms) ([]provider.Task, error)
			}](v.TaskTx),
			"ChangeTasks": is[interface {
				ChangeTasks(context.Context, []provider.TaskChange) ([]provider.TaskChanged, error)
			}](v.TaskTx),
		} {
			s.require(!has, "the tasks in the transaction have no method %s", name)
		}
		return nil
	}), "commit")
}

func taskKinds(s *stage) {
	kinds := func(domain string) []string {
		s.Helper()
		got, err := s.tasks.TaskKinds(s.ctx, domain)
		s.ok(err, "read kinds")
		return append([]string{}, got...)
	}
	same(s, "kinds of an empty domain", kinds(s.name), []string{})
	other := s.draftTask("x")
	for i, domain := range []string{s.name + "0", s.name + "-a", s.name + "_a", "p", "a" + s.name} {
		other.ID, other.Kind = s.id(fmt.Sprint("other ", i)), domain+"/other"
		s.addTasks(other)
	}
	s.crowdOf("pending", 3)
	s.apply(s.begun("b-failed"), provider.TaskChange{To: provider.TaskFailed, After: lease})
	s.apply(s.begun("waiting"), wait("paid", 1, 0))
	s.begun("a_claimed")
	s.apply(s.begun("done"), provider.TaskChange{To: provider.TaskDone})
	s.apply(s.begun("abandoned"), provider.TaskChange{To: provider.TaskAbandoned})
	want := []string{s.kind("a_claimed"), s.kind("b-failed"), s.kind("pending"), s.kind("waiting")}
	same(s, "kinds", kinds(s.name), want)
	same(s, "kinds of another domain", kinds(s.name+"-a"), []string{s.name + "-a/other"})
	s.suspect("suspect")
	s.suspect("pending too")
	s.addTasks(s.draftTask("pending too 2"))
	same(s, "kinds with suspects", kinds(s.name), slices.Sorted(slices.Values(append(want, s.kind("suspect"), s.kind("pending too"), s.kind("pending too 2")))))
}

// suspect adds a task, and lets it vanish twice. The leases of other tasks stay.
func (s *stage) suspect(name string) {
	s.Helper()
	s.addTasks(s.draftTask(name))
	for range 2 {
		taken, err := provider.ClaimTasks(s.ctx, s.tasks, s.query(name), claim.Terms{Lease: time.Millisecond})
		s.ok(err, "claim")
		same(s, "ids of a claim", taskIDs(taken), s.ids(name))
		s.advance(time.Second)
	}
	same(s, "ids of a claim of a suspect among others", taskIDs(s.claimAll(s.query(name), 10)), s.ids())
	same(s, "suspect", s.task(name).Suspect, true)
}

func taskClaimEnded(s *stage) {
	s.addTasks(s.draftTask("call"), s.draftTask("other"))
	t := s.take("call")
	was := s.listTasks(provider.TaskFilter{IDs: s.ids("call", "other")})
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	terms := claim.Terms{Token: claim.NewToken(), Lease: lease, Limit: 1}
	f := provider.TaskFilter{IDs: s.ids("call", "other")}
	var errs []error
	note := func(err error) { errs = append(errs, err) }
	_, err := provider.ClaimTasks(ctx, s.tasks, s.query("other"), terms)
	note(err)
	_, err = s.tasks.TaskCandidates(ctx, s.query("other"), 10)
	note(err)
	_, err = s.tasks.ChangeTasks(ctx, []provider.TaskChange{{ID: t.ID, Token: t.Token, To: provider.TaskDone}})
	note(err)
	_, err = s.tasks.RenewTasks(ctx, []provider.Task{t}, 2*lease)
	note(err)
	_, err = s.tasks.TaskKinds(ctx, s.name)
	note(err)
	_, err = s.tasks.DeleteTasks(ctx, provider.TaskRetention{Done: time.Hour, Undone: time.Hour}, 10)
	note(err)
	_, err = s.tasks.Tasks(ctx, f)
	note(err)
	_, err = s.tasks.TaskCounts(ctx, "")
	note(err)
	_, _, err = s.tasks.TaskGroup(ctx, "x")
	note(err)
	_, err = s.tasks.TaskTrail(ctx, t.ID)
	note(err)
	_, err = s.tasks.RequeueTasks(ctx, f, ann)
	note(err)
	_, err = s.tasks.CancelTasks(ctx, f, ann)
	note(err)
	note(s.tasks.CompleteTask(ctx, t.ID, json.RawMessage(`1`), ann))
	note(s.tasks.PatchTask(ctx, t.ID, t.Version, json.RawMessage(`{}`), ann))
	for i, err := range errs {
		s.require(errors.Is(err, context.Canceled), "the error %v of call %d is context.Canceled", err, i)
	}
	same(s, "the stored tasks", s.listTasks(f), was)
}
