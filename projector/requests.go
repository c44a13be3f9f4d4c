package projector

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/projector/internal/lease"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

const (
	requestEvery = time.Second
	// requestLease is how long after the end of the runner that has taken a request up another one
	// ends it.
	requestLease = 30 * time.Second
)

// Report returns the result in the form that is stored with a request (provider.Act).
func (d *DryRun) Report() provider.DryRunReport {
	report := provider.DryRunReport{Messages: d.Messages, Waiting: d.Waiting, Changes: d.Changes}
	for _, f := range d.Failures {
		report.Failures = append(report.Failures, provider.DryRunFailure{
			Seq: f.Parked.Seq, Class: provider.ClassOf(f.Err), Code: provider.CodeOf(f.Err), Error: f.Err.Error(),
		})
	}
	for _, m := range d.Output {
		report.Output = append(report.Output, provider.DryRunOutput{Topic: m.Topic, ID: m.ID, Key: m.Key})
	}
	return report
}

// Report returns the result in the form that is stored with a request (provider.Act).
func (v *Verified) Report() provider.VerifyReport {
	return provider.VerifyReport{Position: v.Position, Events: v.Events, Parked: v.Parked, Differences: v.Differences, Repaired: len(v.Repaired)}
}

type answers struct {
	host  *model.Host
	store provider.Operations // nil: the store has none
	by    map[string]operator // by the name of the projector
}

type operator struct {
	can    func(context.Context, provider.Act) (bool, error)
	dryRun func(context.Context, ParkedFilter) (*DryRun, error)
	verify func(context.Context, Verification) (*Verified, error)
}

func operatorOf[Tx any](r *Runner, u provider.Units[Tx], p *Projector[Tx]) operator {
	cfg := r.cfg
	cfg.Observer, cfg.Log = RunnerObserver{}, r.host.Log
	return operator{
		can:    func(ctx context.Context, a provider.Act) (bool, error) { return r.canAnswer(ctx, a) },
		dryRun: func(ctx context.Context, f ParkedFilter) (*DryRun, error) { return p.DryRun(ctx, u, f, &cfg) },
		verify: func(ctx context.Context, v Verification) (*Verified, error) { return p.Verify(ctx, u, v, &cfg) },
	}
}

// take looks for requests of operators about the projectors of this runner, and answers them,
// until ctx ends.
func (o *answers) take(ctx, hard context.Context) {
	if o.store == nil {
		return
	}
	var all sync.WaitGroup
	defer all.Wait()
	for ; ctx.Err() == nil; model.Wait(ctx, requestEvery) {
		open, err := o.requests(ctx)
		if err != nil && ctx.Err() == nil {
			o.host.Report(slog.LevelWarn, "requests not read", err)
		}
		for _, a := range open {
			by, has := o.by[a.Name]
			if !has || a.State == provider.ActRunning && a.Holder == o.host.ID {
				continue
			}
			limited, cancel := o.host.Limited(ctx)
			taken := a.State == provider.ActRunning // one that is lost is ended by any runner
			if !taken {
				taken, err = by.can(limited, a)
			}
			if taken && err == nil {
				taken, err = o.store.TakeAct(limited, a.ID, o.host.ID, requestLease)
			}
			cancel()
			switch {
			case err != nil || !taken:
			case a.State == provider.ActRunning:
				o.end(hard, a, provider.ActChange{State: provider.ActFailed, Outcome: lostRequest})
			default:
				all.Go(func() { o.answer(ctx, hard, by, a) })
			}
		}
	}
}

// canAnswer reports whether this program can answer a request about a projector: the live read model is that of its
// version, and it has what that has, for a verification, or what the messages of a dry run need. Otherwise the request waits
// for another program.
func (r *Runner) canAnswer(ctx context.Context, a provider.Act) (bool, error) {
	f := r.feeder(a.Name)
	if !f.Current().IsLive() {
		return false, nil
	}
	if a.Verb == provider.VerbVerify {
		err := f.Maker.Lacks(ctx, f.Current())
		if errors.Is(err, ErrGeneration) {
			return false, nil
		}
		return err == nil, err
	}
	if a.Verb != provider.VerbDryRun { // the answer says what is wrong with it
		return true, nil
	}
	needs, err := provider.DryRunNeeds(ctx, r.host.Store, a, f.Current().Generation)
	return needs == "" || f.Projector.Lacks(needs) == nil, err
}

