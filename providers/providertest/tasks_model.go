package providertest

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
)

// taskModel is what the store of tasks must be: the states of a task in plain Go. Its clock moves
// only with stage.advance.
type taskModel struct {
	now    time.Duration
	tasks  map[string]*modelTask
	groups map[string]*modelGroup
}

const never = time.Duration(1<<63 - 1)

type modelTask struct {
	id, kind, group, input string
	slots                  map[string]provider.Slot // without Until and At
	until                  map[string]time.Duration // ends of waits by slot
	status                 provider.TaskStatus
	undo, doubt, suspect   bool
	why, waits, code       string
	version                int64
	attempts, vanished     int
	waitEnd, next          time.Duration
	token                  claim.Token
	result                 string // empty: none
	trail                  []string
}

type modelGroup struct {
	kind, data  string
	tasks       map[string]string // kind and input by id
	total, open int
}

func newTaskModel() *taskModel {
	return &taskModel{tasks: map[string]*modelTask{}, groups: map[string]*modelGroup{}}
}

func (m *taskModel) clone() *taskModel {
	c := &taskModel{now: m.now, tasks: map[string]*modelTask{}, groups: map[string]*modelGroup{}}
	for id, t := range m.tasks {
		own := *t
		own.slots, own.until, own.trail = maps.Clone(t.slots), maps.Clone(t.until), slices.Clone(t.trail)
		c.tasks[id] = &own
	}
	for id, g := range m.groups {
		own := *g
		c.groups[id] = &own
	}
	return c
}

func (m *taskModel) ids() []string { return slices.Sorted(maps.Keys(m.tasks)) }

// enqueue returns false, and adds nothing, if an id is used.
func (m *taskModel) enqueue(drafts []provider.TaskDraft) bool {
	for _, d := range drafts {
		if t, ok := m.tasks[d.ID]; ok && (t.kind != d.Kind || t.input != string(d.Input) || t.group != "") {
			return false
		}
	}
	for _, d := range drafts {
		if _, ok := m.tasks[d.ID]; !ok {
			m.add(d, "")
		}
	}
	return true
}

func (m *taskModel) add(d provider.TaskDraft, group string) {
	m.tasks[d.ID] = &modelTask{
		id: d.ID, kind: d.Kind, group: group, input: string(d.Input), slots: map[string]provider.Slot{}, until: map[string]time.Duration{},
		status: provider.TaskPending, version: 1, next: m.now + d.After, waitEnd: never,
	}
}

func (m *taskModel) enqueueGroup(g provider.TaskGroupDraft) bool {
	tasks := map[string]string{}
	for _, d := range g.Tasks {
		tasks[d.ID] = d.Kind + " " + string(d.Input)
	}
	if old, ok := m.groups[g.ID]; ok {
		return old.kind == g.Kind && old.data == string(g.Data) && maps.Equal(old.tasks, tasks)
	}
	for id := range tasks {
		if m.tasks[id] != nil {
			return false
		}
	}
	for _, d := range g.Tasks {
		m.add(d, g.ID)
	}
	m.groups[g.ID] = &modelGroup{kind: g.Kind, data: string(g.Data), tasks: tasks, total: len(tasks), open: len(tasks)}
	return true
}

// due returns the ids of the tasks that a claim looks at.
func (m *taskModel) due(q provider.TaskQuery) (ids []string) {
	for _, id := range m.ids() {
		if t := m.tasks[id]; t.status.Open() && t.next <= m.now && t.suspect == q.Alone && slices.Contains(q.Kinds, t.kind) {
			ids = append(ids, id)
		}
	}
	return ids
}

// take returns whether the claim takes the task, and whether it is TimedOut and Spent.
func (m *taskModel) take(id string, q provider.TaskQuery, token claim.Token, d time.Duration) (ok, timedOut, spent bool) {
	t := m.tasks[id]
	if t.status == provider.TaskClaimed {
		t.vanished++
		t.code = provider.CodeVanished
		t.trail = append(t.trail, "failed vanished")
		spent = t.attempts >= q.Attempts
		if !spent && !t.suspect && t.vanished >= 2 {
			t.status, t.suspect, t.token = provider.TaskFailed, true, claim.Token{}
			return false, false, false
		}
	}
	if !spent {
		t.attempts++
	}
	t.doubt = t.doubt || !t.undo
	t.status, t.token, t.next = provider.TaskClaimed, token, m.now+d
	return true, t.waitEnd <= m.now, spent
}

