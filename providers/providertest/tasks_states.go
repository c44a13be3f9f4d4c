package providertest

import (
	"encoding/json"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
)

// taskStateCases are the changes of a status, one case each.
var taskStateCases = []testCase{
	{
		name: "enqueue makes a pending task", play: taskEnqueued,
		rule: "Enqueue adds a task: pending, due, no attempt, no slot, forward; it is added if the transaction commits, and only then",
	},
	{
		name: "a claim takes a pending task", play: taskClaimedFresh,
		rule: "A claimed task is returned as it is stored: claimed, token and holder set, the attempt counted, leased for t.Lease. A claim does not change the version",
	},
	{
		name: "a claim takes a failed task", play: taskClaimedFailed,
		rule: "A failed task is claimed after its backoff: slots and direction stay, the attempt is counted",
	},
	{
		name: "a claim takes a waiting task", play: taskClaimedWaiting,
		rule: "A waiting task is claimed once its time is over, with TimedOut; slots, direction and Waits stay",
	},
	{
		name: "a claim takes over a claimed task", play: taskClaimedVanished,
		rule: "A claimed task whose lease has ended is claimed again: Vanished is counted, the code is vanished; slots, direction and wait stay",
	},
	{
		name: "a claim at the limit of attempts", play: taskSpent,
		rule: "A task that has vanished at q.Attempts is claimed with Spent, no attempt is counted, and the code is vanished",
	},
	{
		// Promise: T11.1
		name: "vanished twice in a row", play: taskSuspected,
		rule: "A task that has vanished for the second time in a row becomes failed and Suspect, stays due, is not claimed with others, and the code is vanished",
	},
	{
		name: "a step is settled", play: taskStepped,
		rule: "A recorded step fills its slot; attempts begin again with this claim, Vanished and Suspect end, the lease is renewed, the claim stays",
	},
	{
		// Promise: T3.1
		name: "a filled slot is settled again", play: taskSlotGuard,
		rule: "A change is refused if its Open slot is filled: by a step, an answer, a timeout, or a patch",
	},
	{
		name: "a wait", play: taskWaited,
		rule: "A task that waits is waiting for the slot, and cannot be claimed before the end of its time; without a time it has no end",
	},
	{
		name: "a wait for a filled slot", play: taskWaitRefused,
		rule: "TaskWaiting is refused if the slot is filled, or the direction is undo",
	},
	{
		name: "an answer to a waiting task", play: taskAnswered,
		rule: "An answer fills the slot of the wait; a task that waits for it becomes pending, due at once; the trail has it",
	},
	{
		name: "an answer to any other task", play: taskAnsweredElsewhere,
		rule: "An answer to a task that does not wait for it fills the slot, and leaves the status, the claim and the attempts",
	},
	{
		name: "the handler returns", play: taskDone,
		rule: "TaskDone stores the result and ends the task; the trail has it",
	},
	{
		// Promise: T7.1
		name: "the handler returns after a cancellation", play: taskDoneDespiteUndo,
		rule: "TaskDone is refused if the direction is undo",
	},
	{
		name: "an error with attempts left", play: taskFailed,
		rule: "TaskFailed waits for its backoff, keeps the attempts, and stores the code",
	},
	{
		name: "an error at the limit", play: taskAbandoned,
		rule: "TaskAbandoned ends every attempt: no claim takes the task, the code is stored, the trail has it",
	},
	{
		name: "a handler gives up", play: taskGivesUp,
		rule: "GiveUp turns the direction to undo, with Why and Doubt; the claim stays",
	},
	{
		// Promise: T7.1
		name: "the direction stays", play: taskForwardAgain,
		rule: "Claims, lost leases, failures, releases and requeues do not change the direction",
	},
	{
		name: "cancel of a claimed task", play: taskCanceled,
		rule: "Cancel leaves a claimed task claimed, with the direction undo, and its worker notices it at its next change",
	},
	{
		name: "all undos are settled", play: taskUndone,
		rule: "TaskUndone ends a task that is being undone; the trail has it",
	},
	{
		// Promise: T12.1
		name: "a release", play: taskReleased,
		rule: "TaskPending releases a task and gives its attempt back; After delays it",
	},
	{
		// Promise: T6.1
		name: "a final task", play: taskFinal,
		rule: "Done and undone tasks never change again",
	},
}

