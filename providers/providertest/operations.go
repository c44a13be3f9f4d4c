package providertest

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
)

var registryCases = []testCase{
	{name: "reports", play: reports, rule: "Report records that a service is alive until lease from now. A lease of zero records a clean end: the row is deleted"},
	{name: "forgotten services", play: forgottenServices, rule: "Rows of other services are deleted when their leases ended longer than ReportKept ago"},
	{name: "skew", play: skew, rule: "Skew: how far the clock of the service was ahead of the store's when the report arrived"},
	// Promise: O1.1
	{name: "pauses", play: pauses, rule: "SetPause pauses or resumes. It returns false, and changes nothing, if that is so already. It adds an Act, which is done"},
	// Promise: O1.1
	{name: "pauses at once", play: pausesAtOnce, rule: "Of concurrent calls of SetPause, one returns true"},
	{name: "refused pauses", play: refusedPauses, rule: "ErrInput: p has no valid Kind, no name, or an invalid Decision"},
}

var actCases = []testCase{
	{name: "add and list", play: addActs, rule: "Acts returns the acts that f selects, the newest first"},
	// Promise: O2.1
	{name: "taken once", play: takeActs, rule: "TakeAct takes a requested act, or a running one whose lease ended"},
	// Promise: O2.1
	{name: "taken at once", play: takeActsAtOnce, rule: "A requested act is taken by one service"},
	// Promise: O2.1
	{name: "changed by its holder", play: changeActs, rule: "ChangeAct returns false, and changes nothing, if the holder does not have the act any more"},
	{name: "canceled", play: cancelActs, rule: "CancelAct cancels a requested or running act. It returns false if it is over"},
	{name: "refused", play: refusedActs, rule: "ErrInput: a has no Verb, another state than requested and done, or an invalid Decision; or Detail is not JSON, or too long"},
	{name: "forgotten", play: forgottenActs, rule: "AddAct deletes acts that ended longer than ActsKept ago"},
}

var streamCases = []testCase{
	{name: "streams", play: listStreams, rule: "Streams lists streams in order of their ids"},
}

var surveyCases = []testCase{
	{name: "survey of an empty store", play: emptySurvey, rule: "Survey returns what is stored"},
	{name: "survey", play: survey, rule: "Survey returns what is stored, as far as limit rows of each kind show it"},
}

func (s *stage) operations() provider.Operations {
	s.Helper()
	o := provider.OperationsOf(s.store)
	s.require(o != nil, "the provider has provider.Operations")
	return o
}

func (s *stage) services() []provider.ServiceReport {
	s.Helper()
	all, err := s.operations().Survey(s.ctx, 1000)
	s.ok(err, "survey")
	return slices.DeleteFunc(all.Services, func(r provider.ServiceReport) bool { return !strings.HasPrefix(r.ID, s.name) })
}

func (s *stage) report(id string, lease time.Duration) {
	s.Helper()
	r := provider.ServiceReport{ID: s.name + id, Kind: "runner", Holder: "h'" + id, Process: "host/1", Version: "v1", Can: []provider.Capability{{Projector: "a", Version: 2, Has: []string{"event b 1"}}},
		Kinds: []string{"a/b", "a/c"}, Outages: []provider.Outage{{Topic: "t", Class: "refused", Until: time.Unix(77, 0).UTC()}, {Projector: "p", Handler: "h", Class: "unknown", Code: "08001", Until: time.Unix(78, 0).UTC()}}, Clock: time.Now()}
	s.ok(s.operations().Report(s.ctx, r, lease), "report")
}

