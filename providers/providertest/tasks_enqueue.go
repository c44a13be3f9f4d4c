package providertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

var taskEnqueueCases = []testCase{
	{
		// Promise: T1.2
		name: "the same task again", play: taskAgain,
		rule: "A task is ignored if one with the same id, kind, input and group exists, whatever its status",
	},
	{
		// Promise: T1.2
		name: "an id that is used", play: taskIDReused,
		rule: "Another kind, input or group under a used id is ErrTaskIDReused; nothing of the call is added, and the transaction stays usable",
	},
	{
		// Promise: T1.2
		name: "inputs that are equal as JSON", play: taskSameInput,
		rule: "Inputs and data are compared as JSON values: the order of keys, spaces, escapes and the form of numbers do not count",
	},
	{
		// Promise: T1.2
		name: "the same group again", play: taskGroupAgain,
		rule: "EnqueueGroup is ignored if the group exists with the same kind, data and tasks, also after some are done",
	},
	{
		// Promise: T1.2
		name: "a group's id that is used", play: taskGroupReused,
		rule: "Another kind, other data or other tasks under a used id of a group is ErrTaskIDReused; nothing is added, and the transaction stays usable",
	},
	{
		name: "a task and a group's task under one id", play: taskGroupStrangers,
		rule: "A task of a group and a task of none, or of another group, under one id are ErrTaskIDReused",
	},
	{
		name: "invalid tasks", play: taskInvalidDrafts,
		rule: "An invalid draft is an *InvalidError, nothing of its call is added, and the transaction stays usable",
	},
	{
		name: "invalid groups", play: taskInvalidGroups,
		rule: "An invalid group is an *InvalidError, nothing of it is added, and the transaction stays usable",
	},
	{
		name: "tasks inherit", play: taskInherits,
		rule: "A task has the correlation id, the causation id and the traceparent of the metadata of ctx; they are no part of what identifies it",
	},
	{
		// Promise: T1.1
		name: "a rollback", play: taskEnqueueRollback,
		rule: "Tasks are added if the transaction commits, and only then",
	},
	{
		// Promise: T13.1
		name: "times of a task", play: taskTimes,
		rule: "A task is not claimed before After and At are over, on the store's clock; the times can be years ahead",
	},
	{
		name: "ids and inputs", play: taskKept,
		rule: "An id of up to 255 bytes of any text, and any JSON value as input, are kept",
	},
}

func taskAgain(s *stage) {
	d := s.draftTask("call")
	s.addTasks(d)
	s.ok(s.inTask(s.ctx, func(v taskView) error {
		s.ok(v.Enqueue(s.ctx), "enqueue nothing")
		for range 2 {
			s.ok(v.Enqueue(s.ctx, d, s.draftTask("other")), "enqueue again")
		}
		return v.add("after", 1)
	}), "commit")
	same(s, "total", s.total("after"), 1)
	same(s, "the other task", s.task("other").Status, provider.TaskPending)
	delayed := d
	delayed.After, delayed.At = time.Hour, s.taskClock().Add(lease)
	again := func(what string) {
		s.Helper()
		was := s.task("call")
		s.addTasks(d)
		s.addTasks(delayed)
		same(s, "the task that is "+what, s.task("call"), was)
	}
	again("pending")
	t := s.take("call")
	again("claimed")
	s.apply(t, wait("paid", 1, time.Hour))
	again("waiting")
	s.answerTask("call", "paid", "m1", `1`)
	t = s.take("call")
	s.apply(t, provider.TaskChange{To: provider.TaskAbandoned})
	again("abandoned")
	s.ok(s.tasks.CompleteTask(s.ctx, t.ID, json.RawMessage(`1`), ann), "complete")
	s.apply(s.take("call"), provider.TaskChange{To: provider.TaskDone, Result: json.RawMessage(`1`)})
	again("done")
	s.notDue("call")
}

func taskIDReused(s *stage) {
	s.addTasks(s.draftTask("call"))
	was := s.task("call")
	for name, change := range map[string]func(d *provider.TaskDraft){
		"another kind":  func(d *provider.TaskDraft) { d.Kind = s.kind("other") },
		"another input": func(d *provider.TaskDraft) { d.Input = json.RawMessage(`{"of":"other"}`) },
		"a null input":  func(d *provider.TaskDraft) { d.Input = json.RawMessage(`null`) },
	} {
		d := s.draftTask("call")
		change(&d)
		for _, ds := range [][]provider.TaskDraft{{d}, {s.draftTask("a"), d, s.draftTask("z")}} {
			s.ok(s.inTask(s.ctx, func(v taskView) error {
				err := v.Enqueue(s.ctx, ds...)
				s.require(errors.Is(err, provider.ErrTaskIDReused), "%s: the error %v is ErrTaskIDReused", name, err)
				return v.add("after "+name, 1)
			}), "commit after "+name)
		}
		same(s, "total", s.total("after "+name), 2)
		same(s, "the task", s.task("call"), was)
		s.noTask("a", "z")
	}
}