func taskEnqueued(s *stage) {
	d := s.draftTask("call")
	s.addTasks(d)
	got := s.task("call")
	s.require(sameJSON(got.Input, d.Input), "the input %s is kept as %s", d.Input, got.Input)
	s.require(!got.CreatedAt.IsZero() && !got.NextAt.After(got.CreatedAt), "a task created at %v is due at once, not at %v", got.CreatedAt, got.NextAt)
	same(s, "zone of the times", []*time.Location{got.CreatedAt.Location(), got.NextAt.Location()}, []*time.Location{time.UTC, time.UTC})
	same(s, "a new task", got, provider.Task{
		ID: d.ID, Kind: d.Kind, Input: got.Input, Status: provider.TaskPending, Version: got.Version, NextAt: got.NextAt, CreatedAt: got.CreatedAt,
	})
	s.trailed("call")
}

func taskClaimedFresh(s *stage) {
	s.addTasks(s.draftTask("call"))
	was := s.task("call")
	t := claim.Terms{Holder: `o'hara "host"/77`, Token: claim.NewToken(), Lease: 90 * time.Minute, Limit: 10}
	taken, err := provider.ClaimTasks(s.ctx, s.tasks, s.query("call"), t)
	s.ok(err, "claim")
	same(s, "ids of the claim", taskIDs(taken), []string{s.id("call")})
	want := was
	want.Status, want.Attempts, want.Token, want.ClaimedBy, want.Doubt = provider.TaskClaimed, 1, t.Token, t.Holder, true
	want.NextAt = plainTask(taken[0]).NextAt
	want.LastAttemptedAt = want.NextAt.Add(-t.Lease)
	same(s, "the stored task", s.task("call"), want)
	want.Doubt = false // as before the claim
	same(s, "the claimed task", plainTask(taken[0]), want)
	same(s, "TimedOut, Spent", []bool{taken[0].TimedOut, taken[0].Spent}, []bool{false, false})
	age := want.NextAt.Sub(was.CreatedAt)
	s.require(age >= t.Lease && age < t.Lease+patience.Limit(), "the lease ends %v after the task was created, with a lease of %v", age, t.Lease)
	s.notDue("call")
	s.advance(t.Lease - 10*time.Minute)
	s.notDue("call")
	s.trailed("call")
}

func taskClaimedFailed(s *stage) {
	first := s.begun("call")
	s.apply(first, step("charge", 1, `{"paid":7}`))
	was := s.apply(first, provider.TaskChange{To: provider.TaskFailed, After: 2 * time.Hour, Code: "http_500"})
	s.notDue("call")
	s.advance(time.Hour)
	s.notDue("call")
	s.advance(2 * time.Hour)
	got := s.take("call")
	same(s, "attempts", got.Attempts, was.Attempts+1)
	same(s, "what a claim keeps", []any{got.Undo, got.Code, got.Vanished, got.Version}, []any{false, "http_500", 0, was.Version})
	s.sameState(got.State, filled("charge", 1, `{"paid":7}`))
	s.require(got.Token != first.Token, "a claim has a token of its own")
}

func taskClaimedWaiting(s *stage) {
	first := s.begun("call")
	s.apply(first, step("charge", 1, `1`))
	s.apply(first, wait("paid", 2, 2*time.Hour))
	s.notDue("call")
	s.advance(time.Hour)
	s.notDue("call")
	s.advance(2 * time.Hour)
	got := s.take("call")
	same(s, "the claimed task", []any{got.TimedOut, got.Waits, got.Undo}, []any{true, "paid", false})
	same(s, "slots", []bool{got.State["charge"].Filled(), got.State["paid"].Filled()}, []bool{true, false})
	same(s, "call of the wait", got.State["paid"].Call, 2)
	s.vanish()
	got = s.take("call")
	same(s, "the task that is claimed again", []any{got.TimedOut, got.Waits, got.Vanished}, []any{true, "paid", 1})
	s.apply(got, provider.TaskChange{To: provider.TaskFailed, Code: "x"})
	same(s, "TimedOut of the task that failed", s.take("call").TimedOut, true)
}

