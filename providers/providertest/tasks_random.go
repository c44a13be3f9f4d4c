package providertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/provider"
)

var taskModelCases = []testCase{
	{
		name: "any sequence of operations", play: taskRandom,
		rule: "After any sequence of operations the tasks are those of the model, which has every change of a status in plain Go",
	},
}

// taskPlayer plays random operations on a store and on the model, and compares their results.
type taskPlayer struct {
	*stage
	game   string // prefix of the names of its tasks and kinds
	r      *rand.Rand
	m      *taskModel
	tokens map[string][]claim.Token // by id: those of all claims
	log    []string                 // the operations, to be played again by hand
	faults []string
}

func taskRandom(s *stage) {
	seed := rand.Uint64()
	for game := range longtest.Or(2, 20) {
		p := &taskPlayer{
			stage: s, game: fmt.Sprint("g", game, "-"), r: rand.New(rand.NewPCG(seed, uint64(game))), m: newTaskModel(), tokens: map[string][]claim.Token{},
		}
		for range longtest.Or(200, 1000) {
			p.play()
			p.compare()
			if len(p.faults) > 0 {
				s.Fatalf("seed %d, game %d: %s\nafter\n%s", seed, game, strings.Join(p.faults, "\n"), strings.Join(p.log, "\n"))
			}
		}
	}
}

func (p *taskPlayer) note(format string, args ...any) {
	p.log = append(p.log, fmt.Sprintf(format, args...))
}

// want notes a fault if got is not want.
func (p *taskPlayer) want(what string, got, want any) {
	if fmt.Sprint(got) != fmt.Sprint(want) {
		p.faults = append(p.faults, fmt.Sprintf("%s: got %v, want %v", what, got, want))
	}
}

// fine notes a fault if err is not nil.
func (p *taskPlayer) fine(what string, err error) {
	if err != nil {
		p.want(what, err, nil)
	}
}

func pick[V any](r *rand.Rand, of ...V) V { return of[r.IntN(len(of))] }

func (p *taskPlayer) play() {
	switch dice := p.r.IntN(100); {
	case dice < 30:
		p.change()
	case dice < 50:
		p.claim()
	case dice < 75:
		p.transaction()
	case dice < 82:
		d := pick(p.r, time.Hour, 4*time.Hour, 12*time.Hour)
		p.note("advance %s", d)
		p.m.now += d
		p.advance(d)
	case dice < 86:
		p.renew()
	default:
		p.decide()
	}
}

func printed(ds []provider.TaskDraft) string {
	var b strings.Builder
	for _, d := range ds {
		fmt.Fprintf(&b, "[%s %s %s in %s]", d.ID, d.Kind, d.Input, d.After)
	}
	return b.String()
}

func printedChange(c provider.TaskChange) string {
	slots, _ := json.Marshal(c.Slots)
	return fmt.Sprintf("%s by %.8s to %s in %s: slots %s, open %q, progress %t, give up %q, doubt %t, result %s, code %q",
		c.ID, c.Token, c.To, c.After, slots, c.Open, c.Progress, c.GiveUp, c.Doubt, c.Result, c.Code)
}

// anyTask returns the id of a task, or of none.
func (p *taskPlayer) anyTask() string {
	return p.id(p.game + pick(p.r, "a", "b", "c", "d", "g1", "g2", "g3"))
}

func (p *taskPlayer) known() string {
	if ids := p.m.ids(); len(ids) > 0 {
		return pick(p.r, ids...)
	}
	return "nothing"
}

func (p *taskPlayer) claim() {
	q := provider.TaskQuery{Attempts: 3, Alone: p.r.IntN(3) == 0}
	for _, k := range []string{"even", "odd"} {
		if p.r.IntN(4) > 0 {
			q.Kinds = append(q.Kinds, p.kind(p.game+k))
		}
	}
	t := claim.Terms{Holder: "h", Token: claim.NewToken(), Lease: pick(p.r, 3*time.Hour, 6*time.Hour), Limit: 100}
	p.note("claim %v alone %t by %.8s for %s", q.Kinds, q.Alone, t.Token, t.Lease)
	got, err := provider.ClaimTasks(p.ctx, p.tasks, q, t)
	p.fine("claim", err)
	due := p.m.due(q)
	if q.Alone {
		p.want("suspects claimed at once", len(got), min(1, len(due)))
		due = slices.DeleteFunc(due, func(id string) bool { return !slices.Contains(taskIDs(got), id) })
	}
	want := []string{}
	for _, id := range due {
		ok, timedOut, spent := p.m.take(id, q, t.Token, t.Lease)
		if !ok {
			continue
		}
		want = append(want, id)
		p.tokens[id] = append(p.tokens[id], t.Token)
		for _, task := range got {
			if task.ID == id {
				p.want("Spent of "+id, task.Spent, spent)
				if m := p.m.tasks[id]; !m.undo && !m.slots[m.waits].Filled() {
					p.want("TimedOut of "+id, task.TimedOut, timedOut)
				}
			}
		}
	}
	ids := taskIDs(got)
	slices.Sort(ids)
	p.want("claimed", ids, want)
}

