package providertest

import (
	"fmt"
	"time"

	"github.com/kinora-go/kinora/provider"
)

var taskVanishedCases = []testCase{
	{
		// Promise: T11.1
		name: "suspects are claimed alone", play: taskSuspectsAlone,
		rule: "With TaskQuery.Alone a claim takes one suspect task, else none of them",
	},
	{
		name: "a suspect stays a suspect", play: taskStaysSuspect,
		rule: "A suspect is claimed alone until it makes progress, also after it failed or was released",
	},
	{
		name: "a suspect that vanishes", play: taskSuspectVanishes,
		rule: "A suspect that vanishes again is claimed alone again, with an attempt counted, up to the limit; then it is Spent",
	},
	{
		name: "vanished in a row", play: taskVanishedInARow,
		rule: "Vanished counts leases in a row that ended without a change: any change ends the row",
	},
	{
		name: "no limit of attempts", play: taskNoLimit,
		rule: "TaskQuery.Attempts ≤ 0: no limit",
	},
	{
		// Promise: T11.1
		name: "progress begins a new budget", play: taskProgressBudget,
		rule: "Attempts count claims since the last progress: a task of many steps is not at its limit",
	},
	{
		// Promise: T11.1
		name: "tasks that kill their workers", play: taskKillers,
		rule: "A task that always ends its worker is Spent after q.Attempts claims, and no other task is",
	},
}

func taskSuspectsAlone(s *stage) {
	for _, name := range []string{"a", "b"} {
		s.suspect(name)
	}
	s.addTasks(s.draftTask("innocent"))
	q := s.query("a", "b", "innocent")
	same(s, "candidates", s.taskCandidates(q, 10), s.ids("innocent"))
	alone := q
	alone.Alone = true
	same(s, "suspect candidates", len(s.taskCandidates(alone, 10)), 2)
	first := s.claimAll(alone, 10)
	same(s, "suspects of one claim", len(first), 1)
	same(s, "claimed with others", s.claimedIDs(q, 10), s.ids("innocent"))
	second := s.claimAll(alone, 10)
	same(s, "suspects of the next claim", len(second), 1)
	s.require(first[0].ID != second[0].ID, "another suspect is claimed: %s, %s", first[0].ID, second[0].ID)
	same(s, "suspects of a third claim", len(s.claimAll(alone, 10)), 0)
}

func taskStaysSuspect(s *stage) {
	s.suspect("call")
	t := s.takeAlone("call")
	s.apply(t, provider.TaskChange{To: provider.TaskFailed, Code: "x"})
	same(s, "claimed with others after a failure", s.claimedIDs(s.query("call"), 10), s.ids())
	t = s.takeAlone("call")
	s.apply(t, provider.TaskChange{To: provider.TaskPending})
	same(s, "claimed with others after a release", s.claimedIDs(s.query("call"), 10), s.ids())
	t = s.takeAlone("call")
	now := s.apply(t, step("charge", 1, `1`))
	same(s, "after a step", []any{now.Suspect, now.Vanished, now.Attempts}, []any{false, 0, 1})
	s.apply(t, provider.TaskChange{To: provider.TaskFailed, Code: "x"})
	same(s, "suspect of the task claimed with others", s.take("call").Suspect, false)

	s.suspect("waits")
	now = s.apply(s.takeAlone("waits"), wait("paid", 1, time.Hour))
	same(s, "suspect of a task that waits", now.Suspect, false)
	s.advance(2 * time.Hour)
	same(s, "claimed with others once its time is over", s.claimedIDs(s.query("waits"), 10), s.ids("waits"))
}

func taskSuspectVanishes(s *stage) {
	s.suspect("call")
	for attempt := 3; attempt <= taskLimit; attempt++ {
		t := s.takeAlone("call")
		same(s, "attempts, Spent", []any{t.Attempts, t.Spent, t.Suspect}, []any{attempt, false, true})
		s.vanish()
		same(s, "claimed with others", s.claimedIDs(s.query("call"), 10), s.ids())
	}
	t := s.takeAlone("call")
	same(s, "at the limit", []any{t.Attempts, t.Spent, t.Code}, []any{taskLimit, true, provider.CodeVanished})
	s.apply(t, provider.TaskChange{To: provider.TaskAbandoned, Code: provider.CodeVanished})
	n, err := s.tasks.RequeueTasks(s.ctx, provider.TaskFilter{IDs: []string{t.ID}}, ann)
	s.ok(err, "requeue")
	same(s, "requeued", n, 1)
	again := s.claimAll(s.query("call"), 10)
	if len(again) == 0 {
		again = []provider.Task{s.takeAlone("call")}
	}
	same(s, "attempts after a requeue", []any{again[0].Attempts, again[0].Spent}, []any{1, false})
}