func reports(s *stage) {
	s.report("1", time.Hour)
	s.advance(10 * time.Minute)
	s.report("1", time.Hour)
	s.report("2", time.Hour)
	all := s.services()
	same(s, "number of services", len(all), 2)
	r := all[0]
	same(s, "report", []any{r.ID, r.Kind, r.Holder, r.Process, r.Version, r.Can, r.Kinds, r.Outages}, []any{s.name + "1", "runner", "h'1", "host/1", "v1", []provider.Capability{{Projector: "a", Version: 2, Has: []string{"event b 1"}}}, []string{"a/b", "a/c"},
		[]provider.Outage{{Topic: "t", Class: "refused", Until: time.Unix(77, 0).UTC()}, {Projector: "p", Handler: "h", Class: "unknown", Code: "08001", Until: time.Unix(78, 0).UTC()}}})
	up, left := r.SeenAt.Sub(r.StartedAt), r.ExpiresAt.Sub(r.SeenAt)
	s.require(up > 9*time.Minute && up < 10*time.Minute+patience.Limit(), "it started at %v, ten minutes before %v", r.StartedAt, r.SeenAt)
	s.require(left > 59*time.Minute && left < 61*time.Minute, "its lease ends at %v, an hour after %v", r.ExpiresAt, r.SeenAt)
	alive := func(after time.Duration) (ids []string) {
		s.advance(after)
		all, err := s.operations().Services(s.ctx)
		s.ok(err, "list services")
		for _, r := range all {
			if strings.HasPrefix(r.ID, s.name) {
				ids = append(ids, strings.TrimPrefix(r.ID, s.name))
			}
		}
		slices.Sort(ids)
		return ids
	}
	same(s, "alive", alive(0), []string{"1", "2"})
	s.report("1", 0)
	same(s, "after a clean end", len(s.services()), 1)
	same(s, "alive after a clean end", alive(0), []string{"2"})
	same(s, "alive after the lease", alive(2*time.Hour), nil)
	s.report("1", 0) // again
	s.report("2", 0)
}

func forgottenServices(s *stage) {
	s.report("1", time.Minute)
	s.advance(30 * time.Minute)
	s.report("2", time.Minute)
	same(s, "an ended service is kept", len(s.services()), 2)
	s.advance(provider.ReportKept)
	s.report("3", time.Minute)
	same(s, "after ReportKept", len(s.services()), 2)
	s.advance(2 * provider.ReportKept)
	s.report("3", time.Minute) // its own row is not one of others
	same(s, "after another ReportKept", len(s.services()), 1)
}

func skew(s *stage) {
	for _, ahead := range []time.Duration{-time.Hour, 0, 48 * time.Hour} { // of the store's clock
		s.ok(s.operations().Report(s.ctx, provider.ServiceReport{ID: s.name, Kind: "relay", Clock: s.survey(1).Now.Add(ahead)}, time.Hour), "report")
		got := s.services()[0].Skew
		s.require((got-ahead).Abs() < patience.Limit(), "the skew is %v, %v", got, ahead)
	}
}

var decided = provider.Decision{By: "an'n", Reason: `it is "so" \ 日本`}

func (s *stage) acts(f provider.ActFilter) []provider.Act {
	s.Helper()
	all, err := s.operations().Acts(s.ctx, f)
	s.ok(err, "list acts")
	return all
}

func pauses(s *stage) {
	ops := s.operations()
	set := func(kind string, paused, want bool) {
		s.Helper()
		is, err := ops.SetPause(s.ctx, provider.Pause{Kind: kind, Name: s.name, Decision: decided}, paused)
		s.ok(err, "set a pause")
		same(s, "changed", is, want)
	}
	set(provider.PauseTopic, false, false)
	set(provider.PauseTopic, true, true)
	set(provider.PauseTopic, true, false)
	set(provider.PauseProjector, true, true)
	all, err := ops.Pauses(s.ctx)
	s.ok(err, "list pauses")
	same(s, "pauses", len(all), 2)
	for i, kind := range []string{provider.PauseProjector, provider.PauseTopic} {
		s.require(!all[i].At.IsZero(), "At is set")
		all[i].At = time.Time{}
		same(s, "pause", all[i], provider.Pause{Kind: kind, Name: s.name, Decision: decided})
	}
	set(provider.PauseTopic, false, true)
	set(provider.PauseTopic, false, false)
	set(provider.PauseProjector, false, true)
	var verbs []string
	for _, a := range s.acts(provider.ActFilter{Name: s.name}) {
		same(s, "an act of a pause", []any{a.State, a.Decision}, []any{provider.ActDone, decided})
		s.require(!a.At.IsZero() && !a.EndedAt.IsZero(), "the act has its times")
		verbs = append(verbs, a.Verb+" "+a.Kind)
	}
	same(s, "acts", verbs, []string{"resume projector", "resume topic", "pause projector", "pause topic"})
}

