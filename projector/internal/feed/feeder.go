// Package feed feeds the generations of projectors that are for this program: it chooses them, and starts and stops those
// who apply their messages.
package feed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora/projector/internal/apply"
	"github.com/kinora-go/kinora/projector/internal/deliver"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/projector/internal/plan"
	"github.com/kinora-go/kinora/projector/internal/rebuild"
	"github.com/kinora-go/kinora/projector/internal/unit"
	"github.com/kinora-go/kinora/provider"
)

// Feeder feeds the generations of one projector that are for this program.
type Feeder struct {
	Host      *model.Host
	Projector *model.Projector
	Me        plan.Program
	Receiver  *model.Receiver
	Crashes   *unit.Crashes
	Brakes    *apply.Brakes
	Missed    *follow.Missed
	Maker     *rebuild.Maker
	Kept      bool   // it keeps the generation that Keep was called with: a verification
	Reached   func() // called when the reader of a verification has caught up
	main      *crew  // applies deliveries
	mu        sync.Mutex
	others    map[int]*crew // of generations that it also feeds; mu protects it
	watch     watch
	announced provider.Build // to whose reader the handlers of this program were announced
	announces time.Time      // since when it is to announce them
}

// Init completes a Feeder. At first it feeds the first generation.
func (f *Feeder) Init() {
	f.others = map[int]*crew{}
	f.Maker = &rebuild.Maker{Host: f.Host, Projector: f.Projector, Worker: &unit.Worker{Host: f.Host, Projector: f.Projector, Group: &unit.Group{}, Crashes: f.Crashes}}
	f.main = f.newCrew(&generation.Row{Build: provider.Build{Projector: f.Projector.Name, Generation: 1}, State: provider.GenerationLive})
}

// Current returns the generation that deliveries are applied to. Its number is 0 if there is none.
func (f *Feeder) Current() *generation.Row { return f.main.current.Load() }

// Keep makes the feeder keep a generation.
func (f *Feeder) Keep(g *generation.Row) { f.main.current.Store(g) }

// Pool returns the workers of deliveries.
func (f *Feeder) Pool() *deliver.Pool { return f.main.pool }

// Start starts who applies deliveries, and the events of their generation.
func (f *Feeder) Start(ctx, hard context.Context, all *sync.WaitGroup) { f.main.start(ctx, hard, all) }

func (f *Feeder) feeding() (all []*crew) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.Current().Generation > 0 {
		all = append(all, f.main)
	}
	for _, c := range f.others {
		all = append(all, c)
	}
	return all
}

// Choose chooses the generation that deliveries are applied to, and makes the changes before that.
func (f *Feeder) Choose(ctx context.Context) error {
	for {
		all, err := f.Host.Generations(ctx, f.Projector.Name)
		if err != nil {
			return err
		}
		main, changed, err := f.choose(ctx, ctx, all)
		switch {
		case err != nil:
			return fmt.Errorf("projector %s: %w", f.Projector.Name, err)
		case changed:
			continue
		case main == nil:
			main = f.none()
		}
		f.main.current.Store(main)
		return nil
	}
}

// none is the generation of a program that feeds none.
func (f *Feeder) none() *generation.Row {
	return &generation.Row{Build: provider.Build{Projector: f.Projector.Name}}
}

// choose returns the generation to which this program applies deliveries; nil if there is none. changed: it has changed
// the generations.
func (f *Feeder) choose(ctx, hard context.Context, all []*generation.Row) (main *generation.Row, changed bool, err error) {
	if f.Me.Tool {
		marked := f.Projector.Marks && !f.Projector.Rules.BrokerOnly
		if main = plan.ForTool(f.Me, all, marked); main == nil {
			err = fmt.Errorf("%w: the live read model is that of version %d, and this program has version %d",
				model.ErrGeneration, generation.Live(all).Newest, f.Me.Version)
		}
		return main, false, err
	}
	p := plan.Of(f.Me, plan.Seen{Rows: all})
	if p.Do == plan.CreateFirst {
		if changed, err = f.Maker.CreateFirst(ctx, hard, p.Row); changed || err != nil {
			return nil, changed, err
		}
		p = plan.Of(f.Me, plan.Seen{Rows: all, Looked: true})
	}
	switch p.Do {
	case plan.TakeUp:
		if live := generation.Live(all); p.Row.Revision > 0 && live.Takes(f.Me.Version) {
			if f.announced == (provider.Build{}) { // others do not know yet what this program has
				return live, false, nil
			}
			err := f.Maker.Lacks(ctx, live)
			if errors.Is(err, model.ErrGeneration) { // the request waits
				f.reportIdle("a rebuild is requested: "+err.Error(), live)
				return live, false, nil
			} else if err != nil {
				return nil, false, err
			}
		}
		if err = f.Maker.TakeUp(ctx, hard, all, p.Row); errors.Is(err, provider.ErrFenced) { // another runner was first
			err = nil
		}
		return nil, true, err
	case plan.Widen:
		changed, err = generation.Change(ctx, f.Host.Store, p.Row, func(g *generation.Row) { g.Newest = f.Me.Version })
		return p.Row, changed, err
	case plan.GiveUp:
		changed, err = generation.Change(ctx, f.Host.Store, p.Row, func(g *generation.Row) {
			g.State, g.Failed = provider.GenerationRetired, fmt.Sprintf("version %d of the program has replaced it", f.Me.Version)
		})
		return nil, changed, err
	}
	if p.Why != "" {
		f.reportIdle(p.Why, generation.Live(all))
	}
	return p.Main, false, nil
}

