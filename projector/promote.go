package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// takeUp begins a rebuild: it empties the live read model, or creates the tables of another one. If
// the projector cannot be rebuilt, the request is retired.
func (p *projection) takeUp(ctx, hard context.Context, all []*generation, g *generation) error {
	limited, cancel := context.WithTimeout(ctx, 2*p.runner.cfg.Timeout)
	defer cancel()
	is := live(all)
	err := p.canRebuild(g.How)
	if err == nil && !g.Anyway && g.How != scratch {
		err = p.unlogged(limited, is)
	}
	if errors.Is(err, ErrNoRebuild) && g.revision > 0 {
		return errors.Join(err, p.refuse(ctx, g, err.Error()))
	}
	if err != nil {
		return err
	}
	to := *g
	if to.Skipped, err = p.skippedIn(limited, is); err != nil {
		return err
	}
	to.Oldest, to.Newest, to.Handlers = p.opts.Version, p.opts.Version, p.marked
	to.takesOver(is)
	if g.How == InPlace {
		err = p.beginInPlace(ctx, hard, is, &to)
	} else {
		to.state, to.Suffix = provider.GenerationBuilding, fmt.Sprintf("_g%d", to.Generation)
		to.Tables = p.tables(to.Suffix)
		err = p.alone(hard, &to, created, provider.Switch{Set: []provider.Generation{to.stored()}, Create: to.Tables})
	}
	attrs := []any{"projector", p.name, "generation", g.Generation, "how", g.How.String(), "version", p.opts.Version, "by", g.By, "reason", g.Reason}
	switch {
	case err == nil && g.How != scratch:
		p.runner.cfg.Logger.Info("a rebuild begins", attrs...)
	case err != nil && isFinal(err):
		p.runner.report(slog.LevelError, "a rebuild could not begin", err, attrs...)
	}
	if err != nil && g.revision > 0 && hard.Err() == nil && isFinal(err) {
		return errors.Join(err, p.refuse(ctx, g, failed("its begin", err)))
	}
	return err
}

// isFinal reports whether an error would probably occur again.
func isFinal(err error) bool {
	e, ok := errors.AsType[*provider.Error](err) // others are those of reads
	return ok && (e.Class == ClassUnknown || e.Class == ClassPermanent)
}

// failed describes an error without its text, which may have data of users.
func failed(what string, err error) string {
	return fmt.Sprintf("%s failed (%s %s): the log has its text with RunnerConfig.LogErrors", what, provider.ClassOf(err), provider.CodeOf(err))
}

// refuse retires a request.
func (p *projection) refuse(ctx context.Context, g *generation, why string) error {
	ctx, cancel := context.WithTimeout(ctx, p.runner.cfg.Timeout)
	defer cancel()
	_, err := change(ctx, p.runner.store, g, func(g *generation) { g.state, g.Failed = provider.GenerationRetired, why })
	return err
}

// beginInPlace empties the read model, and makes a new generation of it.
func (p *projection) beginInPlace(ctx, hard context.Context, is, to *generation) error {
	to.state, to.Suffix, to.Tables = provider.GenerationLive, is.Suffix, is.Tables
	old := *is
	old.state, old.Tables, old.Handlers = provider.GenerationRetired, nil, p.handlersOf(is)
	s := provider.Switch{Set: []provider.Generation{old.stored(), to.stored()}}
	with := ""
	if p.resets {
		with = reset
	} else {
		s.Reset = p.tables(is.Suffix)
	}
	return p.alone(hard, to, with, s)
}

// createFirst stores the first generation. If nothing was applied yet, it creates its tables.
func (p *projection) createFirst(ctx, hard context.Context, is *generation) (changed bool, err error) {
	c, err := p.runner.store.Checkpoint(ctx, is.Build)
	if err != nil {
		return false, err
	}
	to := *is
	to.Handlers = p.marked
	s, with := provider.Switch{}, ""
	switch {
	case c.Mode != 0 && p.opts.Version == 1:
		return false, nil // it was created without OnCreate
	case c.Mode == 0:
		to.Oldest, to.Newest = p.opts.Version, p.opts.Version
		if p.creates {
			to.Suffix = "_g1"
			to.Tables, with, s.Show = p.tables(to.Suffix), created, p.shown(to.Suffix)
			s.Create = to.Tables
		}
	}
	s.Set = []provider.Generation{to.stored()}
	err = unlessFenced(p.alone(hard, &to, with, s))
	return err == nil, err
}