func pausesAtOnce(s *stage) {
	ops := s.operations()
	for _, paused := range []bool{true, false} {
		var changed atomic.Int64
		errs := make([]error, 8)
		together(len(errs), func(i int) {
			var is bool
			if is, errs[i] = ops.SetPause(s.ctx, provider.Pause{Kind: provider.PauseTopic, Name: s.name, Decision: decided}, paused); is {
				changed.Add(1)
			}
		})
		s.ok(errors.Join(errs...), "set a pause")
		same(s, "calls that returned true", changed.Load(), 1)
	}
}

func refusedPauses(s *stage) {
	for _, p := range []provider.Pause{
		{}, {Kind: "other", Name: "a", Decision: decided}, {Kind: provider.PauseTopic, Decision: decided}, {Kind: provider.PauseTopic, Name: "a"},
		{Kind: provider.PauseTopic, Name: "a", Decision: provider.Decision{By: "ann"}}, {Kind: provider.PauseTopic, Name: "a", Decision: provider.Decision{By: "a\x00", Reason: "r"}},
		{Kind: provider.PauseTopic, Name: strings.Repeat("a", 256), Decision: decided},
	} {
		_, err := s.operations().SetPause(s.ctx, p, true)
		s.require(errors.Is(err, provider.ErrInput), "the error of %+v is ErrInput: %v", p, err)
	}
}

// request adds a requested act, and returns its number.
func (s *stage) request(verb string) int64 {
	s.Helper()
	id, err := s.operations().AddAct(s.ctx, provider.Act{Verb: verb, Kind: provider.PauseProjector, Name: s.name, Decision: decided,
		Detail: json.RawMessage(`{"a":1}`), State: provider.ActRequested})
	s.ok(err, "add an act")
	return id
}

func (s *stage) act(id int64) provider.Act {
	s.Helper()
	all := s.acts(provider.ActFilter{IDs: []int64{id}})
	same(s, "acts with this number", len(all), 1)
	return all[0]
}

func addActs(s *stage) {
	var ids []int64
	for _, verb := range []string{"verify", "dry-run", "verify"} {
		ids = append(ids, s.request(verb))
	}
	s.require(ids[0] < ids[1] && ids[1] < ids[2], "numbers grow: %v", ids)
	numbers := func(f provider.ActFilter) (found []int64) {
		s.Helper()
		f.Name = s.name
		for _, a := range s.acts(f) {
			found = append(found, a.ID)
		}
		return found
	}
	same(s, "all", numbers(provider.ActFilter{}), []int64{ids[2], ids[1], ids[0]})
	same(s, "by verb", numbers(provider.ActFilter{Verbs: []string{"verify"}}), []int64{ids[2], ids[0]})
	same(s, "by open states", numbers(provider.ActFilter{States: []provider.ActState{provider.ActRequested, provider.ActRunning}}), []int64{ids[2], ids[1], ids[0]})
	same(s, "by other states", numbers(provider.ActFilter{States: []provider.ActState{provider.ActDone}}), nil)
	same(s, "by kind", numbers(provider.ActFilter{Kind: "outbox"}), nil)
	same(s, "by no ids", numbers(provider.ActFilter{IDs: []int64{}}), nil)
	same(s, "a page", numbers(provider.ActFilter{Limit: 1, Before: ids[2]}), []int64{ids[1]})
	selectsNone(s, "acts", map[string]any{"Before": int64(1)}, func(f provider.ActFilter) int { return len(s.acts(f)) })
	a := s.act(ids[0])
	same(s, "act", []any{a.Verb, a.Kind, a.Name, a.Decision, a.State, string(compact(a.Detail))},
		[]any{"verify", provider.PauseProjector, s.name, decided, provider.ActRequested, `{"a":1}`})
	s.require(a.EndedAt.IsZero() && a.ExpiresAt.IsZero() && a.Outcome == nil, "it has no end, no lease and no outcome: %+v", a)
}

// compact returns JSON without the spaces that a store may add.
func compact(text json.RawMessage) []byte { return []byte(strings.ReplaceAll(string(text), " ", "")) }