func taskSameInput(s *stage) {
	for i, pair := range [][2]string{
		{`{"a":1,"b":[2,3]}`, ` { "b" : [2, 3], "a":1 } `},
		{`"\u00e9\/"`, `"é/"`},
		{`{"é":"\u65e5\u672c"}`, `{"\u00e9":"日本"}`},
		{`[true,null,""]`, "[true,\n\tnull, \"\"]"},
		{`{"total":1.0,"rate":1.50}`, `{"rate":1.5,"total":1}`},
		{`[1E+2,-0,0.5e-1,9007199254740993]`, `[100,0.0,5e-2,9007199254740993.0]`},
	} {
		d := s.draftTask(fmt.Sprint("call", i))
		d.Input = json.RawMessage(pair[0])
		s.addTasks(d)
		was := s.task(fmt.Sprint("call", i))
		s.sameJSON("input", was.Input, pair[0])
		d.Input = json.RawMessage(pair[1])
		s.addTasks(d)
		same(s, "the task", s.task(fmt.Sprint("call", i)), was)

		g := s.group(fmt.Sprint("group", i), fmt.Sprint("member", i))
		g.Data, g.Tasks[0].Input = json.RawMessage(pair[0]), json.RawMessage(pair[0])
		s.addGroup(g)
		g.Data, g.Tasks[0].Input = json.RawMessage(pair[1]), json.RawMessage(pair[1])
		s.addGroup(g)
	}
	for i, pair := range [][2]string{{`1`, `"1"`}, {`[]`, `{}`}, {`null`, `"null"`}, {`[1,2]`, `[2,1]`}, {`{"a":null}`, `{}`}, {`0`, `false`}, {`"a"`, `"A"`}, {`" a"`, `"a"`}, {`9007199254740993`, `9007199254740992`}, {`1E+2`, `1`}} {
		d := s.draftTask(fmt.Sprint("differs", i))
		d.Input = json.RawMessage(pair[0])
		s.addTasks(d)
		d.Input = json.RawMessage(pair[1])
		err := s.inTask(s.ctx, func(v taskView) error { return v.Enqueue(s.ctx, d) })
		s.require(errors.Is(err, provider.ErrTaskIDReused), "%s after %s: the error %v is ErrTaskIDReused", pair[1], pair[0], err)
	}
}

func taskGroupAgain(s *stage) {
	g := s.group("g", "a", "b", "c")
	s.addGroup(g)
	again := func() {
		s.Helper()
		was := s.listTasks(provider.TaskFilter{Group: s.id("g")})
		before, _ := s.taskGroup("g")
		shuffled := g
		shuffled.Tasks = []provider.TaskDraft{g.Tasks[2], g.Tasks[0], g.Tasks[1]}
		shuffled.Data = json.RawMessage(` { "group" : "g" } `)
		s.addGroup(g)
		s.addGroup(shuffled)
		now, _ := s.taskGroup("g")
		same(s, "the group", now, before)
		same(s, "its tasks", s.listTasks(provider.TaskFilter{Group: s.id("g")}), was)
	}
	again()
	for _, name := range []string{"a", "b", "c"} {
		s.finish(s.take(name))
		again()
	}
	s.openTasks("g", 0)
	s.ok(s.inTask(s.ctx, func(v taskView) error {
		s.ok(v.EnqueueGroup(s.ctx, s.group("new", "n1", "n2")), "enqueue a group")
		return v.EnqueueGroup(s.ctx, s.group("new", "n1", "n2"))
	}), "commit")
	s.openTasks("new", 2)
}