// handlersOf returns all names in the markers of a generation, as far as they are known.
func (p *projection) handlersOf(g *generation) []string {
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(g.Handlers, p.marked))))
}

// tables returns Options.Tables with a suffix.
func (p *projection) tables(suffix string) (names []string) {
	for _, name := range p.opts.Tables {
		names = append(names, name+suffix)
	}
	return names
}

// shown returns the views that show the tables with a suffix.
func (p *projection) shown(suffix string) (pairs []provider.TablePair) {
	for _, name := range p.opts.Tables {
		pairs = append(pairs, provider.TablePair{Table: name + suffix, Other: name})
	}
	return pairs
}

// alone runs a unit of a generation, without messages, while no other unit of the projector is open.
func (p *projection) alone(hard context.Context, g *generation, setup string, s provider.Switch) error {
	w := &worker{projection: p.in(g, false)}
	defer w.endBackground()
	u := w.newUnit(nil)
	u.setup = setup
	u.intent.Once, u.intent.Messages, u.intent.Switch = true, nil, &s
	return u.transact(hard)
}

// promoteMost is the most events that are applied while all units of the projector wait.
const promoteMost = 200

// promote makes the generation live. First it applies, next to the live generation, the events that
// this one has applied above its checkpoint. The rest is applied in the transaction of the switch,
// while no other unit of the projector is open.
func (r *reader) promote(ctx, hard context.Context) error {
	if err := r.applyBehind(ctx, hard, true); err != nil {
		if errors.Is(err, errMany) {
			return nil // catching up is faster
		}
		return err
	}
	all, err := r.runner.generationsOf(ctx, r.name)
	if err != nil {
		return err
	}
	me := find(all, func(g *generation) bool { return g.Build == r.serving.Build })
	isStandby := me != nil && me.state == provider.GenerationStandby && me.Promoted
	if me == nil || me.Paused || me.state != provider.GenerationBuilding && !isStandby {
		r.runner.followNow()
		return nil
	}
	if waits, err := r.waitsForParked(ctx); waits || err != nil {
		wait(ctx, followFast)
		return err
	}
	u := r.newUnit(nil)
	u.intent.Once, u.intent.Messages, u.intent.Reader = true, nil, r.identity()
	u.intent.Switch = r.switchTo(all, me)
	u.intent.Switch.Last = r.lastStep(u, promoteMost)
	err = r.takeTurn(ctx, hard, func(_, hard context.Context) error { return u.transact(hard) })
	if r.again(u, err) {
		return nil
	}
	if provider.CodeOf(err) == provider.CodeBusy {
		r.runner.cfg.Logger.Info("the switch waits for transactions that use the read model", "projector", r.name, "generation", me.Generation)
		wait(ctx, followFast)
		return nil
	}
	if err != nil && hard.Err() == nil && isFinal(err) {
		if u.culprit(err) >= 0 {
			return nil // applied alone, the event is parked
		}
		// such as a view that others depend on
		r.runner.report(slog.LevelError, "the read model was not switched", err, "projector", r.name, "generation", me.Generation)
		_, err = r.change(ctx, func(g *generation) { g.Promoted, g.Failed = false, failed("the switch", err) })
		return err
	}
	if err == nil {
		r.runner.cfg.Logger.Info("another generation of the read model is live", "projector", r.name, "generation", me.Generation)
		r.runner.followNow()
		err = provider.ErrFenced // it is served in another way now
	}
	return err
}

// waitsForParked reports whether parked messages of the generation will be tried again soon, such as
// those that a crash has left. Readers would miss their events after a switch. A switch does not wait for
// messages that were tried more than three times, and waits for at most 30 s.
func (r *reader) waitsForParked(ctx context.Context) (bool, error) {
	now, cfg := r.runner.cfg.Clock(), &r.runner.cfg
	if !r.retrying.IsZero() && now.Sub(r.retrying) > 30*time.Second {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Timeout)
	defer cancel()
	rows, err := r.runner.store.Parked(ctx, ParkedFilter{Projector: r.name, Generation: r.serving.Generation, States: []ParkedState{StateWaiting}})
	if err != nil || !slices.ContainsFunc(rows, func(p Parked) bool { return !p.DueAt.IsZero() && p.Class != ClassHeld && p.Attempts <= 3 }) {
		return false, err
	}
	if r.retrying.IsZero() {
		r.retrying = now
		cfg.Logger.Info("the switch waits for parked messages that are tried again", "projector", r.name, "generation", r.serving.Generation)
	}
	return true, nil
}

