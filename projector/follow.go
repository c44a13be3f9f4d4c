package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora/provider"
)

// Pauses between two looks at the generations: while a rebuild is going on, and otherwise.
const (
	followFast = 200 * time.Millisecond
	followSlow = 2 * time.Second
)

// other is a generation that a runner feeds in addition to the one that deliveries are applied to.
// Only its reader applies events.
type other struct {
	*projection
	stop func() // returns when its workers have ended
}

// beat records when a counter that other programs raise was seen to change.
type beat struct {
	number int64
	at     time.Time
}

// followNow requests a look at the generations.
func (r *Runner) followNow() {
	select {
	case r.followSoon <- struct{}{}:
	default:
	}
}

// followGenerations looks at the generations until ctx ends: it takes requests up, and feeds the
// generations that are for this version of the program.
func (r *Runner) followGenerations(ctx, hard context.Context) {
	defer func() {
		for _, p := range r.projections {
			p.keepOthers(nil)
		}
	}()
	for ctx.Err() == nil {
		pause, err := r.follow(ctx, hard)
		if err != nil && ctx.Err() == nil {
			r.report(slog.LevelWarn, "generations not read", err)
		}
		select {
		case <-ctx.Done():
		case <-r.followSoon:
			wait(ctx, scanPause)
		case <-time.After(pause):
		}
	}
}

// follow looks at the generations of all projectors once. It returns the pause until the next look.
func (r *Runner) follow(ctx, hard context.Context) (pause time.Duration, err error) {
	rows, err := r.allGenerations(ctx)
	if err != nil {
		return followSlow, err
	}
	pause = followSlow
	for _, p := range r.projections {
		now := r.cfg.Clock()
		if now.Before(p.retryAt) {
			continue
		}
		all, e := generationsOf(p.name, rows)
		if e == nil {
			var changed bool
			if changed, e = p.assign(ctx, hard, all); changed {
				r.followNow()
			}
		}
		if p.tries++; e == nil || errors.Is(e, provider.ErrFenced) { // fenced: another runner was first
			p.tries, e = 0, nil
		} else {
			delay, _ := r.cfg.Retry.Delay(p.tries)
			p.retryAt = now.Add(delay)
		}
		if find(all, func(g *generation) bool { return g.isBuild() || g.state == provider.GenerationStandby }) != nil {
			pause = followFast
		}
		if e != nil && ctx.Err() == nil {
			r.report(slog.LevelWarn, "generation not changed", e, "projector", p.name, "reason", reasonOfRefusal(e))
		}
	}
	return pause, nil
}

// choose chooses the generation of each projector, at the start. It waits for a store that does not
// reply.
func (r *Runner) choose(ctx context.Context) error {
	for tries := 1; !r.assigned; tries++ {
		err := r.chooseOnce(ctx)
		if err == nil || ctx.Err() != nil || errors.Is(err, ErrNoRebuild) || errors.Is(err, ErrGeneration) || isFinal(err) {
			return err
		}
		delay, _ := r.cfg.Retry.Delay(tries)
		r.report(slog.LevelWarn, "generations not read", err, "again_in", delay)
		wait(ctx, delay)
	}
	return nil
}