func taskClaimedVanished(s *stage) {
	first := s.begun("call")
	s.apply(first, step("charge", 1, `1`))
	s.notDue("call")
	s.vanish()
	got := s.take("call")
	was := s.task("call")
	same(s, "the task that vanished", []any{got.Attempts, got.Vanished, got.Suspect, got.Code, got.Spent}, []any{2, 1, false, provider.CodeVanished, false})
	s.require(got.Token != first.Token, "a claim has a token of its own")
	s.sameState(got.State, filled("charge", 1, `1`))
	s.outdated(first)
	same(s, "the stored task", s.task("call"), was)
	s.apply(got, provider.TaskChange{To: provider.TaskDone, Result: json.RawMessage(`1`)})
}

func taskSpent(s *stage) {
	q := s.query("call")
	q.Attempts = 2
	s.addTasks(s.draftTask("call"))
	for attempt := 1; attempt <= 2; attempt++ {
		taken := s.claimAll(q, 10)
		same(s, "ids of the claim", taskIDs(taken), []string{s.id("call")})
		same(s, "attempts, Spent", []any{taken[0].Attempts, taken[0].Spent}, []any{attempt, false})
		s.vanish()
	}
	taken := s.claimAll(q, 10)
	same(s, "ids of the claim at the limit", taskIDs(taken), []string{s.id("call")})
	got := taken[0]
	s.require(got.NextAt.Sub(s.task("call").LastAttemptedAt) > 2*lease, "the claim of a spent task is no attempt")
	same(s, "the spent task", []any{got.Status, got.Spent, got.Attempts, got.Code}, []any{provider.TaskClaimed, true, 2, provider.CodeVanished})
	s.notDue("call")
	s.vanish()
	got = s.claimAll(q, 10)[0] // the worker that was to abandon it crashed too
	same(s, "the task that is spent again", []any{got.Spent, got.Attempts}, []any{true, 2})
	s.apply(got, provider.TaskChange{To: provider.TaskAbandoned, Code: provider.CodeVanished})
	s.trailed("call", "failed vanished", "failed vanished", "failed vanished", "abandoned vanished")
	same(s, "the worker of a record", s.records("call")[0].By, "worker")
}

func taskSuspected(s *stage) {
	s.begun("call")
	s.vanish()
	second := s.take("call")
	s.vanish()
	same(s, "ids of the third claim", taskIDs(s.claimAll(s.query("call"), 10)), []string{})
	got := s.task("call")
	same(s, "the suspect", []any{got.Status, got.Suspect, got.Vanished, got.Attempts, got.Code},
		[]any{provider.TaskFailed, true, 2, 2, provider.CodeVanished})
	s.outdated(second)
	same(s, "ids of a claim of all", taskIDs(s.claimAll(s.query("call"), 10)), []string{})
	alone := s.takeAlone("call")
	same(s, "the suspect claimed alone", []any{alone.Status, alone.Suspect, alone.Attempts}, []any{provider.TaskClaimed, true, 3})
}

func taskStepped(s *stage) {
	s.begun("call")
	s.vanish()
	t := s.take("call")
	s.advance(lease - time.Hour)
	now := s.apply(t, step("charge", 1, `{"a":[1,null,"x"]}`))
	same(s, "the task after a step", []any{now.Attempts, now.Vanished, now.Suspect, now.Token, now.ClaimedBy, now.Undo}, []any{1, 0, false, t.Token, "worker", false})
	s.sameState(now.State, filled("charge", 1, `{"a":[1,null,"x"]}`))
	s.advance(2 * time.Hour) // beyond the first lease
	s.notDue("call")
	now = s.apply(t, step("ship", 2, `"sent"`))
	s.sameState(now.State, map[string]provider.Slot{
		"charge": {Call: 1, Out: json.RawMessage(`{"a":[1,null,"x"]}`)}, "ship": {Call: 2, Out: json.RawMessage(`"sent"`)},
	})
	s.trailed("call", "failed vanished")
}