func (s *stage) takes(id int64, holder string, lease time.Duration, want bool) {
	s.Helper()
	taken, err := s.operations().TakeAct(s.ctx, id, holder, lease)
	s.ok(err, "take an act")
	same(s, "taken by "+holder, taken, want)
}

func takeActs(s *stage) {
	id := s.request("verify")
	s.takes(id, "one", time.Hour, true)
	s.takes(id, "two", time.Hour, false)
	a := s.act(id)
	same(s, "act", []any{a.State, a.Holder}, []any{provider.ActRunning, "one"})
	s.require(!a.ExpiresAt.IsZero(), "it has a lease")
	s.advance(2 * time.Hour)
	s.takes(id, "two", time.Hour, true)
	same(s, "holder", s.act(id).Holder, "two")
	s.takes(id+1000, "one", time.Hour, false)
}

func takeActsAtOnce(s *stage) {
	id := s.request("verify")
	var taken atomic.Int64
	errs := make([]error, 8)
	together(len(errs), func(i int) {
		var is bool
		if is, errs[i] = s.operations().TakeAct(s.ctx, id, fmt.Sprint(i), time.Hour); is {
			taken.Add(1)
		}
	})
	s.ok(errors.Join(errs...), "take an act")
	same(s, "calls that took it", taken.Load(), 1)
}

func changeActs(s *stage) {
	id := s.request("verify")
	change := func(holder string, c provider.ActChange, want bool) {
		s.Helper()
		is, err := s.operations().ChangeAct(s.ctx, id, holder, c, time.Hour)
		s.ok(err, "change an act")
		same(s, "changed", is, want)
	}
	running := provider.ActChange{State: provider.ActRunning, Applied: 3, Total: 9, Outcome: json.RawMessage(`{"too":"early"}`)}
	change("one", running, false)
	s.takes(id, "one", 20*time.Minute, true)
	change("two", running, false)
	change("one", running, true)
	a := s.act(id)
	same(s, "progress", []any{a.State, a.Applied, a.Total, a.Outcome == nil}, []any{provider.ActRunning, int64(3), int64(9), true})
	s.advance(30 * time.Minute) // its lease was renewed
	s.takes(id, "two", time.Hour, false)
	s.advance(time.Hour)
	s.takes(id, "two", time.Hour, true)
	change("one", provider.ActChange{State: provider.ActDone}, false)
	change("two", provider.ActChange{State: provider.ActDone, Applied: 9, Total: 9, Outcome: json.RawMessage(`{"n":1}`)}, true)
	a = s.act(id)
	same(s, "the end", []any{a.State, a.Applied, string(compact(a.Outcome))}, []any{provider.ActDone, int64(9), `{"n":1}`})
	s.require(!a.EndedAt.IsZero() && a.ExpiresAt.IsZero(), "it has an end and no lease: %+v", a)
	change("two", running, false)
	s.advance(2 * time.Hour)
	s.takes(id, "one", time.Hour, false)
}

func cancelActs(s *stage) {
	for _, running := range []bool{false, true} {
		id := s.request("verify")
		if running {
			s.takes(id, "one", time.Hour, true)
		}
		for _, want := range []bool{true, false} {
			is, err := s.operations().CancelAct(s.ctx, id, decided)
			s.ok(err, "cancel an act")
			same(s, "canceled", is, want)
		}
		is, err := s.operations().ChangeAct(s.ctx, id, "one", provider.ActChange{State: provider.ActDone}, time.Hour)
		s.ok(err, "change an act")
		same(s, "changed after it was canceled", is, false)
		s.takes(id, "two", time.Hour, false)
		same(s, "state", s.act(id).State, provider.ActCanceled)
		last := s.acts(provider.ActFilter{Name: s.name})[0]
		same(s, "the record", []any{last.Verb, last.Decision, string(compact(last.Detail))}, []any{"cancel", decided, fmt.Sprintf(`{"act":%d}`, id)})
	}
	is, err := s.operations().CancelAct(s.ctx, 1<<40, decided)
	s.ok(err, "cancel an act that does not exist")
	same(s, "canceled", is, false)
	_, err = s.operations().CancelAct(s.ctx, 1, provider.Decision{})
	s.require(errors.Is(err, provider.ErrInput), "without a decision the error is ErrInput: %v", err)
}