// CreateNew creates the tables of the first generation, if there are no generations.
func (f *Feeder) CreateNew(ctx context.Context) error {
	all, err := f.Host.Generations(ctx, f.Projector.Name)
	if live := generation.Live(all); err == nil && live.IsNew() {
		_, err = f.Maker.CreateFirst(ctx, ctx, live)
	}
	return err
}

// look makes the feeder feed the generations that are for its version. changed: it has changed the generations.
func (f *Feeder) look(ctx, hard context.Context, all []*generation.Row) (changed bool, err error) {
	if f.Kept {
		return false, nil
	}
	if f.Me.Reads {
		if changed, err = f.Maker.RetireAbandoned(ctx, all); changed || err != nil {
			return changed, err
		}
	}
	main, changed, err := f.choose(ctx, hard, all)
	if changed || err != nil {
		return changed, err
	}
	if main == nil {
		main = f.none()
		if err := f.visit(ctx, generation.Live(all)); err != nil {
			return false, err
		}
	}
	f.watch.see(f, all, main)
	was := f.Current()
	if was.Build == main.Build && was.Revision > main.Revision { // changed since
		return false, nil
	}
	others := plan.Others(f.Me, all, main.Build)
	// A reader that serves the generation must end before another one begins.
	f.stopOthers(func(b provider.Build) bool {
		return b != main.Build && slices.ContainsFunc(others, func(g *generation.Row) bool { return g.Build == b })
	})
	if err := f.feedMain(ctx, was, main); err != nil {
		return false, err
	}
	for _, g := range others {
		if err := f.feedOther(ctx, hard, g); err != nil {
			return false, err
		}
	}
	return false, f.announce(ctx, main, others)
}

func (f *Feeder) feedMain(ctx context.Context, was, main *generation.Row) error {
	other := was.Build != main.Build && f.main.post != nil
	if other && main.Generation > 0 {
		if _, err := f.main.post.Begin(ctx, main); err != nil { // its units must find a checkpoint
			return err
		}
		f.Host.Logger.Info("the projector feeds another generation", "projector", f.Projector.Name, "generation", main.Generation, "state", main.State)
	}
	f.main.current.Store(main)
	if other || len(main.Coming) > 0 && main.Revision > was.Revision { // its reader is to record handlers
		f.main.assigned.Send()
	}
	return nil
}

// announce announces the handlers of this program to the reader of the generation that deliveries are applied to, once those of
// the others have recorded them, or had the time of a lease: a handler must not begin later in a generation that may become
// live.
func (f *Feeder) announce(ctx context.Context, main *generation.Row, others []*generation.Row) error {
	if f.main.post == nil || main.Generation == 0 || f.announced == main.Build {
		return nil
	}
	if f.announces.IsZero() {
		f.announces = f.Host.Clock()
	}
	for _, g := range others {
		limited, cancel := f.Host.Limited(ctx)
		c, err := f.Host.Store.Checkpoint(limited, g.Build)
		cancel()
		if err != nil {
			return err
		}
		if len(follow.HandlersOf(f.Projector).Added(c.Handlers)) > 0 && f.Host.Clock().Sub(f.announces) < f.Host.Lease {
			return nil
		}
	}
	if err := f.main.post.Announce(ctx, main.Build); err != nil {
		return err
	}
	f.announced, f.announces = main.Build, time.Time{}
	f.Projector.Announced()
	return nil
}

