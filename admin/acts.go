package admin

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/pauses"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// Decision is who decides, and why. Both are required.
type Decision = provider.Decision

// Acts returns the acts that f selects, the newest first. Decisions about parked messages, tasks and generations are in these.
func (a *Admin) Acts(ctx context.Context, f provider.ActFilter) ([]provider.Act, error) {
	return with(a.Operations, func(o provider.Operations) ([]provider.Act, error) { return o.Acts(ctx, f) })
}

// Requeue does what Inspector.Requeue of the outbox does, and records it.
func (a *Admin) Requeue(ctx context.Context, f outbox.Filter, d Decision) (int, error) {
	return a.decideEntries(ctx, "requeue", f, d, a.store.Requeue)
}

// SkipEntries does what Inspector.Skip of the outbox does, and records it. It cannot be undone.
//   - provider.ErrInput: f is the zero filter.
func (a *Admin) SkipEntries(ctx context.Context, f outbox.Filter, d Decision) (int, error) {
	if f.Seqs == nil && f.Topic == "" && f.Key == "" && f.Stream == "" {
		return 0, fmt.Errorf("%w: filter: select entries by Seqs, Topic, Key or Stream", provider.ErrInput)
	}
	return a.decideEntries(ctx, "skip", f, d, a.store.Skip)
}

func (a *Admin) decideEntries(ctx context.Context, verb string, f outbox.Filter, d Decision, do func(context.Context, outbox.Filter) (int, error)) (int, error) {
	record := struct { // an age is text
		outbox.Filter
		Older string `json:"older,omitempty"`
	}{Filter: f}
	if record.After, record.Limit = 0, 0; f.Older != 0 {
		record.Older = f.Older.String()
	}
	act := provider.Act{Verb: verb, Kind: "outbox", Name: f.Topic, Decision: d}
	return a.decide(ctx, act, record, func() (int, error) { return do(ctx, f) })
}

// decide stores the act before it is carried out, so that no change is without a record. The number of
// changed rows, or the error, is added to the record. A store without operations records nothing.
func (a *Admin) decide(ctx context.Context, act provider.Act, detail any, do func() (int, error)) (_ int, err error) {
	o, err := a.Operations()
	if err != nil {
		if err := act.Validate(); err != nil {
			return 0, err
		}
		return do()
	}
	act.State = provider.ActRequested
	if act.Detail, err = json.Marshal(detail); err != nil {
		return 0, err
	}
	id, err := o.AddAct(ctx, act)
	if err != nil {
		return 0, err
	}
	const holder, lease = "admin", time.Minute
	if _, err := o.TakeAct(ctx, id, holder, lease); err != nil {
		return 0, err
	}
	n, err := do()
	change := provider.ActChange{State: provider.ActDone, Applied: int64(n), Total: int64(n)}
	if err != nil {
		change.State = provider.ActFailed
		change.Outcome, _ = json.Marshal(map[string]string{"error": err.Error()})
	}
	record, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if _, unrecorded := o.ChangeAct(record, id, holder, change, lease); err == nil && unrecorded != nil {
		err = fmt.Errorf("%d rows were changed, and their number was not recorded: %w", n, unrecorded)
	}
	return n, err
}

// Parked returns the parked messages that f selects, in order of Seq.
func (a *Admin) Parked(ctx context.Context, f projector.ParkedFilter) ([]projector.Parked, error) {
	return with(a.Projectors, func(p Projectors) ([]projector.Parked, error) { return p.Parked(ctx, f) })
}

// Replay is projector.Replay.
func (a *Admin) Replay(ctx context.Context, f projector.ParkedFilter, d Decision) (int, error) {
	return with(a.Projectors, func(p Projectors) (int, error) { return projector.Replay(ctx, p, f, d) })
}

// SkipParked is projector.Skip. It cannot be undone.
//   - provider.ErrInput: f selects the messages of all projectors, and no Seqs and no Key.
func (a *Admin) SkipParked(ctx context.Context, f projector.ParkedFilter, d Decision) (int, error) {
	if f.Projector == "" && f.Seqs == nil && f.Key == "" {
		return 0, fmt.Errorf("%w: filter: select messages by Projector, Key or Seqs", provider.ErrInput)
	}
	return with(a.Projectors, func(p Projectors) (int, error) { return projector.Skip(ctx, p, f, d) })
}