func taskGroupReused(s *stage) {
	g := s.group("g", "a", "b")
	s.addGroup(g)
	before, _ := s.taskGroup("g")
	for name, change := range map[string]func(g *provider.TaskGroupDraft){
		"another kind":        func(g *provider.TaskGroupDraft) { g.Kind = s.kind("other") },
		"other data":          func(g *provider.TaskGroupDraft) { g.Data = json.RawMessage(`{"group":"x"}`) },
		"a task more":         func(g *provider.TaskGroupDraft) { g.Tasks = append(g.Tasks, s.draftTask("c")) },
		"a task less":         func(g *provider.TaskGroupDraft) { g.Tasks = g.Tasks[:1] },
		"another task":        func(g *provider.TaskGroupDraft) { g.Tasks[1] = s.draftTask("c") },
		"other tasks":         func(g *provider.TaskGroupDraft) { g.Tasks = []provider.TaskDraft{s.draftTask("c"), s.draftTask("d")} },
		"a task's other kind": func(g *provider.TaskGroupDraft) { g.Tasks[0].Kind = s.kind("other") },
		"other input":         func(g *provider.TaskGroupDraft) { g.Tasks[0].Input = json.RawMessage(`1`) },
	} {
		other := s.group("g", "a", "b")
		change(&other)
		s.ok(s.inTask(s.ctx, func(v taskView) error {
			err := v.EnqueueGroup(s.ctx, other)
			s.require(errors.Is(err, provider.ErrTaskIDReused), "%s: the error %v is ErrTaskIDReused", name, err)
			return v.add("after "+name, 1)
		}), "commit after "+name)
		same(s, "total", s.total("after "+name), 1)
		now, _ := s.taskGroup("g")
		same(s, "the group after "+name, now, before)
		same(s, "its tasks", taskIDs(s.listTasks(provider.TaskFilter{Group: s.id("g")})), s.ids("a", "b"))
		s.noTask("c", "d")
	}
}

func taskGroupStrangers(s *stage) {
	s.addTasks(s.draftTask("alone"))
	s.addGroup(s.group("g", "a"))
	for name, enqueue := range map[string]func(v taskView) error{
		"a task under the id of a group's task":    func(v taskView) error { return v.Enqueue(s.ctx, s.draftTask("a")) },
		"a group with the id of a task":            func(v taskView) error { return v.EnqueueGroup(s.ctx, s.group("h", "new", "alone")) },
		"a group with the id of a task of another": func(v taskView) error { return v.EnqueueGroup(s.ctx, s.group("h", "a", "new")) },
	} {
		s.ok(s.inTask(s.ctx, func(v taskView) error {
			err := enqueue(v)
			s.require(errors.Is(err, provider.ErrTaskIDReused), "%s: the error %v is ErrTaskIDReused", name, err)
			return v.add("after "+name, 1)
		}), "commit after "+name)
		same(s, "total", s.total("after "+name), 1)
		_, ok := s.taskGroup("h")
		same(s, "a group that can never be complete exists after "+name, ok, false)
		s.noTask("new")
	}
	same(s, "groups of the tasks", []string{s.task("alone").Group, s.task("a").Group}, []string{"", s.id("g")})
	s.addTasks(provider.TaskDraft{ID: s.id("g"), Kind: s.kind("x"), Input: json.RawMessage(`1`)}) // ids of groups are their own
	s.openTasks("g", 1)
}

// badTasks are changes that make a draft invalid.
var badTasks = map[string]func(d *provider.TaskDraft){
	"no id":            func(d *provider.TaskDraft) { d.ID = "" },
	"a long id":        func(d *provider.TaskDraft) { d.ID = strings.Repeat("x", 256) },
	"an id with NUL":   func(d *provider.TaskDraft) { d.ID = "a\x00" },
	"an id with CR":    func(d *provider.TaskDraft) { d.ID = "a\r" },
	"an id not UTF-8":  func(d *provider.TaskDraft) { d.ID = replacement },
	"no kind":          func(d *provider.TaskDraft) { d.Kind = "" },
	"no domain":        func(d *provider.TaskDraft) { d.Kind = "fulfil" },
	"SQL in a kind":    func(d *provider.TaskDraft) { d.Kind = "orders/x';--" },
	"no input":         func(d *provider.TaskDraft) { d.Input = nil },
	"no JSON":          func(d *provider.TaskDraft) { d.Input = json.RawMessage(`{`) },
	"a NUL":            func(d *provider.TaskDraft) { d.Input = json.RawMessage(`"\u0000"`) },
	"a lone surrogate": func(d *provider.TaskDraft) { d.Input = json.RawMessage(`"\ud800"`) },
	"a large number":   func(d *provider.TaskDraft) { d.Input = json.RawMessage(`1e131072`) },
	"one key twice":    func(d *provider.TaskDraft) { d.Input = json.RawMessage(`{"a":1,"a":2}`) },
	"a deep input": func(d *provider.TaskDraft) {
		d.Input = json.RawMessage(strings.Repeat("[", 1001) + strings.Repeat("]", 1001))
	},
	"a large input": func(d *provider.TaskDraft) {
		d.Input = json.RawMessage(`"` + strings.Repeat("x", provider.MaxTaskState-1) + `"`)
	},
	"a negative delay":  func(d *provider.TaskDraft) { d.After = -1 },
	"a year past 9999":  func(d *provider.TaskDraft) { d.At = year(10_000) },
	"a year before 1":   func(d *provider.TaskDraft) { d.At = year(-5000) },
	"the year 300000":   func(d *provider.TaskDraft) { d.At = year(300_000) },
	"input not encoded": func(d *provider.TaskDraft) { d.Err = errors.New("json: unsupported value: NaN") },
}