// feedOther starts a crew of another generation, or updates what a running one knows.
func (f *Feeder) feedOther(ctx, hard context.Context, g *generation.Row) error {
	if c := f.others[g.Generation]; c != nil { // only this goroutine writes others
		if c.current.Load().Revision < g.Revision {
			c.current.Store(g)
			c.assigned.Send()
		}
		return nil
	}
	c := f.newCrew(g)
	_, err := c.post.Begin(ctx, g)
	if err == nil {
		err = c.post.Announce(ctx, g.Build)
	}
	if err != nil {
		return err
	}
	work, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	c.start(work, hard, &all)
	c.stop = func() {
		cancel()
		all.Wait()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.others[g.Generation] = c
	return nil
}

// stopOthers stops the crews of other generations, except those for which keep returns true.
func (f *Feeder) stopOthers(keep func(provider.Build) bool) {
	f.mu.Lock()
	var stopped []*crew
	for n, c := range f.others {
		if keep == nil || !keep(c.current.Load().Build) {
			stopped = append(stopped, c)
			delete(f.others, n)
		}
	}
	f.mu.Unlock()
	for _, c := range stopped {
		c.stop()
	}
}

// beat records when a counter that other programs raise was seen to change.
type beat struct {
	number int64
	at     time.Time
}

// watch is what a feeder has seen of other programs.
type watch struct {
	fed     map[int]beat // by generation: when its Beat changed last
	visits  beat         // when Visits of the live generation changed last
	visited time.Time    // when this program called visit last
	idle    time.Time    // when reportIdle logged last
	tries   int          // of a look that fails
	retryAt time.Time    // of the next one
}

// see sets Shared of main: programs of another version apply deliveries to another generation.
func (w *watch) see(f *Feeder, all []*generation.Row, main *generation.Row) {
	now, lease := f.Host.Clock(), f.Host.Lease
	if w.fed == nil {
		w.fed = map[int]beat{}
	}
	for _, g := range all {
		last, known := w.fed[g.Generation]
		if !known || last.number != g.Beat {
			last = beat{g.Beat, now}
			w.fed[g.Generation] = last
		}
		if g.IsFed() && !g.Takes(f.Me.Version) && g.Beat > 0 && now.Sub(last.at) < lease {
			main.Shared = true
		}
	}
	if main.IsLive() {
		if main.Visits != w.visits.number {
			w.visits = beat{main.Visits, now}
		}
		main.Shared = main.Shared || main.Visits > 0 && now.Sub(w.visits.at) < lease
	}
}

// visit shows the programs that feed the live generation that this one does not, and may get its
// deliveries.
func (f *Feeder) visit(ctx context.Context, live *generation.Row) error {
	now := f.Host.Clock()
	if now.Sub(f.watch.visited) < f.Host.Lease/3 {
		return nil
	}
	f.watch.visited = now
	_, err := generation.Change(ctx, f.Host.Store, live, func(g *generation.Row) { g.Visits++ })
	return err
}

// reportIdle logs once a minute that the live generation is not fed as one could expect.
func (f *Feeder) reportIdle(why string, live *generation.Row) {
	if now := f.Host.Clock(); now.Sub(f.watch.idle) >= time.Minute {
		f.watch.idle = now
		f.Host.Logger.Warn(why, "projector", f.Projector.Name, "version", f.Me.Version, "live_generation", live.Generation,
			"live_versions", []int{live.Oldest, live.Newest})
	}
}

// Worker returns a worker of units that belongs to none of the goroutines.
func (f *Feeder) Worker() *unit.Worker {
	return f.main.applier(model.MaxBatch, &f.main.group, f.main.asker).Worker
}

// Parked returns the messages of rows of the projector.
func (f *Feeder) Parked(ctx context.Context, rows []provider.Parked) ([]*model.Message, error) {
	return f.main.parked.Messages(ctx, rows)
}

// Beginning returns the place after which a generation begins: see follow.Post.
func (f *Feeder) Beginning(ctx context.Context, source int) (provider.LogPlace, error) {
	return f.main.post.Beginning(ctx, source)
}

// Reader returns a reader of a generation at a checkpoint. It does not run, and has no lease.
func (f *Feeder) Reader(g *generation.Row, c provider.Checkpoint) *follow.Reader {
	return f.newCrew(g).post.Open(g, c)
}
