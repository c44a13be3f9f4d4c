package providertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/provider"
)

var taskRaceCases = []testCase{
	{
		// Promise: T5.1
		name: "an answer and a suspension", play: raceSuspension,
		rule: "An answer that comes while its task begins to wait is never lost: the task goes on",
	},
	{
		// Promise: T5.1
		name: "an answer and a timeout", play: raceTimeout,
		rule: "An answer and a timeout: one fills the slot, and both sides get the same result",
	},
	{
		name: "an answer and a claim", play: raceClaim,
		rule: "An answer to a task whose time is over, while it is claimed, is never lost",
	},
	{
		// Promise: T5.1
		name: "two answers", play: raceAnswers,
		rule: "Of two answers one is taken. The other is late, or again if it is the same message",
	},
	{
		// Promise: T5.1
		name: "an answer and a cancellation", play: raceCancel,
		rule: "An answer and a cancellation at one moment both take effect",
	},
	{
		// Promise: T6.1
		name: "a cancellation and the end", play: raceDone,
		rule: "A task is canceled or done, never both",
	},
	{
		// Promise: T6.1
		name: "two finishes", play: raceFinish,
		rule: "A change is applied once, however often it is sent",
	},
}

// taskClaimerCases run on both paths of claims.
var taskClaimerCases = []testCase{
	{
		// Promise: T2.1
		name: "several claimers", play: raceClaimers,
		rule: "A task has at most one live claim, with any number of claimers",
	},
}

// taskGroupRaces run with many connections, and with one.
var taskGroupRaces = []testCase{
	{
		// Promise: T8.1
		name: "finishers of a group", play: raceGroup,
		rule: "A group is complete exactly once, for the last of its finishers, also with one connection",
	},
	{
		// Promise: T1.2
		name: "the same tasks from many", play: raceEnqueue,
		rule: "Tasks and groups that many callers add at once, in any order, are added once, and no call fails",
	},
	{
		name: "batches in any order", play: raceBatches,
		rule: "Changes, claims, renewals and decisions of many tasks lock the rows in one order, so that no deadlock ends them",
	},
}

// races is how often each race is run.
func races() int { return longtest.Or(100, 1000) }

// racers is how many races run at once.
const racers = 4

// race adds n tasks, claims them, and runs round for each. round returns the fault, or "".
func (s *stage) race(prepare func(t provider.Task) provider.TaskChange, round func(t provider.Task) string) {
	s.Helper()
	n := races()
	s.crowdOf("k", n)
	tasks := s.claimAll(s.query("k"), n)
	if prepare != nil {
		changes := make([]provider.TaskChange, n)
		for i, t := range tasks {
			changes[i] = prepare(t)
			changes[i].ID, changes[i].Token = t.ID, t.Token
		}
		_, err := s.tasks.ChangeTasks(s.ctx, changes)
		s.ok(err, "prepare")
		s.advance(2 * time.Hour)
		if prepared := s.claimAll(s.query("k"), n); len(prepared) > 0 {
			tasks = prepared
		}
	}
	same(s, "tasks", len(tasks), n)
	s.rounds(tasks, round)
}

func (s *stage) rounds(tasks []provider.Task, round func(t provider.Task) string) {
	s.Helper()
	var mu sync.Mutex
	var faults []string
	together(racers, func(i int) {
		for ; i < len(tasks); i += racers {
			if fault := round(tasks[i]); fault != "" {
				mu.Lock()
				faults = append(faults, fmt.Sprintf("%s: %s", tasks[i].ID, fault))
				mu.Unlock()
			}
		}
	})
	for _, fault := range faults[:min(5, len(faults))] {
		s.Errorf("%s", fault)
	}
	s.require(len(faults) == 0, "no race ends wrong: %d of %d do", len(faults), len(tasks))
}

// both runs two functions at one moment.
func both(a, b func()) {
	fns := []func(){a, b}
	together(2, func(i int) { fns[i]() })
}

func (s *stage) send(t provider.Task, c provider.TaskChange) (provider.TaskChanged, error) {
	c.ID, c.Token = t.ID, t.Token
	got, err := s.tasks.ChangeTasks(s.ctx, []provider.TaskChange{c})
	if err != nil {
		return provider.TaskChanged{}, err
	}
	return got[0], nil
}