func taskInvalidDrafts(s *stage) {
	for name, change := range badTasks {
		bad := s.draftTask("bad")
		change(&bad)
		good := s.draftTasks("good", "good "+name)[0]
		s.ok(s.inTask(s.ctx, func(v taskView) error {
			s.invalid(v.Enqueue(s.ctx, bad), name)
			s.invalid(v.Enqueue(s.ctx, s.draftTask("next"), bad), name+" next to a good one")
			return v.Enqueue(s.ctx, good)
		}), "commit after "+name)
		same(s, "the task added after "+name, s.task("good "+name).Status, provider.TaskPending)
	}
	s.ok(s.inTask(s.ctx, func(v taskView) error {
		s.invalid(v.Enqueue(s.ctx, s.draftTask("next"), s.draftTask("next")), "one id twice")
		return nil
	}), "commit")
	s.noTask("bad", "next")
}

func taskInvalidGroups(s *stage) {
	bad := map[string]func(g *provider.TaskGroupDraft){
		"no tasks":         func(g *provider.TaskGroupDraft) { g.Tasks = nil },
		"one task twice":   func(g *provider.TaskGroupDraft) { g.Tasks = append(g.Tasks, g.Tasks[0]) },
		"no group id":      func(g *provider.TaskGroupDraft) { g.ID = "" },
		"a long group id":  func(g *provider.TaskGroupDraft) { g.ID = strings.Repeat("x", 256) },
		"a group's NUL":    func(g *provider.TaskGroupDraft) { g.ID = "\x00" },
		"no group kind":    func(g *provider.TaskGroupDraft) { g.Kind = "" },
		"a bad group kind": func(g *provider.TaskGroupDraft) { g.Kind = "A/b" },
		"no data":          func(g *provider.TaskGroupDraft) { g.Data = nil },
		"data of no JSON":  func(g *provider.TaskGroupDraft) { g.Data = json.RawMessage(`{]`) },
		"data with NUL":    func(g *provider.TaskGroupDraft) { g.Data = json.RawMessage(`["\u0000"]`) },
		"data not encoded": func(g *provider.TaskGroupDraft) { g.Err = errors.New("json: unsupported value: NaN") },
	}
	for name, change := range badTasks {
		bad["a task with "+name] = func(g *provider.TaskGroupDraft) { change(&g.Tasks[1]) }
	}
	for name, change := range bad {
		g := s.group("g", "a", "b")
		change(&g)
		s.ok(s.inTask(s.ctx, func(v taskView) error {
			s.invalid(v.EnqueueGroup(s.ctx, g), name)
			return v.add("after "+name, 1)
		}), "commit after "+name)
		same(s, "total", s.total("after "+name), 1)
	}
	_, ok := s.taskGroup("g")
	same(s, "group", ok, false)
	s.noTask("a", "b")
	s.addGroup(s.group("g", "a", "b"))
}

func taskEnqueueRollback(s *stage) {
	undo := errors.New("undo")
	err := s.inTask(s.ctx, func(v taskView) error {
		s.ok(v.Enqueue(s.ctx, s.draftTask("a")), "enqueue")
		s.ok(v.EnqueueGroup(s.ctx, s.group("g", "b")), "enqueue a group")
		_, err := v.Answer(s.ctx, provider.TaskAnswer{Task: s.id("a"), Name: "paid", ID: "m1", Out: json.RawMessage(`1`)})
		s.ok(err, "answer")
		s.notDue("a", "b")
		return undo
	})
	s.require(errors.Is(err, undo), "the error %v is that of the function", err)
	s.noTask("a", "b")
	same(s, "records", len(s.records("a")), 0)
	s.notDue("a", "b")
	other := s.draftTask("a") // the id is free
	other.Kind = s.kind("b")
	s.addTasks(other)
	same(s, "claimed", s.claimedIDs(s.query("b"), 10), s.ids("a"))
}