// Pause pauses a projector (provider.PauseProjector) or a topic (provider.PauseTopic). Runners and relays follow within
// about a second; what they are applying or publishing ends first. It returns false if it is paused already. The error is
// provider.ErrInput for a projector of which nothing is stored, and that no living service has.
//   - No event of the log, no delivery and no parked message is applied to a paused projector. A delivery is not acked
//     meanwhile, so runners with projector.Subscribe apply nothing of its topics to their other projectors either.
//   - Relays claim no entries of a paused topic. These wait, in order.
func (a *Admin) Pause(ctx context.Context, kind, name string, d Decision) (bool, error) {
	if kind == provider.PauseProjector {
		if known, err := a.hasProjector(ctx, name); err != nil || !known {
			return false, cmp.Or(err, fmt.Errorf("%w: there is no projector %q: nothing is stored of it, and no living service has it", provider.ErrInput, name))
		}
	}
	return a.setPause(ctx, provider.Pause{Kind: kind, Name: name, Decision: d}, true)
}

// hasProjector reports whether something is stored of a projector, or a living service has it.
func (a *Admin) hasProjector(ctx context.Context, name string) (bool, error) {
	services, err := with(a.Operations, func(o provider.Operations) ([]provider.ServiceReport, error) { return o.Services(ctx) })
	if err != nil || slices.ContainsFunc(services, func(s provider.ServiceReport) bool { return s.Serves(name) }) {
		return err == nil, err
	}
	p, missing := a.Projectors()
	if missing != nil {
		return true, nil // it is not known
	}
	rows, err := p.Generations(ctx, name)
	if err != nil || len(rows) > 0 {
		return err == nil, err
	}
	if c, err := p.Checkpoint(ctx, provider.Build{Projector: name}); err != nil || c.Mode != 0 {
		return err == nil, err
	}
	parked, err := p.Parked(ctx, projector.ParkedFilter{Projector: name, Limit: 1})
	if err != nil || len(parked) > 0 {
		return err == nil, err
	}
	marked, err := p.MarkedHandlers(ctx)
	return slices.ContainsFunc(marked, func(handler string) bool { return strings.HasPrefix(handler, name+"/") }), err
}

// Resume ends a pause. It returns false if there is none.
func (a *Admin) Resume(ctx context.Context, kind, name string, d Decision) (bool, error) {
	return a.setPause(ctx, provider.Pause{Kind: kind, Name: name, Decision: d}, false)
}

func (a *Admin) setPause(ctx context.Context, p provider.Pause, paused bool) (bool, error) {
	return with(a.Operations, func(o provider.Operations) (bool, error) { return o.SetPause(ctx, p, paused) })
}

// Rebuild is projector.RequestRebuild: a running runner of the projector takes the request up.
func (a *Admin) Rebuild(ctx context.Context, name string, r projector.Rebuild) (generation int, err error) {
	return with(a.Projectors, func(p Projectors) (int, error) { return projector.RequestRebuild(ctx, p, name, r) })
}

// Control is projector.Control: it pauses, resumes, cancels, promotes and drops generations.
func (a *Admin) Control(ctx context.Context, name string, generation int, action projector.GenerationAction, d Decision) error {
	p, err := a.Projectors()
	if err != nil {
		return err
	}
	return projector.Control(ctx, p, name, generation, action, d)
}

// DryRun requests a dry run of the parked messages that f selects, at most f.Limit (zero means 100), and returns the
// number of the request. f.Projector is required. A running runner of it answers with a provider.DryRunReport. That has
// rows of the read model, which may be data of users, and is kept with the act for provider.ActsKept.
func (a *Admin) DryRun(ctx context.Context, f projector.ParkedFilter, d Decision) (int64, error) {
	return a.request(ctx, provider.VerbDryRun, f.Projector, provider.DryRunRequest{Filter: f}, d)
}

// Verify requests a comparison of the read model with the log (Projector.Verify), and returns the number of the request. A
// running runner of the projector answers it with a provider.VerifyReport.
func (a *Admin) Verify(ctx context.Context, name string, r provider.VerifyRequest, d Decision) (int64, error) {
	return a.request(ctx, provider.VerbVerify, name, r, d)
}

func (a *Admin) request(ctx context.Context, verb, name string, detail any, d Decision) (int64, error) {
	if name == "" {
		return 0, fmt.Errorf("%w: the projector is missing: name it", provider.ErrInput)
	}
	text, err := json.Marshal(detail)
	if err != nil {
		return 0, err
	}
	act := provider.Act{Verb: verb, Kind: provider.PauseProjector, Name: name, Decision: d, Detail: text, State: provider.ActRequested}
	return with(a.Operations, func(o provider.Operations) (int64, error) { return o.AddAct(ctx, act) })
}

// Cancel cancels a request, which a runner then stops within about a second. It returns false if it is over.
func (a *Admin) Cancel(ctx context.Context, request int64, d Decision) (bool, error) {
	return with(a.Operations, func(o provider.Operations) (bool, error) { return o.CancelAct(ctx, request, d) })
}

// awaitEvery is the interval between two looks at a request.
const awaitEvery = 200 * time.Millisecond