func taskSlotGuard(s *stage) {
	t := s.begun("call")
	s.apply(t, step("charge", 1, `1`))
	same(s, "answer", s.answerTask("call", "paid", "m1", `2`), provider.AnswerTaken)
	s.apply(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, Slots: map[string]provider.Slot{"late": {Call: 3, Timeout: true}}, Open: "late", Progress: true})
	for _, slot := range []string{"charge", "paid", "late"} {
		got := s.refuse(t, step(slot, 7, `"second"`))
		s.require(!got.Late(t.Token), "a change that a filled slot refuses is not late")
		s.refuse(t, provider.TaskChange{To: provider.TaskClaimed, After: lease, Slots: map[string]provider.Slot{slot: {Call: 7, Timeout: true}}, Open: slot})
		s.refuse(t, wait(slot, 7, time.Hour))
		s.refuse(t, provider.TaskChange{To: provider.TaskPending, Open: slot})
		s.refuse(t, provider.TaskChange{To: provider.TaskDone, Open: slot, Result: json.RawMessage(`1`)})
	}
	s.apply(t, provider.TaskChange{To: provider.TaskFailed})
	s.ok(s.tasks.PatchTask(s.ctx, t.ID, s.task("call").Version, json.RawMessage(`{"fixed":{"n":4,"out":5},"charge":null,"late":null}`), ann), "patch")
	t = s.take("call")
	s.refuse(t, step("fixed", 4, `"second"`))
	s.apply(t, step("charge", 1, `"again"`))
	s.apply(t, step("late", 3, `"again"`))
}

func taskWaited(s *stage) {
	t := s.begun("timed")
	before := s.taskClock()
	now := s.apply(t, wait("paid", 1, 3*time.Hour))
	same(s, "the waiting task", []any{now.Waits, now.Vanished, now.Suspect, now.Undo}, []any{"paid", 0, false, false})
	same(s, "slots", []any{len(now.State), now.State["paid"].Call, now.State["paid"].Filled()}, []any{1, 1, false})
	s.require(now.State["paid"].Until != "", "the slot of the wait has its end")
	end := now.NextAt.Sub(before)
	s.require(end >= 3*time.Hour && end < 3*time.Hour+patience.Limit(), "a wait of 3h ends after %v", end)
	s.outdated(t)

	for name, d := range map[string]time.Duration{"endless": 0, "negative": -time.Hour} {
		now = s.apply(s.begun(name), wait("paid", 1, d))
		s.require(now.NextAt.IsZero(), "NextAt of a wait without end is %v", now.NextAt)
		same(s, "end of a wait without end", now.State["paid"].Until, "")
	}
	s.advance(100_000 * time.Hour)
	s.notDue("endless", "negative")
	same(s, "attempts of the task whose time is over", s.take("timed").Attempts <= 2, true)
}

func taskWaitRefused(s *stage) {
	t := s.begun("answered")
	same(s, "answer before the wait", s.answerTask("answered", "paid", "m1", `null`), provider.AnswerTaken)
	got := s.refuse(t, wait("paid", 1, time.Hour))
	s.require(!got.Late(t.Token), "the worker keeps its claim")
	s.sameJSON("answer in the refused change", got.Now.State["paid"].Out, `null`)

	t = s.begun("canceled")
	same(s, "cancel", s.cancelTask("canceled"), true)
	got = s.refuse(t, wait("paid", 1, time.Hour))
	same(s, "direction in the refused change", []any{got.Now.Undo, got.Now.Why, got.Late(t.Token)}, []any{true, provider.WhyCanceled, false})
}

func taskAnswered(s *stage) {
	t := s.begun("call")
	was := s.apply(t, wait("paid", 1, time.Hour))
	same(s, "answer", s.answerTask("call", "paid", "m1", `{"ok":true}`), provider.AnswerTaken)
	now := s.task("call")
	same(s, "the answered task", []any{now.Status, now.Version, now.Undo}, []any{provider.TaskPending, was.Version + 1, false})
	slot := now.State["paid"]
	s.sameJSON("answer", slot.Out, `{"ok":true}`)
	same(s, "slot", []any{slot.Call, slot.By, slot.Timeout, slot.At != ""}, []any{1, "m1", false, true})
	s.trailed("call", "answered paid")
	same(s, "By of the record", s.records("call")[0].By, "m1")
	got := s.take("call")
	same(s, "the claimed task", []any{got.Waits, got.TimedOut, got.State["paid"].Filled()}, []any{"paid", false, true})
}