// randomChange returns a change of a task under one of its claims, which may be over.
func (p *taskPlayer) randomChange() (c provider.TaskChange, ok bool) {
	id := p.known()
	tokens := p.tokens[id]
	if len(tokens) == 0 {
		return c, false
	}
	undo := p.m.tasks[id].undo
	token := tokens[len(tokens)-1]
	if p.r.IntN(6) == 0 {
		token = pick(p.r, tokens...)
	}
	after := pick(p.r, 0, 2*time.Hour, 5*time.Hour)
	slot, call := pick(p.r, "s", "t", "w", "x"), 1+p.r.IntN(5)
	switch p.r.IntN(11) {
	case 0, 1, 2:
		c = step(slot, call, pick(p.r, `null`, `1`, `{"a":[null]}`))
	case 3:
		c = wait(slot, call, after)
	case 4:
		c = provider.TaskChange{To: provider.TaskClaimed, After: 3 * time.Hour, Open: slot, Slots: map[string]provider.Slot{slot: {Call: call, Timeout: true}}, Progress: true}
	case 5:
		c = provider.TaskChange{To: provider.TaskFailed, After: after, Code: pick(p.r, "", "x", "y")}
	case 6:
		c = provider.TaskChange{To: provider.TaskPending, After: after}
	case 7:
		c = provider.TaskChange{To: provider.TaskAbandoned, Code: "x"}
	case 8:
		c = provider.TaskChange{To: provider.TaskClaimed, After: 3 * time.Hour, Slots: filled(slot, call, `"note"`)}
	case 9:
		if c = (provider.TaskChange{To: provider.TaskClaimed, After: 3 * time.Hour, GiveUp: "no", Doubt: p.r.IntN(2) == 0}); undo {
			c = provider.TaskChange{To: provider.TaskUndone}
		}
	default:
		c = provider.TaskChange{To: provider.TaskDone, Result: json.RawMessage(pick(p.r, `null`, `7`))}
	}
	if c.To == provider.TaskFailed || c.To == provider.TaskPending || c.To == provider.TaskAbandoned {
		c.Doubt = p.r.IntN(2) == 0
	}
	c.ID, c.Token = id, token
	return c, true
}

func (p *taskPlayer) change() {
	c, ok := p.randomChange()
	if !ok || p.m.tasks[c.ID].group != "" && c.To == provider.TaskDone {
		return // what ends a task of a group is a transaction
	}
	p.note("change %s", printedChange(c))
	got, err := p.tasks.ChangeTasks(p.ctx, []provider.TaskChange{c})
	p.fine("change", err)
	if err == nil {
		p.want("applied", got[0].Applied, p.m.change(c))
	}
}

// transaction plays some operations in a transaction, and commits or rolls back.
func (p *taskPlayer) transaction() {
	undo := errors.New("undo")
	m := p.m.clone()
	commit := p.r.IntN(4) > 0
	p.note("begin")
	err := p.inTask(p.ctx, func(v taskView) error {
		for range 1 + p.r.IntN(3) {
			p.txOp(v, m)
		}
		if !commit {
			return undo
		}
		return nil
	})
	if p.note("commit: %t", commit); commit {
		p.fine("commit", err)
		p.m = m
	}
}

func (p *taskPlayer) txOp(v taskView, m *taskModel) {
	id := p.anyTask()
	switch p.r.IntN(7) {
	case 0, 1:
		var ds []provider.TaskDraft
		for _, name := range []string{"a", "b", "c", "d"} {
			if p.r.IntN(2) == 0 {
				ds = append(ds, p.randomDraft(p.game+name))
			}
		}
		p.note("  enqueue %s", printed(ds))
		p.reused("enqueue", v.Enqueue(p.ctx, ds...), m.enqueue(ds))
	case 2:
		g := provider.TaskGroupDraft{ID: p.id(p.game + "g"), Kind: p.kind(p.game + "g"), Data: json.RawMessage(`1`)}
		for _, name := range []string{"g1", "g2", "g3"} {
			if p.r.IntN(12) > 0 {
				g.Tasks = append(g.Tasks, p.randomDraft(p.game+name))
			}
		}
		if p.note("  group of %s", printed(g.Tasks)); len(g.Tasks) > 0 {
			p.reused("enqueue a group", v.EnqueueGroup(p.ctx, g), m.enqueueGroup(g))
		}
	case 3:
		a := provider.TaskAnswer{Task: id, Name: pick(p.r, "w", "x", "s"), ID: pick(p.r, "m1", "m2"), Out: json.RawMessage(pick(p.r, `null`, `{"a":1}`))}
		p.note("  answer %s of %s by %s: %s", a.Name, a.Task, a.ID, a.Out)
		got, err := v.Answer(p.ctx, a)
		p.fine("answer", err)
		p.want("outcome", got, m.answer(a))
	case 4:
		p.note("  cancel %s", id)
		ok, err := v.Cancel(p.ctx, id)
		p.fine("cancel", err)
		p.want("canceled", ok, m.cancel(id))
	case 5:
		p.note("  postpone %s to the past", id)
		ok, err := v.Postpone(p.ctx, id, time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC))
		p.fine("postpone", err)
		p.want("postponed", ok, m.postpone(id, -never))
	default:
		c, ok := p.randomChange()
		if !ok {
			return
		}
		p.note("  change %s", printedChange(c))
		got, err := v.Change(p.ctx, c)
		p.fine("change", err)
		p.want("applied", got.Applied, m.change(c))
		if g := m.groups[m.tasks[c.ID].group]; g != nil && got.Applied && c.To == provider.TaskDone {
			p.want("group", got.Group != nil && got.Group.Open == g.open && got.Group.Total == g.total, true)
		} else {
			p.want("no group", got.Group == nil, true)
		}
	}
}