func refusedActs(s *stage) {
	good := provider.Act{Verb: "verify", Decision: decided, State: provider.ActRequested}
	for name, spoil := range map[string]func(a *provider.Act){
		"verb": func(a *provider.Act) { a.Verb = "" }, "state": func(a *provider.Act) { a.State = provider.ActRunning }, "no state": func(a *provider.Act) { a.State = "" },
		"by": func(a *provider.Act) { a.By = "" }, "reason": func(a *provider.Act) { a.Reason = "a\x00" }, "name": func(a *provider.Act) { a.Name = strings.Repeat("a", 256) },
		"detail": func(a *provider.Act) { a.Detail = json.RawMessage(`{`) },
		"long": func(a *provider.Act) {
			a.Detail = json.RawMessage(`"` + strings.Repeat("a", provider.MaxActBytes) + `"`)
		},
	} {
		a := good
		spoil(&a)
		_, err := s.operations().AddAct(s.ctx, a)
		s.require(errors.Is(err, provider.ErrInput) || errors.Is(err, eventstore.ErrInvalid), "%s: the error is ErrInput or ErrInvalid: %v", name, err)
	}
	id := s.request("verify")
	s.takes(id, "one", time.Hour, true)
	for _, c := range []provider.ActChange{{}, {State: provider.ActCanceled}, {State: provider.ActDone, Outcome: json.RawMessage(`{`)}} {
		_, err := s.operations().ChangeAct(s.ctx, id, "one", c, time.Hour)
		s.require(errors.Is(err, provider.ErrInput) || errors.Is(err, eventstore.ErrInvalid), "the error of %+v is ErrInput or ErrInvalid: %v", c, err)
	}
	same(s, "state", s.act(id).State, provider.ActRunning)
}

func forgottenActs(s *stage) {
	open, done := s.request("verify"), s.request("verify")
	s.takes(done, "one", time.Hour, true)
	_, err := s.operations().ChangeAct(s.ctx, done, "one", provider.ActChange{State: provider.ActFailed}, time.Hour)
	s.ok(err, "change an act")
	s.advance(provider.ActsKept - time.Hour)
	s.request("verify")
	same(s, "acts before the end of ActsKept", len(s.acts(provider.ActFilter{IDs: []int64{open, done}})), 2)
	s.advance(2 * time.Hour)
	s.request("verify")
	left := s.acts(provider.ActFilter{IDs: []int64{open, done}})
	same(s, "acts after ActsKept", len(left), 1)
	same(s, "what is left", left[0].ID, open)
}

func listStreams(s *stage) {
	for _, id := range []string{"a-1", "a-2", "ab-1", "a-" + "z\U0010FFFF", "b-1"} {
		s.append(id, eventstore.NoStream, drafts(2)...)
	}
	list := func(f provider.StreamFilter) (ids []string) {
		s.Helper()
		found, err := s.operations().Streams(s.ctx, f)
		s.ok(err, "list streams")
		for _, one := range found {
			same(s, "version", one.Version, 2)
			ids = append(ids, one.ID)
		}
		return ids
	}
	same(s, "all", list(provider.StreamFilter{}), []string{"a-1", "a-2", "a-z\U0010FFFF", "ab-1", "b-1"})
	same(s, "of a category", list(provider.StreamFilter{Category: "a"}), []string{"a-1", "a-2", "a-z\U0010FFFF"})
	same(s, "a page", list(provider.StreamFilter{Category: "a", After: "a-1", Limit: 1}), []string{"a-2"})
	same(s, "none", list(provider.StreamFilter{Category: "c"}), nil)
	selectsNone(s, "streams", map[string]any{"After": "\U0010FFFF"}, func(f provider.StreamFilter) int { return len(list(f)) })
	for _, f := range []provider.StreamFilter{{Category: "a\x00"}, {After: "\xff"}, {After: strings.Repeat("a", 256)}} {
		_, err := s.operations().Streams(s.ctx, f)
		s.invalid(err, "list streams by such a text")
	}
}