// lostRequest is the outcome of a request whose runner has ended. It is not begun again: if a message ends
// its process, each runner would end in turn.
var lostRequest = provider.DryRunReport{Error: "the runner that worked on it has ended, perhaps because of a message: see its log, and ask again"}.Outcome()

func (o *answers) end(hard context.Context, a provider.Act, c provider.ActChange) {
	ctx, cancel := o.host.Limited(hard)
	defer cancel()
	if _, err := o.store.ChangeAct(ctx, a.ID, o.host.ID, c, requestLease); err != nil {
		o.host.Report(slog.LevelWarn, "the outcome of a request not stored", err, "projector", a.Name, "request", a.ID)
	}
}

func (o *answers) requests(ctx context.Context) ([]provider.Act, error) {
	ctx, cancel := o.host.Limited(ctx)
	defer cancel()
	return o.store.Acts(ctx, provider.ActFilter{
		Verbs: []string{provider.VerbDryRun, provider.VerbVerify}, Kind: provider.PauseProjector,
		States: []provider.ActState{provider.ActRequested, provider.ActRunning},
	})
}

type progressOf struct{ applied, total atomic.Int64 }

func (p *progressOf) set(applied, total int64) {
	p.applied.Store(applied)
	p.total.Store(total)
}

func (p *progressOf) change(state provider.ActState, outcome json.RawMessage) provider.ActChange {
	return provider.ActChange{State: state, Applied: p.applied.Load(), Total: p.total.Load(), Outcome: outcome}
}

// answer does what a request asks for, and stores the outcome. If the request is canceled, it stops. If
// the runner stops, the lease of the request expires, and another runner ends it.
func (o *answers) answer(ctx, hard context.Context, by operator, a provider.Act) {
	work, cancel := context.WithCancel(ctx)
	defer cancel()
	progress := &progressOf{}
	var renewing sync.WaitGroup
	defer renewing.Wait()
	renewing.Go(func() {
		lease.Extend(work, o.host.Clock, requestEvery, requestLease, func(ctx context.Context) (bool, error) {
			return o.store.ChangeAct(ctx, a.ID, o.host.ID, progress.change(provider.ActRunning, nil), requestLease)
		}, cancel)
	})
	outcome, err := by.answer(work, a, progress)
	if work.Err() != nil {
		return
	}
	state := provider.ActDone
	if err != nil {
		state = provider.ActFailed
		o.host.Report(slog.LevelWarn, "a request of an operator failed", err, "projector", a.Name, "request", a.ID, "verb", a.Verb)
	}
	cancel()
	renewing.Wait()
	o.end(hard, a, progress.change(state, outcome))
}

func (o operator) answer(ctx context.Context, a provider.Act, progress *progressOf) (outcome json.RawMessage, err error) {
	defer func() {
		if cause := recover(); cause != nil {
			err = fmt.Errorf("panic: %v", cause)
			outcome = provider.VerifyReport{Error: err.Error()}.Outcome()
		}
	}()
	detail := []byte(cmp.Or(string(a.Detail), "{}"))
	if a.Verb == provider.VerbDryRun {
		var q provider.DryRunRequest
		report := provider.DryRunReport{}
		if err = json.Unmarshal(detail, &q); err == nil {
			var d *DryRun
			if d, err = o.dryRun(ctx, q.Filter); err == nil {
				report = d.Report()
			}
		}
		if err != nil {
			report.Error = unit.TextOf(err)
		}
		return report.Outcome(), err
	}
	var q provider.VerifyRequest
	report := provider.VerifyReport{}
	if err = json.Unmarshal(detail, &q); err == nil {
		v := Verification{Ignore: q.Ignore, Limit: q.Limit, Rate: q.Rate, Progress: progress.set}
		if q.Repair {
			v.Repair = a.Decision
		}
		var done *Verified
		if done, err = o.verify(ctx, v); err == nil {
			report = done.Report()
			progress.set(done.Events, done.Events)
		}
	}
	if err != nil {
		report.Error = unit.TextOf(err)
	}
	return report.Outcome(), err
}
