package provider_test

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

const notUTF8 = "a\xff"

var longText = strings.Repeat("x", provider.MaxIDBytes+1)

// requireField requires an *eventstore.InvalidError of this field.
func requireField(t *testing.T, err error, field, name string) {
	t.Helper()
	var invalid *eventstore.InvalidError
	require.ErrorAs(t, err, &invalid, name)
	require.Equal(t, field, invalid.Field, name)
	require.NotEmpty(t, invalid.Reason, name)
}

func taskDraft() provider.TaskDraft {
	return provider.TaskDraft{ID: "order-1", Kind: "orders/fulfil", Input: json.RawMessage(`{"n":1}`)}
}

func TestCheckTaskDrafts(t *testing.T) {
	t.Parallel()
	longest := taskDraft()
	longest.ID, longest.Kind = strings.Repeat("x", 255), strings.Repeat("k", 41)+"/"+strings.Repeat("k", 41)
	longest.Input = json.RawMessage(`"` + strings.Repeat("x", provider.MaxTaskState-2) + `"`)
	require.NoError(t, provider.CheckTaskDrafts([]provider.TaskDraft{taskDraft(), longest}))
	require.NoError(t, provider.CheckTaskDrafts(nil))
	require.NoError(t, provider.CheckTaskDrafts([]provider.TaskDraft{taskDraft().Later(math.MaxInt64).Due(time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC))}))
	for name, c := range map[string]struct {
		field  string
		change func(d *provider.TaskDraft)
	}{
		"no id":            {"id", func(d *provider.TaskDraft) { d.ID = "" }},
		"a long id":        {"id", func(d *provider.TaskDraft) { d.ID = longText }},
		"an id with NUL":   {"id", func(d *provider.TaskDraft) { d.ID = "a\x00" }},
		"an id not UTF-8":  {"id", func(d *provider.TaskDraft) { d.ID = notUTF8 }},
		"the same id":      {"id", func(d *provider.TaskDraft) { d.ID = "first" }},
		"no kind":          {"kind", func(d *provider.TaskDraft) { d.Kind = "" }},
		"no domain":        {"kind", func(d *provider.TaskDraft) { d.Kind = "fulfil" }},
		"no input":         {"input", func(d *provider.TaskDraft) { d.Input = nil }},
		"no JSON":          {"input", func(d *provider.TaskDraft) { d.Input = json.RawMessage(`{`) }},
		"a large input":    {"input", func(d *provider.TaskDraft) { d.Input = append(longest.Input, ' ') }},
		"a NUL":            {"input", func(d *provider.TaskDraft) { d.Input = json.RawMessage(`"\u0000"`) }},
		"not encoded":      {"input", func(d *provider.TaskDraft) { d.Err = errors.New("unsupported value: NaN") }},
		"a negative delay": {"after", func(d *provider.TaskDraft) { d.After = -1 }},
		"a far time":       {"at", func(d *provider.TaskDraft) { d.At = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC) }},
		"an early time":    {"at", func(d *provider.TaskDraft) { d.At = time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC) }},
	} {
		first, bad := taskDraft(), taskDraft()
		first.ID = "first"
		c.change(&bad)
		requireField(t, provider.CheckTaskDrafts([]provider.TaskDraft{first, bad}), "tasks[1]."+c.field, name)
		g := provider.TaskGroupDraft{ID: "g", Kind: "orders/all", Data: json.RawMessage(`1`), Tasks: []provider.TaskDraft{first, bad}}
		requireField(t, provider.CheckTaskGroup(g), "tasks[1]."+c.field, name)
	}
}

func TestDelaysOfADraft(t *testing.T) {
	t.Parallel()
	at := time.Date(2031, 2, 3, 4, 5, 6, 0, time.UTC)
	d := taskDraft()
	require.Equal(t, provider.TaskDraft{ID: d.ID, Kind: d.Kind, Input: d.Input, After: time.Hour, At: at}, d.Later(time.Hour).Due(at))
	require.Equal(t, taskDraft(), d, "the draft itself stays")
}