func (r *Runner) chooseOnce(ctx context.Context) error {
	for _, p := range r.projections {
		if err := r.chooseFor(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// chooseFor chooses the generation of a projector.
func (r *Runner) chooseFor(ctx context.Context, p *projection) error {
	for {
		all, err := r.generationsOf(ctx, p.name)
		if err != nil {
			return err
		}
		main, changed, err := p.choose(ctx, ctx, all)
		switch {
		case err != nil:
			return fmt.Errorf("projector %s: %w", p.name, err)
		case changed:
			continue
		case main == nil:
			main = &generation{Build: provider.Build{Projector: p.name}}
		}
		p.current.Store(main)
		return nil
	}
}

// reasonOfRefusal returns the text of an error that has no data of users.
func reasonOfRefusal(err error) string {
	if errors.Is(err, ErrNoRebuild) {
		return err.Error()
	}
	return ""
}

// generationsOf returns the generations of a projector.
func (r *Runner) generationsOf(ctx context.Context, projector string) ([]*generation, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	return readGenerations(ctx, r.store, projector)
}

// allGenerations returns the rows of all projectors.
func (r *Runner) allGenerations(ctx context.Context) ([]provider.Generation, error) {
	ctx, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
	defer cancel()
	return r.store.Generations(ctx, "")
}

// feeding returns the projections of all generations that this runner feeds.
func (r *Runner) feeding() (all []*projection) {
	r.others.Lock()
	defer r.others.Unlock()
	for _, p := range r.projections {
		if p.build().Generation > 0 {
			all = append(all, p)
		}
		for _, o := range p.others {
			all = append(all, o.projection)
		}
	}
	return all
}

// assign makes the projection feed the generation that is for its version, and starts and stops
// readers of others. changed reports whether it has changed the generations.
func (p *projection) assign(ctx, hard context.Context, all []*generation) (changed bool, err error) {
	if p.runner.assigned { // by Verify
		return false, nil
	}
	if p.reader != nil {
		if changed, err = p.retireAbandoned(ctx, all); changed || err != nil {
			return changed, err
		}
	}
	main, changed, err := p.choose(ctx, hard, all)
	if changed || err != nil {
		return changed, err
	}
	if main == nil {
		main = &generation{Build: provider.Build{Projector: p.name}}
		if err := p.visit(ctx, live(all)); err != nil {
			return false, err
		}
	}
	p.watchBeats(all, main)
	main.shared = main.shared || main.isLive() && p.isVisited(main)
	var others []*generation
	for _, g := range all {
		isFed := g.state == provider.GenerationStandby || g.state == provider.GenerationBuilding && g.How != scratch
		if p.reader != nil && isFed && g.takes(p.opts.Version) && g.Build != main.Build {
			others = append(others, g)
		}
	}
	is := p.current.Load()
	if is.Build == main.Build && is.revision > main.revision { // changed since
		return false, nil
	}
	// A reader that serves the generation must end before another one begins.
	p.keepOthers(func(b provider.Build) bool {
		return b != main.Build && slices.ContainsFunc(others, func(g *generation) bool { return g.Build == b })
	})
	if is.Build != main.Build && p.reader != nil && main.Generation > 0 {
		if _, err := p.reader.begin(ctx, main); err != nil { // its units must find a checkpoint
			return false, err
		}
		p.runner.cfg.Logger.Info("the projector feeds another generation", "projector", p.name, "generation", main.Generation, "state", main.state)
	}
	p.current.Store(main)
	if is.Build != main.Build && p.reader != nil {
		select {
		case p.reader.assigned <- struct{}{}:
		default:
		}
	}
	for _, g := range others {
		if err := p.feed(ctx, hard, g); err != nil {
			return false, err
		}
	}
	return false, nil
}

// choose returns the generation to which this program applies deliveries; nil if there is none.
func (p *projection) choose(ctx, hard context.Context, all []*generation) (main *generation, changed bool, err error) {
	version, is := p.opts.Version, live(all)
	if p.runner.src.isZero() {
		main, err = p.chooseForTool(all)
		return main, false, err
	}
	if p.reader == nil { // it cannot be rebuilt
		return is, false, nil
	}
	if is.revision == 0 && (version > 1 || p.creates) {
		if changed, err = p.createFirst(ctx, hard, is); changed || err != nil {
			return nil, changed, err
		}
	}
	if request := find(all, func(g *generation) bool { return g.state == provider.GenerationRequested }); request != nil && version >= is.Newest {
		return nil, true, unlessFenced(p.takeUp(ctx, hard, all, request))
	}
	own := find(all, func(g *generation) bool {
		return g.takes(version) && g.state != provider.GenerationRetired && g.How != scratch
	})
	switch {
	case is.takes(version):
		return is, false, nil
	case own != nil:
		return own, false, nil
	case version < is.Oldest:
		p.reportIdle("this program applies nothing: the live read model is that of a newer version", is)
		return nil, false, nil
	case p.opts.RebuildOnChange == NoRebuild:
		changed, err = change(ctx, p.runner.store, is, func(g *generation) { g.Newest = version })
		return is, changed, err
	}
	isRetired := func(g *generation) bool {
		return g.state == provider.GenerationRetired && g.How != scratch && g.takes(version)
	}
	if find(all, isRetired) != nil { // an operator has canceled or dropped it
		p.reportIdle("the read model of this version was canceled or dropped: request a rebuild, or deploy a newer version", is)
		return nil, false, nil
	}
	if build := find(all, (*generation).isBuild); build != nil {
		if build.How == scratch || build.Newest >= version {
			return nil, false, nil // it comes after that
		}
		changed, err = change(ctx, p.runner.store, build, func(g *generation) {
			g.state, g.Failed = provider.GenerationRetired, fmt.Sprintf("version %d of the program has replaced it", version)
		})
		return nil, changed, err
	}
	next := request(all, Rebuild{How: p.opts.RebuildOnChange})
	next.By, next.Reason = "kinora", fmt.Sprintf("version %d of the program", version)
	return nil, true, unlessFenced(p.takeUp(ctx, hard, all, next))
}

// unlessFenced returns nil for ErrFenced: another runner has changed the generations.
func unlessFenced(err error) error {
	if errors.Is(err, provider.ErrFenced) {
		return nil
	}
	return err
}

// chooseForTool returns the generation whose parked messages are applied without a running service.
func (p *projection) chooseForTool(all []*generation) (*generation, error) {
	version, is := p.opts.Version, live(all)
	if is.takes(version) || p.opts.RebuildOnChange == NoRebuild || !p.marks || p.opts.BrokerOnly {
		return is, nil
	}
	own := find(all, func(g *generation) bool {
		return g.takes(version) && g.state == provider.GenerationStandby
	})
	if own == nil {
		return nil, fmt.Errorf("%w: the live read model is that of version %d, and this program has version %d", ErrGeneration, is.Newest, version)
	}
	return own, nil
}

// reportIdle logs once a minute that the live generation is not fed as one could expect.
func (p *projection) reportIdle(why string, is *generation) {
	if now := p.runner.cfg.Clock(); now.Sub(p.reportedIdle) >= time.Minute {
		p.reportedIdle = now
		p.runner.cfg.Logger.Warn(why, "projector", p.name, "version", p.opts.Version, "live_generation", is.Generation,
			"live_versions", []int{is.Oldest, is.Newest})
	}
}

// watchBeats sets shared: a program that cannot feed main has fed another generation within a lease.
func (p *projection) watchBeats(all []*generation, main *generation) {
	now := p.runner.cfg.Clock()
	for _, g := range all {
		was, known := p.fed[g.Generation]
		if !known || was.number != g.Beat {
			was = beat{g.Beat, now}
			p.fed[g.Generation] = was
		}
		isOther := g.state == provider.GenerationStandby || g.state == provider.GenerationBuilding
		if isOther && g.How != scratch && !g.takes(p.opts.Version) && g.Beat > 0 && now.Sub(was.at) < p.runner.cfg.Lease {
			main.shared = true
		}
	}
}

// keepOthers stops the readers of other generations, except those for which keep returns true.
func (p *projection) keepOthers(keep func(provider.Build) bool) {
	p.runner.others.Lock()
	var stopped []*other
	for n, o := range p.others {
		if keep == nil || !keep(o.build()) {
			stopped = append(stopped, o)
			delete(p.others, n)
		}
	}
	p.runner.others.Unlock()
	for _, o := range stopped {
		o.stop()
	}
}

// feed starts a reader of another generation, or updates what a running one knows.
func (p *projection) feed(ctx, hard context.Context, g *generation) error {
	if o := p.others[g.Generation]; o != nil {
		if o.current.Load().revision < g.revision {
			o.current.Store(g)
		}
		return nil
	}
	one := p.in(g, true)
	if _, err := one.reader.begin(ctx, g); err != nil {
		return err
	}
	work, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	one.start(work, hard, &all)
	p.runner.others.Lock()
	defer p.runner.others.Unlock()
	p.others[g.Generation] = &other{one, func() {
		cancel()
		all.Wait()
	}}
	return nil
}