// Await waits until a request is over, and returns it. It calls progress, if that is not nil, with each
// state that it sees. When ctx ends, it returns the last state and the error of ctx: the request goes on.
func (a *Admin) Await(ctx context.Context, request int64, progress func(provider.Act)) (last provider.Act, err error) {
	for {
		found, err := a.Acts(ctx, provider.ActFilter{IDs: []int64{request}})
		if err == nil && len(found) == 0 {
			err = fmt.Errorf("%w: request %d does not exist", provider.ErrInput, request)
		}
		if err != nil {
			return last, err
		}
		if last = found[0]; progress != nil {
			progress(last)
		}
		if last.State.IsOver() {
			return last, nil
		}
		if pauses.Wait(ctx, awaitEvery, nil); ctx.Err() != nil {
			return last, ctx.Err()
		}
	}
}

// PruneEntries is outbox.Prune, recorded as an act.
func (a *Admin) PruneEntries(ctx context.Context, keep outbox.EntryRetention, d Decision) (int, error) {
	keep, err := keep.WithDefaults()
	if err != nil {
		return 0, err
	}
	detail := map[string]string{"published": keep.Published.String(), "skipped": keep.Skipped.String()}
	return a.decide(ctx, provider.Act{Verb: "prune", Kind: "outbox", Decision: d}, detail,
		func() (int, error) { return outbox.Prune(ctx, a.store, keep) })
}

// Forget is projector.Forget, recorded as an act. A preview is not recorded.
func (a *Admin) Forget(ctx context.Context, name string, o projector.ForgetOptions, d Decision) (f projector.Forgotten, err error) {
	p, err := a.Projectors()
	if err != nil || o.Preview {
		if err == nil {
			f, err = projector.Forget(ctx, p, name, o, d)
		}
		return f, err
	}
	act := provider.Act{Verb: "forget", Kind: provider.PauseProjector, Name: name, Decision: d}
	_, err = a.decide(ctx, act, map[string]bool{"drop_tables": o.DropTables}, func() (int, error) {
		var err error
		f, err = projector.Forget(ctx, p, name, o, d)
		return f.Deleted, err
	})
	return f, err
}

// Release is projector.Release, recorded as an act.
func (a *Admin) Release(ctx context.Context, name string, d Decision) error {
	p, err := a.Projectors()
	if err != nil {
		return err
	}
	_, err = a.decide(ctx, provider.Act{Verb: "release", Kind: provider.PauseProjector, Name: name, Decision: d}, struct{}{},
		func() (int, error) { return 0, projector.Release(ctx, p, name, d) })
	return err
}

// MarkedHandlers returns the handlers that have markers, sorted.
func (a *Admin) MarkedHandlers(ctx context.Context) ([]string, error) {
	return with(a.Projectors, func(p Projectors) ([]string, error) { return p.MarkedHandlers(ctx) })
}

// PruneMarkers is marker.Prune, recorded as an act: it deletes markers that are older than r.Window. They are those of
// handlers or, if there are none, of all handlers of the projector; then its replayed and skipped messages too.
//   - marker.ErrUnsafe: r.Window is too short for r.Horizon. The windows of services are not known here.
//   - provider.ErrInput: projector and handlers are both given, or neither is.
func (a *Admin) PruneMarkers(ctx context.Context, projector string, handlers []string, r marker.Retention, d Decision) (int, error) {
	if (projector == "") == (len(handlers) == 0) {
		return 0, fmt.Errorf("%w: name the projector, or its handlers", provider.ErrInput)
	}
	p, err := a.Projectors()
	if err != nil {
		return 0, err
	}
	if r, err = r.WithDefaults(); err != nil {
		return 0, err
	}
	name := projector
	if projector == "" {
		name = strings.Join(handlers, ", ")
	}
	return a.decide(ctx, provider.Act{Verb: "prune", Kind: "markers", Name: name, Decision: d}, map[string]string{"window": r.Window.String()},
		func() (int, error) {
			if projector != "" {
				marked, err := p.MarkedHandlers(ctx)
				if err != nil {
					return 0, err
				}
				for _, h := range marked {
					if of, _, _ := strings.Cut(h, "/"); of == projector {
						handlers = append(handlers, h)
					}
				}
			}
			return marker.Prune(ctx, p, r, projector, handlers...)
		})
}

// DropMarkers is marker.Drop, recorded as an act.
func (a *Admin) DropMarkers(ctx context.Context, handler string, d Decision) (int, error) {
	if handler == "" {
		return 0, fmt.Errorf("%w: the handler is missing: name it", provider.ErrInput)
	}
	p, err := a.Projectors()
	if err != nil {
		return 0, err
	}
	return a.decide(ctx, provider.Act{Verb: "drop", Kind: "markers", Name: handler, Decision: d}, struct{}{},
		func() (int, error) { return marker.Drop(ctx, p, handler) })
}