func TestCheckTaskGroup(t *testing.T) {
	t.Parallel()
	good := func() provider.TaskGroupDraft {
		return provider.TaskGroupDraft{ID: "g", Kind: "orders/all", Data: json.RawMessage(`null`), Tasks: []provider.TaskDraft{taskDraft()}}
	}
	require.NoError(t, provider.CheckTaskGroup(good()))
	for name, c := range map[string]struct {
		field  string
		change func(g *provider.TaskGroupDraft)
	}{
		"no id":         {"group.id", func(g *provider.TaskGroupDraft) { g.ID = "" }},
		"a long id":     {"group.id", func(g *provider.TaskGroupDraft) { g.ID = longText }},
		"a bad id":      {"group.id", func(g *provider.TaskGroupDraft) { g.ID = notUTF8 }},
		"no kind":       {"group.kind", func(g *provider.TaskGroupDraft) { g.Kind = "" }},
		"no domain":     {"group.kind", func(g *provider.TaskGroupDraft) { g.Kind = "all" }},
		"no data":       {"group.data", func(g *provider.TaskGroupDraft) { g.Data = nil }},
		"no JSON":       {"group.data", func(g *provider.TaskGroupDraft) { g.Data = json.RawMessage(`]`) }},
		"not encoded":   {"group.data", func(g *provider.TaskGroupDraft) { g.Err = errors.New("unsupported value: NaN") }},
		"no tasks":      {"group.tasks", func(g *provider.TaskGroupDraft) { g.Tasks = nil }},
		"a task twice":  {"tasks[1].id", func(g *provider.TaskGroupDraft) { g.Tasks = append(g.Tasks, g.Tasks[0]) }},
		"a task's kind": {"tasks[0].kind", func(g *provider.TaskGroupDraft) { g.Tasks[0].Kind = "" }},
	} {
		g := good()
		c.change(&g)
		requireField(t, provider.CheckTaskGroup(g), c.field, name)
	}
}

func TestCheckTaskAnswer(t *testing.T) {
	t.Parallel()
	good := provider.TaskAnswer{Task: "order-1", Name: "paid", ID: "m1", Out: json.RawMessage(`null`)}
	require.NoError(t, provider.CheckTaskAnswer(good))
	for name, c := range map[string]struct {
		field  string
		change func(a *provider.TaskAnswer)
	}{
		"no task":        {"answer.task", func(a *provider.TaskAnswer) { a.Task = "" }},
		"a long task":    {"answer.task", func(a *provider.TaskAnswer) { a.Task = longText }},
		"no name":        {"answer.name", func(a *provider.TaskAnswer) { a.Name = "" }},
		"a bad name":     {"answer.name", func(a *provider.TaskAnswer) { a.Name = "x y" }},
		"an undo":        {"answer.name", func(a *provider.TaskAnswer) { a.Name = provider.UndoSlot("paid") }},
		"no id":          {"answer.id", func(a *provider.TaskAnswer) { a.ID = "" }},
		"an id with NUL": {"answer.id", func(a *provider.TaskAnswer) { a.ID = "\x00" }},
		"no answer":      {"answer.out", func(a *provider.TaskAnswer) { a.Out = nil }},
		"no JSON":        {"answer.out", func(a *provider.TaskAnswer) { a.Out = json.RawMessage(`{`) }},
		"a NUL":          {"answer.out", func(a *provider.TaskAnswer) { a.Out = json.RawMessage(`"\u0000"`) }},
		"a lone half":    {"answer.out", func(a *provider.TaskAnswer) { a.Out = json.RawMessage(`"\ud800"`) }},
		"a large number": {"answer.out", func(a *provider.TaskAnswer) { a.Out = json.RawMessage(`1e131072`) }},
		"a large answer": {"answer.out", func(a *provider.TaskAnswer) {
			a.Out = json.RawMessage(strings.Repeat(" ", provider.MaxTaskState) + "1")
		}},
		"several answers": {"answer.out", func(a *provider.TaskAnswer) { a.Out = json.RawMessage(`1 2`) }},
	} {
		a := good
		c.change(&a)
		requireField(t, provider.CheckTaskAnswer(a), c.field, name)
	}
}