// change returns false if the change is refused.
func (m *taskModel) change(c provider.TaskChange) bool {
	t := m.tasks[c.ID]
	if t == nil || t.refuses(c) {
		return false
	}
	t.version++
	t.vanished = 0
	for name, slot := range c.Slots {
		t.slots[name] = slot
		if c.To != provider.TaskWaiting || name != c.Open {
			delete(t.until, name)
		}
	}
	if c.Progress {
		t.attempts, t.suspect, t.waits, t.waitEnd = 1, false, "", never
	}
	ends := c.To == provider.TaskPending || c.To == provider.TaskFailed || c.To == provider.TaskAbandoned
	if ends || c.GiveUp != "" {
		t.doubt = c.Doubt
	}
	if c.GiveUp != "" {
		t.undo, t.why = true, c.GiveUp
		t.trail = append(t.trail, "gave_up "+c.GiveUp)
	}
	if c.Code != "" {
		t.code = c.Code
	}
	if c.Result != nil {
		t.result = string(c.Result)
	}
	if t.status = c.To; c.To != provider.TaskClaimed {
		t.token = claim.Token{}
	}
	t.next = m.now + c.After
	m.enter(t, c)
	return true
}

// refuses reports whether a change is refused.
func (t *modelTask) refuses(c provider.TaskChange) bool {
	return t.status != provider.TaskClaimed || t.token != c.Token || c.Open != "" && t.slots[c.Open].Filled() ||
		t.undo && (c.To == provider.TaskDone || c.To == provider.TaskWaiting)
}

// enter does what follows the new status of a task.
func (m *taskModel) enter(t *modelTask, c provider.TaskChange) {
	switch c.To {
	case provider.TaskPending:
		t.attempts = max(t.attempts-1, 0)
	case provider.TaskWaiting:
		m.wait(t, c)
	case provider.TaskFailed:
		t.trail = append(t.trail, strings.TrimSpace("failed "+t.code))
	case provider.TaskDone, provider.TaskUndone, provider.TaskAbandoned:
		t.suspect, t.waits, t.waitEnd, t.next = false, "", never, never
		what := string(c.To)
		if c.To == provider.TaskAbandoned && t.code != "" {
			what += " " + t.code
		}
		t.trail = append(t.trail, what)
		if g := m.groups[t.group]; g != nil && c.To == provider.TaskDone {
			g.open--
		}
	}
}

func (m *taskModel) wait(t *modelTask, c provider.TaskChange) {
	end, set := t.until[c.Open]
	if !set {
		if end = never; c.After > 0 {
			end = m.now + c.After
			t.until[c.Open] = end
		}
	}
	t.attempts, t.suspect, t.doubt = 0, false, false
	t.waits, t.waitEnd, t.next = c.Open, end, end
}

func (m *taskModel) resume(t *modelTask) {
	if t.status == provider.TaskWaiting && t.slots[t.waits].Filled() {
		t.status, t.next = provider.TaskPending, m.now
	}
}

func (m *taskModel) answer(a provider.TaskAnswer) provider.AnswerOutcome {
	t := m.tasks[a.Task]
	switch {
	case t == nil:
		return provider.AnswerNotFound
	case t.slots[a.Name].Filled() && t.slots[a.Name].By == a.ID:
		return provider.AnswerAgain
	case t.slots[a.Name].Filled() || t.status.Final():
		return provider.AnswerLate
	}
	t.slots[a.Name] = provider.Slot{Call: t.slots[a.Name].Call, Out: a.Out, By: a.ID}
	t.version++
	t.trail = append(t.trail, "answered "+a.Name)
	m.resume(t)
	return provider.AnswerTaken
}

// restart makes t pending, with no attempts counted.
func (t *modelTask) restart(what string, next time.Duration) {
	t.status, t.next, t.token, t.attempts, t.vanished, t.suspect = provider.TaskPending, next, claim.Token{}, 0, 0, false
	t.version++
	t.trail = append(t.trail, what)
}