func (p *taskPlayer) randomDraft(name string) provider.TaskDraft {
	d := p.draftTask(name)
	if d.Kind = p.kind(p.game + "even"); strings.HasSuffix(name, "b") || strings.HasSuffix(name, "1") {
		d.Kind = p.kind(p.game + "odd")
	}
	if p.r.IntN(20) == 0 {
		d.Input = json.RawMessage(`"another"`)
	}
	d.After = pick(p.r, 0, 0, 0, 3*time.Hour)
	return d
}

func (p *taskPlayer) reused(what string, err error, fits bool) {
	if !fits && errors.Is(err, provider.ErrTaskIDReused) {
		return
	}
	p.fine(what, err)
	p.want(what+" accepted", err == nil, fits)
}

func (p *taskPlayer) renew() {
	id := p.known()
	if tokens := p.tokens[id]; len(tokens) > 0 {
		token := pick(p.r, tokens[max(0, len(tokens)-2):]...)
		p.note("renew %s by %.8s", id, token)
		late, err := p.tasks.RenewTasks(p.ctx, []provider.Task{{ID: id, Token: token}}, 5*time.Hour)
		p.fine("renew", err)
		p.want("late", len(late) > 0, p.m.renew(id, token, 5*time.Hour))
	}
}

// decide plays a decision of an operator.
func (p *taskPlayer) decide() {
	id := p.known()
	f := provider.TaskFilter{IDs: []string{id, p.known()}}
	switch p.r.IntN(4) {
	case 0:
		p.note("requeue %v", f.IDs)
		n, err := p.tasks.RequeueTasks(p.ctx, f, ann)
		p.fine("requeue", err)
		p.want("requeued", n, p.m.requeue(slices.Compact(f.IDs)))
	case 1:
		f.IDs = f.IDs[:1]
		p.note("cancel %v", f.IDs)
		n, err := p.tasks.CancelTasks(p.ctx, f, ann)
		p.fine("cancel", err)
		p.want("canceled", n == 1, p.m.cancel(id))
	case 2:
		p.note("complete %s", id)
		p.version("complete", p.tasks.CompleteTask(p.ctx, id, json.RawMessage(`"by hand"`), ann), p.m.complete(id, `"by hand"`))
	default:
		var version int64
		if t := p.m.tasks[id]; t != nil {
			version = t.version - int64(p.r.IntN(4)/3)
		}
		slot, out := pick(p.r, "s", "t", "w", "x"), pick(p.r, "", `5`)
		patch := fmt.Sprintf(`{%q:null}`, slot)
		if out != "" {
			patch = fmt.Sprintf(`{%q:{"out":%s}}`, slot, out)
		}
		p.note("patch %s at %d by %s", id, version, patch)
		p.version("patch", p.tasks.PatchTask(p.ctx, id, version, json.RawMessage(patch), ann), p.m.patch(id, version, slot, out))
	}
}

func (p *taskPlayer) version(what string, err error, fits bool) {
	if !fits && errors.Is(err, provider.ErrTaskVersion) {
		return
	}
	p.fine(what, err)
	p.want(what+" accepted", err == nil, fits)
}

// compare compares all tasks and groups with those of the model, and the trail of one task.
func (p *taskPlayer) compare() {
	ids := p.m.ids()
	if len(ids) == 0 {
		return
	}
	stored, err := p.tasks.Tasks(p.ctx, provider.TaskFilter{IDs: ids})
	p.fine("list", err)
	p.want("tasks", taskIDs(stored), ids)
	traced := pick(p.r, ids...)
	for _, t := range stored {
		trail := p.m.tasks[t.ID].trail
		if t.ID == traced {
			records, err := p.tasks.TaskTrail(p.ctx, t.ID)
			p.fine("trail", err)
			trail = nil
			for _, r := range records {
				trail = append(trail, strings.TrimSpace(r.What+" "+r.Detail))
			}
		}
		if diff := p.m.tasks[t.ID].differs(t, trail); diff != "" {
			p.faults = append(p.faults, t.ID+": "+diff)
		}
	}
	for id, want := range p.m.groups {
		g, ok, err := p.tasks.TaskGroup(p.ctx, id)
		p.fine("group", err)
		p.want("group "+id, fmt.Sprint(ok, g.Total, g.Open), fmt.Sprint(true, want.total, want.open))
	}
}