func taskVanishedInARow(s *stage) {
	for _, c := range []provider.TaskChange{
		{To: provider.TaskFailed}, {To: provider.TaskPending}, {To: provider.TaskClaimed, After: lease},
		step("charge", 1, `1`),
	} {
		name := fmt.Sprintf("%s-%t", c.To, c.Progress)
		t := s.begun(name)
		for range 3 {
			s.vanish()
			t = s.take(name)
			same(s, "Vanished", t.Vanished, 1)
			if c.Open != "" {
				c.Slots, c.Open = filled(c.Open+"x", 1, `1`), c.Open+"x"
			}
			now := s.apply(t, c)
			same(s, "Vanished after a change", now.Vanished, 0)
			if c.To != provider.TaskClaimed {
				t = s.take(name)
			}
		}
	}
}

func taskNoLimit(s *stage) {
	s.addTasks(s.draftTask("call"))
	q := s.query("call")
	q.Attempts = 0
	for attempt := 1; attempt <= 20; attempt++ {
		if attempt == 3 { // it has vanished twice
			same(s, "claimed with others", s.claimedIDs(q, 10), s.ids())
			q.Alone = true
		}
		taken := s.claimAll(q, 10)
		same(s, "ids of a claim", taskIDs(taken), s.ids("call"))
		same(s, "attempts, Spent", []any{taken[0].Attempts, taken[0].Spent}, []any{attempt, false})
		s.vanish()
	}
}

func taskProgressBudget(s *stage) {
	t := s.begun("call")
	for i := range 3 * taskLimit {
		name := fmt.Sprintf("s%d", i)
		now := s.apply(t, step(name, i+1, `1`))
		same(s, "attempts after a step", now.Attempts, 1)
		s.apply(t, provider.TaskChange{To: provider.TaskFailed, Code: "x"})
		t = s.take("call")
		same(s, "attempts of the claim after a step", []any{t.Attempts, t.Spent}, []any{2, false})
	}
	for i := range 3 * taskLimit {
		name := fmt.Sprintf("w%d", i)
		s.apply(t, wait(name, 100+i, time.Hour))
		s.answerTask("call", name, "m", `1`)
		t = s.take("call")
		s.require(t.Attempts <= 2 && !t.Spent, "a wait is progress: %d attempts after %d waits", t.Attempts, i+1)
	}
}

// taskKillers lets one worker claim sixteen tasks repeatedly, and crash whenever it reaches a
// deadly one.
func taskKillers(s *stage) {
	const n, killers, batch = 100, 3, 16
	names := s.crowdOf("k", n)
	deadly := map[string]bool{}
	for i := range killers {
		deadly[s.id(names[7+31*i])] = true
	}
	done, abandoned := 0, 0
	for claims := 0; done+abandoned < n; claims++ {
		s.require(claims < 10*n, "after %d claims, %d tasks are done, and %d abandoned", claims, done, abandoned)
		q := s.query("k")
		taken := s.claimAll(q, batch)
		if len(taken) == 0 {
			q.Alone = true
			taken = s.claimAll(q, batch)
		}
		died := false
		for _, t := range taken {
			c := provider.TaskChange{ID: t.ID, Token: t.Token, To: provider.TaskDone}
			if t.Spent {
				s.require(deadly[t.ID], "the task %s never ended its worker, and is Spent", t.ID)
				c.To = provider.TaskAbandoned
				abandoned++
			} else if died = deadly[t.ID]; died {
				break
			} else {
				done++
			}
			s.require(s.try(t, c).Applied, "the task %s is %s", t.ID, c.To)
		}
		if died || len(taken) == 0 {
			s.vanish()
		}
	}
	same(s, "done, abandoned", []int{done, abandoned}, []int{n - killers, killers})
}