func TestCheckPostpone(t *testing.T) {
	t.Parallel()
	at := time.Date(9999, 12, 31, 23, 0, 0, 0, time.UTC)
	require.NoError(t, provider.CheckPostpone("order-1", at))
	requireField(t, provider.CheckPostpone("order-1", time.Time{}), "at", "zero")
	requireField(t, provider.CheckPostpone("order-1", at.Add(2*time.Hour)), "at", "far")
	requireField(t, provider.CheckPostpone(longText, at), "task id", "a long id")
	requireField(t, provider.CheckPostpone("\x00", at), "task id", "NUL")
}

func TestCheckTaskChanges(t *testing.T) {
	t.Parallel()
	for _, to := range provider.TaskStatuses() {
		require.NoError(t, provider.CheckTaskChanges([]provider.TaskChange{{ID: "a", To: to, Open: "paid", After: time.Hour}}), to)
	}
	require.NoError(t, provider.CheckTaskChanges(nil))
	require.NoError(t, provider.CheckTaskChanges([]provider.TaskChange{{ID: "a", To: provider.TaskWaiting, Open: "paid", After: -1}}), "a wait without end")
	require.NoError(t, provider.CheckTaskChanges([]provider.TaskChange{{ID: longText, To: provider.TaskDone}}), "another program added it")
	for name, c := range map[string]struct {
		field string
		c     provider.TaskChange
	}{
		"no status":       {"to", provider.TaskChange{}},
		"another status":  {"to", provider.TaskChange{To: "parked"}},
		"a wait for none": {"open", provider.TaskChange{To: provider.TaskWaiting}},
		"negative":        {"after", provider.TaskChange{To: provider.TaskFailed, After: -1}},
		"an id with NUL":  {"id", provider.TaskChange{To: provider.TaskDone, ID: "\x00"}},
		"a long code":     {"code", provider.TaskChange{To: provider.TaskFailed, Code: longText}},
		"a code with NUL": {"code", provider.TaskChange{To: provider.TaskFailed, Code: "\x00"}},
		"why not UTF-8":   {"give_up", provider.TaskChange{To: provider.TaskClaimed, GiveUp: notUTF8}},
	} {
		good := provider.TaskChange{ID: "a", To: provider.TaskDone}
		requireField(t, provider.CheckTaskChanges([]provider.TaskChange{good, c.c}), "changes[1]."+c.field, name)
	}
}

func TestCheckTaskFilter(t *testing.T) {
	t.Parallel()
	d := provider.Decision{By: "ann", Reason: "fixed"}
	require.NoError(t, provider.CheckTaskDecision(provider.TaskFilter{}, d))
	for field, f := range map[string]provider.TaskFilter{
		"filter.limit":      {Limit: -1},
		"filter.ids":        {IDs: []string{"a", longText}},
		"filter.kind":       {Kind: "\x00"},
		"filter.group":      {Group: notUTF8},
		"filter.group_kind": {GroupKind: longText},
		"filter.status":     {Status: []provider.TaskStatus{provider.TaskDone, "\x00"}},
		"filter.code":       {Code: longText},
		"filter.after":      {After: "\x00"},
	} {
		requireField(t, provider.CheckTaskFilter(f), field, field)
		requireField(t, provider.CheckTaskDecision(f, d), field, field)
	}
	for name, d := range map[string]provider.Decision{
		"none": {}, "no one": {Reason: "fixed"}, "no reason": {By: "ann"}, "a long name": {By: longText, Reason: "fixed"},
		"a long reason": {By: "ann", Reason: strings.Repeat("x", 1001)}, "a NUL": {By: "\x00", Reason: "fixed"}, "not UTF-8": {By: "ann", Reason: notUTF8},
	} {
		require.ErrorIs(t, provider.CheckTaskDecision(provider.TaskFilter{}, d), provider.ErrInput, name)
	}
}

func TestCheckTaskResult(t *testing.T) {
	t.Parallel()
	require.NoError(t, provider.CheckTaskResult(json.RawMessage(`null`)))
	requireField(t, provider.CheckTaskResult(nil), "result", "none")
	requireField(t, provider.CheckTaskResult(json.RawMessage(`"\u0000"`)), "result", "NUL")
}