func (s *stage) reply(t provider.Task, message string) (got provider.AnswerOutcome, err error) {
	err = s.inTask(s.ctx, func(v taskView) (err error) {
		got, err = v.Answer(s.ctx, provider.TaskAnswer{Task: t.ID, Name: "paid", ID: message, Out: json.RawMessage(`null`)})
		return err
	})
	return got, err
}

func (s *stage) revoke(t provider.Task) (ok bool, err error) {
	err = s.inTask(s.ctx, func(v taskView) (err error) {
		ok, err = v.Cancel(s.ctx, t.ID)
		return err
	})
	return ok, err
}

func (s *stage) stored(t provider.Task) (provider.Task, error) {
	found, err := s.tasks.Tasks(s.ctx, provider.TaskFilter{IDs: []string{t.ID}})
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("%d tasks", len(found))
	}
	if err != nil {
		return provider.Task{}, err
	}
	return found[0], nil
}

// wrong returns the error, or what and the task if is is false, or "".
func wrong(is bool, what string, now provider.Task, errs ...error) string {
	if err := errors.Join(errs...); err != nil {
		return err.Error()
	}
	if is {
		return ""
	}
	return fmt.Sprintf("%s: status %s, undo %t, slots %+v", what, now.Status, now.Undo, now.State)
}

func raceSuspension(s *stage) {
	s.race(nil, func(t provider.Task) string {
		var got provider.TaskChanged
		var outcome provider.AnswerOutcome
		var err1, err2 error
		both(func() { got, err1 = s.send(t, wait("paid", 1, time.Hour)) }, func() { outcome, err2 = s.reply(t, "m") })
		now, err3 := s.stored(t)
		want := provider.TaskClaimed // the wait was refused: the handler runs again
		if got.Applied {
			want = provider.TaskPending
		}
		ok := outcome == provider.AnswerTaken && now.Status == want && now.State["paid"].Filled()
		return wrong(ok, fmt.Sprintf("answer %s, wait applied %t", outcome, got.Applied), now, err1, err2, err3)
	})
}

var settleTimeout = provider.TaskChange{
	To: provider.TaskClaimed, After: lease, Slots: map[string]provider.Slot{"paid": {Call: 1, Timeout: true}}, Open: "paid", Progress: true,
}

// waiting is a wait whose time is over when the race begins.
func waiting(provider.Task) provider.TaskChange { return wait("paid", 1, time.Hour) }

func raceTimeout(s *stage) {
	s.race(waiting, func(t provider.Task) string {
		var got provider.TaskChanged
		var outcome provider.AnswerOutcome
		var err1, err2 error
		both(func() { got, err1 = s.send(t, settleTimeout) }, func() { outcome, err2 = s.reply(t, "m") })
		now, err3 := s.stored(t)
		slot := now.State["paid"]
		ok := t.TimedOut && now.Status == provider.TaskClaimed && got.Applied == slot.Timeout && got.Applied == (outcome == provider.AnswerLate) &&
			(outcome == provider.AnswerTaken) == (slot.By == "m" && slot.Out != nil)
		if !got.Applied { // the worker reads the answer in the refused change
			ok = ok && got.Now.State["paid"].By == "m"
		}
		return wrong(ok, fmt.Sprintf("answer %s, timeout applied %t", outcome, got.Applied), now, err1, err2, err3)
	})
}

func raceClaim(s *stage) {
	n := races()
	s.crowdOf("k", n)
	tasks := s.claimAll(s.query("k"), n)
	for _, t := range tasks {
		s.apply(t, wait("paid", 1, time.Hour))
	}
	s.advance(2 * time.Hour)
	terms := claim.Terms{Holder: "w", Lease: lease, Limit: 1}
	s.rounds(tasks, func(t provider.Task) string {
		var outcome provider.AnswerOutcome
		var err1, err2 error
		both(func() { _, err1 = provider.ClaimTasks(s.ctx, s.tasks, s.query("k"), terms) }, func() { outcome, err2 = s.reply(t, "m") })
		now, err3 := s.stored(t)
		ok := outcome == provider.AnswerTaken && now.State["paid"].By == "m" && (now.Status == provider.TaskPending || now.Status == provider.TaskClaimed)
		return wrong(ok, "answer "+string(outcome), now, err1, err2, err3)
	})
	left := s.claimAll(s.query("k"), n)
	for _, t := range append(left, s.listTasks(provider.TaskFilter{Kind: s.kind("k"), Limit: n})...) {
		same(s, "status", t.Status, provider.TaskClaimed)
	}
}