func (m *taskModel) cancel(id string) bool {
	t := m.tasks[id]
	if t == nil || t.undo || t.status.Final() {
		return false
	}
	t.undo, t.why, t.result = true, provider.WhyCanceled, ""
	if t.status == provider.TaskClaimed {
		t.version++
		t.trail = append(t.trail, provider.WhatCanceled)
		return true
	}
	suspect := t.suspect
	t.restart(provider.WhatCanceled, m.now)
	t.suspect = suspect // one that kills its worker may do so while it is being undone
	return true
}

func (m *taskModel) postpone(id string, at time.Duration) bool {
	t := m.tasks[id]
	can := []provider.TaskStatus{provider.TaskPending, provider.TaskFailed, provider.TaskClaimed}
	if t == nil || t.undo || len(t.slots) > 0 || t.result != "" || !slices.Contains(can, t.status) {
		return false
	}
	t.restart(provider.WhatPostponed, at)
	return true
}

func (m *taskModel) requeue(ids []string) (n int) {
	for _, id := range ids {
		if t := m.tasks[id]; t != nil && (t.status == provider.TaskFailed || t.status == provider.TaskAbandoned) {
			t.restart(provider.WhatRequeued, m.now)
			n++
		}
	}
	return n
}

func (m *taskModel) complete(id, result string) bool {
	t := m.tasks[id]
	if t == nil || t.status != provider.TaskAbandoned {
		return false
	}
	t.restart(provider.WhatCompleted, m.now)
	t.result = result
	return true
}

// patch fills or removes one slot: out is empty to remove it.
func (m *taskModel) patch(id string, version int64, slot, out string) bool {
	t := m.tasks[id]
	if t == nil || t.version != version || t.status == provider.TaskClaimed || t.status.Final() {
		return false
	}
	if out == "" {
		delete(t.slots, slot)
		delete(t.until, slot)
	} else {
		s := t.slots[slot]
		s.Out = []byte(out)
		t.slots[slot] = s
	}
	t.version++
	t.trail = append(t.trail, provider.WhatPatched)
	m.resume(t)
	return true
}

// renew returns whether the claim is late.
func (m *taskModel) renew(id string, token claim.Token, d time.Duration) (late bool) {
	t := m.tasks[id]
	if t == nil || t.status != provider.TaskClaimed || t.token != token {
		return true
	}
	t.next = m.now + d
	return false
}

// differs returns in what the stored task is not that of the model, or "". What the contract leaves
// open for a task that has ended is not compared.
func (t *modelTask) differs(got provider.Task, trail []string) string {
	var faults []string
	check := func(what string, got, want any) {
		if got != want {
			faults = append(faults, fmt.Sprintf("%s: got %v, want %v", what, got, want))
		}
	}
	check("kind", got.Kind, t.kind)
	check("group", got.Group, t.group)
	check("status", got.Status, t.status)
	check("undo", got.Undo, t.undo)
	check("why", got.Why, t.why)
	check("version", got.Version, t.version)
	check("result", string(got.Result), t.result)
	check("ended", !got.EndedAt.IsZero(), t.status.Final() || t.status == provider.TaskAbandoned)
	check("trail", strings.Join(trail, ", "), strings.Join(t.trail, ", "))
	if !t.status.Final() {
		check("doubt", got.Doubt, t.doubt)
		check("code", got.Code, t.code)
	}
	if t.status.Open() {
		check("attempts", got.Attempts, t.attempts)
		check("suspect", got.Suspect, t.suspect)
	}
	if t.status.Open() && !t.suspect { // the contract does not say what a cancellation makes of a suspect's
		check("vanished", got.Vanished, t.vanished)
	}
	if t.status == provider.TaskClaimed {
		check("token", got.Token, t.token)
	}
	if t.status == provider.TaskWaiting || t.status == provider.TaskClaimed && !t.undo {
		check("waits", got.Waits, t.waits)
	}
	check("number of slots", len(got.State), len(t.slots))
	for name, want := range t.slots {
		slot := got.State[name]
		_, until := t.until[name]
		check("slot "+name, fmt.Sprint(slot.Call, slot.By, slot.Timeout, slot.Out != nil, slot.Until != ""),
			fmt.Sprint(want.Call, want.By, want.Timeout, want.Out != nil, until))
		if want.Out != nil && !sameJSON(slot.Out, want.Out) {
			check("value of slot "+name, string(slot.Out), string(want.Out))
		}
	}
	return strings.Join(faults, "; ")
}