func TestKindsAndSlots(t *testing.T) {
	t.Parallel()
	part := strings.Repeat("k", 41)
	for _, kind := range []string{"a/b", "orders/ful_fil-2", part + "/" + part} {
		require.NoError(t, provider.CheckKind("kind", kind), kind)
	}
	for _, kind := range []string{"", "/", "a", "a/", "/b", "A/b", "a/B", "1/b", "a/1", "a/b/c", "a b/c", "a/b;", "a/é", "a/b\n", part + "k/b", "a/" + part + "k"} {
		requireField(t, provider.CheckKind("kind", kind), "kind", kind)
	}
	long := "x" + strings.Repeat("y", 60)
	for _, slot := range []string{"a", "charge_card-2", long} {
		require.NoError(t, provider.CheckSlot("slot", slot), slot)
	}
	for _, slot := range []string{"", "A", "1", "-a", "a b", "undo:a", "a.b", "a\n", long + "z"} {
		requireField(t, provider.CheckSlot("slot", slot), "slot", slot)
	}
	require.Equal(t, "undo:charge", provider.UndoSlot("charge"))
}

func TestTaskRetentionDefaults(t *testing.T) {
	t.Parallel()
	r, err := provider.TaskRetention{}.WithDefaults()
	require.NoError(t, err)
	require.Equal(t, provider.TaskRetention{Done: 7 * 24 * time.Hour, Undone: 30 * 24 * time.Hour}, r)
	r, err = provider.TaskRetention{Done: 1, Undone: 2}.WithDefaults()
	require.NoError(t, err)
	require.Equal(t, provider.TaskRetention{Done: 1, Undone: 2}, r)
	for _, r := range []provider.TaskRetention{{Done: -1}, {Undone: -1}} {
		_, err := r.WithDefaults()
		require.ErrorIs(t, err, claim.ErrTerms)
	}
}

func TestTaskStatuses(t *testing.T) {
	t.Parallel()
	counts := provider.ZeroTaskCounts()
	require.Len(t, counts, len(provider.TaskStatuses()))
	for _, s := range provider.TaskStatuses() {
		require.Contains(t, counts, s)
		require.Equal(t, s == provider.TaskDone || s == provider.TaskUndone, s.Final(), s)
		require.Equal(t, !s.Final() && s != provider.TaskAbandoned, s.Open(), s)
	}
}

func TestLateChange(t *testing.T) {
	t.Parallel()
	mine, other := claim.NewToken(), claim.NewToken()
	now := func(s provider.TaskStatus, token claim.Token) provider.Task {
		return provider.Task{Status: s, Token: token}
	}
	require.False(t, provider.TaskChanged{Applied: true}.Late(mine))
	require.False(t, provider.TaskChanged{Now: now(provider.TaskClaimed, mine)}.Late(mine), "refused for another reason")
	require.True(t, provider.TaskChanged{Now: now(provider.TaskClaimed, other)}.Late(mine))
	require.True(t, provider.TaskChanged{Now: now(provider.TaskFailed, mine)}.Late(mine))
	require.True(t, provider.TaskChanged{}.Late(mine), "no such task")
}

// claimStub records the terms of claims.
type claimStub struct {
	provider.Tasks
	terms []claim.Terms
}

func (s *claimStub) ClaimTasks(_ context.Context, _ provider.TaskQuery, t claim.Terms) ([]provider.Task, error) {
	s.terms = append(s.terms, t)
	return nil, nil
}

func TestClaimTasks(t *testing.T) {
	t.Parallel()
	s := &claimStub{}
	for _, q := range []provider.TaskQuery{{}, {Alone: true}} {
		_, err := provider.ClaimTasks(t.Context(), s, q, claim.Terms{Limit: 7})
		require.NoError(t, err)
	}
	require.Equal(t, []int{7, 1}, []int{s.terms[0].Limit, s.terms[1].Limit}, "a suspect is claimed alone")
	require.Positive(t, s.terms[0].Lease, "the default")
	require.NotEqual(t, claim.Token{}, s.terms[0].Token)
	for _, terms := range []claim.Terms{{Lease: 1}, {Limit: -1}} {
		_, err := provider.ClaimTasks(t.Context(), s, provider.TaskQuery{}, terms)
		require.ErrorIs(t, err, claim.ErrTerms)
	}
	require.Len(t, s.terms, 2)
}