func raceAnswers(s *stage) {
	s.race(func(provider.Task) provider.TaskChange { return wait("paid", 1, time.Hour) }, func(t provider.Task) string {
		messages := []string{"m1", "m2"}
		if t.ID[len(t.ID)-1]%2 == 0 {
			messages[1] = "m1"
		}
		var outcomes [2]provider.AnswerOutcome
		var errs [2]error
		together(2, func(i int) { outcomes[i], errs[i] = s.reply(t, messages[i]) })
		now, err := s.stored(t)
		second := provider.AnswerLate
		if messages[0] == messages[1] {
			second = provider.AnswerAgain
		}
		first := slices.Index(outcomes[:], provider.AnswerTaken)
		ok := first >= 0 && outcomes[1-max(first, 0)] == second && now.State["paid"].By == messages[max(first, 0)] && now.Version == t.Version+1
		return wrong(ok, fmt.Sprint(outcomes), now, errs[0], errs[1], err)
	})
}

func raceCancel(s *stage) {
	s.race(waiting, func(t provider.Task) string {
		var canceled bool
		var outcome provider.AnswerOutcome
		var err1, err2 error
		both(func() { canceled, err1 = s.revoke(t) }, func() { outcome, err2 = s.reply(t, "m") })
		now, err3 := s.stored(t)
		ok := canceled && outcome == provider.AnswerTaken && now.Undo && now.State["paid"].By == "m" && now.Version == t.Version+2
		return wrong(ok, fmt.Sprintf("answer %s, canceled %t", outcome, canceled), now, err1, err2, err3)
	})
}

func raceDone(s *stage) {
	s.race(nil, func(t provider.Task) string {
		var got provider.TaskChanged
		var canceled bool
		var err1, err2 error
		both(func() { got, err1 = s.send(t, provider.TaskChange{To: provider.TaskDone}) }, func() { canceled, err2 = s.revoke(t) })
		now, err3 := s.stored(t)
		ok := got.Applied != canceled && now.Undo == canceled && (now.Status == provider.TaskDone) == got.Applied
		if canceled {
			ok = ok && now.Status == provider.TaskClaimed && got.Now.Undo
		}
		return wrong(ok, fmt.Sprintf("done applied %t, canceled %t", got.Applied, canceled), now, err1, err2, err3)
	})
}

func raceFinish(s *stage) {
	s.race(nil, func(t provider.Task) string {
		var got [3]provider.TaskChanged
		var errs [3]error
		together(3, func(i int) {
			to := []provider.TaskStatus{provider.TaskDone, provider.TaskDone, provider.TaskFailed}[i]
			got[i], errs[i] = s.send(t, provider.TaskChange{To: to, Result: json.RawMessage(fmt.Sprint(i))})
		})
		now, err := s.stored(t)
		applied := 0
		for i, g := range got {
			if g.Applied {
				applied++
				if string(now.Result) != fmt.Sprint(i) {
					applied += 10
				}
			} else if !g.Late(t.Token) {
				applied += 100
			}
		}
		return wrong(applied == 1 && now.Version == t.Version+1, fmt.Sprint(applied, " applied"), now, append(errs[:], err)...)
	})
}

func raceClaimers(s *stage) {
	n := races()
	for i := range 3 {
		s.crowdOf(fmt.Sprint("k", i), n)
	}
	var mu sync.Mutex
	taken := map[string]int{}
	var failed error
	together(8, func(i int) {
		r := rand.New(rand.NewPCG(uint64(i), 0))
		q := s.query("k0", "k1", "k2")
		for empty := 0; empty < 3; {
			got, err := provider.ClaimTasks(s.ctx, s.tasks, q, claim.Terms{Lease: lease, Limit: 1 + r.IntN(20)})
			if empty++; len(got) > 0 {
				empty = 0
			}
			mu.Lock()
			failed = errors.Join(failed, err)
			for _, t := range got {
				taken[t.ID]++
			}
			mu.Unlock()
			if err != nil {
				return
			}
		}
	})
	s.ok(failed, "claim")
	for id, times := range taken {
		same(s, "claims of "+id, times, 1)
	}
	same(s, "tasks taken", len(taken), 3*n)
}