func taskTimes(s *stage) {
	now := s.taskClock()
	for name, d := range map[string]provider.TaskDraft{
		"after":   s.draftTask("after").Later(2 * time.Hour),
		"at":      s.draftTask("at").Due(now.Add(2 * time.Hour)),
		"later":   s.draftTask("later").Later(time.Hour).Due(now.Add(2 * time.Hour)),
		"longer":  s.draftTask("longer").Later(2 * time.Hour).Due(now.Add(time.Hour)),
		"zone":    s.draftTask("zone").Due(now.Add(2 * time.Hour).In(time.FixedZone("x", 9*3600))),
		"past":    s.draftTask("past").Due(time.Date(1, 1, 1, 0, 0, 1, 0, time.UTC)),
		"long":    s.draftTask("long").Later(90 * 24 * time.Hour),
		"years":   s.draftTask("years").Due(time.Date(9000, 1, 2, 3, 4, 5, 0, time.UTC)),
		"exact":   s.draftTask("exact").Due(time.Date(9000, 1, 2, 3, 4, 5, 1, time.UTC)),
		"longest": s.draftTask("longest").Later(math.MaxInt64),
	} {
		s.addTasks(d)
		s.sameJSON("input", s.task(name).Input, `{"of":"`+name+`"}`)
	}
	same(s, "NextAt of the year 9000", s.task("years").NextAt, time.Date(9000, 1, 2, 3, 4, 5, 0, time.UTC))
	s.require(s.task("exact").NextAt.After(s.task("years").NextAt), "NextAt is rounded up")
	s.take("past")
	late := []string{"long", "years", "exact", "longest"}
	s.notDue(append(late, "after", "at", "later", "longer", "zone")...)
	s.advance(90 * time.Minute)
	s.notDue(append(late, "after", "at", "later", "longer", "zone")...)
	s.advance(time.Hour)
	for _, name := range []string{"after", "at", "later", "longer", "zone"} {
		s.take(name)
	}
	s.notDue(late...)
	s.advance(89 * 24 * time.Hour)
	s.notDue(late...)
	s.advance(24 * time.Hour)
	s.take("long")
	s.notDue("years", "exact", "longest")
}

func taskKept(s *stage) {
	for i, id := range []string{"x", strings.Repeat("x", 255), "o'hara \"日本\"; -- %_\\", strings.Repeat("é", 127) + "y", "A", "a", "a ", " a", "../a?b#c&d"} {
		d := provider.TaskDraft{ID: id, Kind: s.name + "/" + strings.Repeat("k", i+1), Input: json.RawMessage(`{"n":1e2,"m":-0.5,"big":123456789012345678901234567890,"s":"\u00e9'\"\\"}`)}
		s.addTasks(d)
		s.addTasks(d)
		taken := s.claimAll(provider.TaskQuery{Kinds: []string{d.Kind}}, 10)
		same(s, "id", taskIDs(taken), []string{id})
		s.sameJSON("input", taken[0].Input, string(d.Input))
		got := s.try(taken[0], provider.TaskChange{To: provider.TaskDone})
		same(s, "applied", got.Applied, true)
	}
	kind := strings.Repeat("k", 41)
	d := provider.TaskDraft{ID: s.id("kind"), Kind: kind + "/" + kind, Input: json.RawMessage(`1`)}
	s.addTasks(d)
	same(s, "id of the task with the longest kind", taskIDs(s.claimAll(provider.TaskQuery{Kinds: []string{d.Kind}}, 10)), []string{d.ID})
}

func taskInherits(s *stage) {
	ctx := eventstore.WithMetadata(s.ctx, caused)
	s.ok(s.inTask(ctx, func(v taskView) error {
		s.ok(v.Enqueue(ctx, s.draftTask("one")), "enqueue")
		s.ok(v.Enqueue(ctx, s.draftTask("two"), s.draftTask("three")), "enqueue two")
		s.ok(v.Enqueue(s.ctx, s.draftTask("one")), "enqueue again without metadata")
		return v.EnqueueGroup(ctx, s.group("group", "four"))
	}), "commit")
	s.addTasks(s.draftTask("none"))
	want := eventstore.Metadata{CorrelationID: "c-1", CausationID: "e-1", Traceparent: "00-1"}
	for _, name := range []string{"one", "two", "three", "four"} {
		same(s, "metadata of "+name, s.task(name).Metadata, want)
		same(s, "metadata of "+name+" when it is claimed", s.take(name).Metadata, want)
	}
	same(s, "metadata without a cause", s.task("none").Metadata, eventstore.Metadata{})
}