// applyBehind applies the events that the live generation has applied above its checkpoint, until
// few are left. If this reader catches up, and many events up to the live checkpoint are not applied,
// it returns errMany.
func (r *reader) applyBehind(ctx, hard context.Context, catchesUp bool) error {
	for range 20 {
		behind, live, err := r.behindNow(ctx)
		if err != nil {
			return err
		}
		if catchesUp && len(behind) > promoteMost && behind[promoteMost].Position <= live.Position {
			return errMany
		}
		if err := r.complete(ctx, hard, behind); err != nil {
			return err
		}
		if len(behind) <= promoteMost/2 {
			break
		}
	}
	return nil
}

// behindNow returns events that the live generation has applied and this one has not, and the place
// of the live checkpoint.
func (r *reader) behindNow(ctx context.Context) (behind []eventstore.Raw, live provider.LogPlace, err error) {
	c, err := r.runner.store.Checkpoint(ctx, provider.Build{Projector: r.name})
	if err != nil {
		return nil, live, err
	}
	b := provider.Build{Projector: r.name, Generation: c.Generation}
	behind, err = r.behindLive(ctx, provider.Live{Checkpoint: c, Unapplied: func(ctx context.Context, m []provider.Message) ([]bool, error) {
		return r.runner.store.Unapplied(ctx, b, m)
	}}, true)
	return behind, c.Place, err
}

// lastStep returns Switch.Last of a unit: the events that the live generation has applied and this one
// has not, at most the given number. Those that would be parked are left out: the reader parks them
// later, because they are above the checkpoint.
func (r *reader) lastStep(u *unit, most int) func(context.Context, provider.Live) ([]provider.Message, error) {
	return func(ctx context.Context, l provider.Live) ([]provider.Message, error) {
		behind, err := r.behindLive(ctx, l, false)
		if err != nil {
			return nil, err
		}
		if u.msgs, err = r.accept(ctx, behind); err != nil {
			return nil, err
		}
		u.msgs = slices.DeleteFunc(u.msgs, func(m *inbound) bool { return r.waiting[m.lane] })
		if len(u.msgs) > most {
			return nil, errMany
		}
		return messagesOf(u.msgs), nil
	}
}

// again reports whether the last step can be tried again at once.
func (r *reader) again(u *unit, err error) bool {
	if errors.Is(err, errParks) {
		for _, lane := range u.waiting {
			r.waiting[lane] = true
		}
		return true
	}
	return errors.Is(err, errMany)
}

// switchTo returns the switch that makes a generation live. The one that was live becomes standby,
// if programs can feed it: it has tables of its own. Older ones are retired.
func (r *reader) switchTo(all []*generation, me *generation) *provider.Switch {
	s := &provider.Switch{Show: r.shown(me.Suffix)}
	was := *live(all)
	to := *me
	to.state, to.Promoted, to.Failed = provider.GenerationLive, false, ""
	to.takesOver(&was) // the last step may leave out events that it has applied
	was.Paused = false
	if was.Handlers = r.handlersOf(&was); was.Suffix != "" {
		was.state, was.Promoted = provider.GenerationStandby, false
	} else {
		was.state = provider.GenerationRetired
		for _, name := range r.opts.Tables {
			s.Rename = append(s.Rename, provider.TablePair{Table: name, Other: fmt.Sprintf("%s_g%d", name, was.Generation)})
		}
	}
	s.Set = append(s.Set, was.stored())
	for _, g := range all {
		if g.state == provider.GenerationStandby && g.Build != me.Build {
			older := *g
			older.state = provider.GenerationRetired
			s.Set = append(s.Set, older.stored())
		}
	}
	s.Set = append(s.Set, to.stored())
	return s
}
