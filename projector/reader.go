package projector

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// reader applies the events of a log to a projector. Of the readers of a projector, in all
// processes, the one with the lease works.
//
// In ModeCatchUp it applies settled events in batches. Each is a transaction that also moves the
// checkpoint. If the log is not the only source, the projector then goes live: deliveries are
// applied, and the reader applies the events that were not delivered (complete.go).
// See docs/adr/0020.
type reader struct {
	*worker
	log      provider.Log
	isSource bool                 // the runner reads only the log, so the projector never goes live
	marks    bool                 // the store keeps markers
	filter   eventstore.LogFilter // empty if there are categories: see accept
	// whose events of unregistered types are read too
	categories []string
	named      map[named][]string // the handlers that have or had a name
	terms      claim.Terms        // of its lease

	segment int                  // the number of the segment that it reads; 0: all events, or none while there are segments
	before  *provider.Checkpoint // has what the segments of earlier splits have applied; nil: nothing
	late    []provider.Began     // handlers that begin behind the checkpoint
	nearEnd bool                 // few events of a rebuild are left
	endSeen time.Time            // when lookForEnd was called last
	pushed  time.Time            // when it moved past events of others last

	serving      *generation       // that it reads for
	lease        string            // its name
	limit        provider.LogPlace // the place of the live generation, if serving is another one
	limited      time.Time         // when that was read
	moved        time.Time         // when it was seen to move; at first, shortly before
	retrying     time.Time         // since when the switch waits for parked messages
	passing      sync.Mutex        // protects passed
	passed       map[int]passed    // by generation; see notPassed
	stood        time.Time         // since when it has not moved, although it had events to apply
	stalled      time.Time         // when that was logged last
	applied      int64             // events of the rebuild; see generationData
	chases       bool              // it has applied the events that existed when the rebuild began
	recorded     time.Time         // when progress was stored last
	seenVersions map[schemaVersion]bool
	unseen       []schemaVersion // not stored yet

	assigned chan struct{}       // receives when the projection feeds another generation
	at       provider.Checkpoint // as this reader has written it
	read     int64               // every event up to it is applied; may be behind at.Place
	atHead   bool                // there were no others when it was read
	resting  bool                // it has had no work for some time
	server   string              // LogPage.Server of the last page
	verified time.Time           // when the log was last compared with the checkpoint
	suspects int                 // number of next events that may have been in flight when a reader crashed
	page     *provider.LogPage   // whose events the worker applies; nil: without moving the checkpoint
	last     *inbound            // of the page
	next     *pageAhead
	closings int                    // attempts to go live that were broken off
	closeAt  time.Time              // when the next one may begin
	waiting  map[provider.Lane]bool // parked lanes, whose events the last step leaves to the reader
	asked    int64                  // unsettled events up to it were completed
	waitsFor provider.OpenAppend    // that delays it
	reported time.Time              // when this was last reported
	older    time.Time              // since when this program is older than the recorded one and could read

	// After the read model has gone back to an earlier state: see restore.go.
	cameAgain int      // events up to at.Lost that were applied again
	restores  bool     // the worker applies events that were parked
	unshown   bool     // the store may show other tables
	skips     []string // sorted ids of events that operators have skipped
}

func newReader(p *projection, number int) *reader {
	cfg := &p.runner.cfg
	batch := cmp.Or(cfg.Batch, logBatch)
	r := &reader{
		worker: &worker{projection: p, number: number, batch: batch, size: batch}, seenVersions: map[schemaVersion]bool{}, passed: map[int]passed{}, waiting: map[provider.Lane]bool{},
		assigned: make(chan struct{}, 1),
		log:      p.runner.log, isSource: p.runner.src.log != nil, marks: p.keeps.Markers,
		named: namedBy(p.byType), terms: claim.Terms{Holder: p.runner.id, Token: claim.NewToken(), Lease: cfg.Lease},
	}
	if r.categories = p.runner.src.categories; len(r.categories) == 0 {
		for eventType := range p.byType {
			r.filter.Types = append(r.filter.Types, eventType)
		}
		slices.Sort(r.filter.Types)
	}
	return r
}

// run reads the log while this reader has the lease, until ctx ends.
func (r *reader) run(ctx, hard context.Context) {
	defer r.endBackground()
	defer r.beginLoop()()
	cfg := &r.runner.cfg
	for ctx.Err() == nil {
		r.serving = r.current.Load()
		if r.serving.Generation == 0 {
			wait(ctx, followFast)
			continue
		}
		r.lease = r.leaseName()
		has, err := r.runner.acquire(ctx, r.lease, r.terms)
		if err == nil && has {
			err = r.serve(ctx, hard)
		} else {
			r.older = time.Time{}
		}
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, ErrLogChanged):
			r.runner.end(err)
			return
		case errors.Is(err, errOlder):
			// At a random time: a newer program asks for the lease at fixed intervals, and must not find
			// it taken each time.
			wait(ctx, cfg.Lease/6+rand.N(cfg.Lease/3))
		case errors.Is(err, provider.ErrEnded) && r.runner.assigned:
			r.runner.end(err) // no other generation follows
			return
		case errors.Is(err, provider.ErrEnded):
			r.runner.followNow()
			wait(ctx, followFast)
		case err != nil && !errors.Is(err, provider.ErrFenced):
			r.reportError(err)
			wait(ctx, cfg.Lease/3)
		case !has:
			if id, err := r.log.LogID(ctx); err == nil {
				r.runner.logID.Store(&id)
			}
			if !r.serving.isLive() {
				wait(ctx, min(followFast, cfg.Lease/3))
				continue
			}
			wait(ctx, cfg.Lease/3)
		default:
			wait(ctx, readMin)
		}
	}
}

func (r *reader) leaseName() string { return "reader/" + r.build().String() }

// Pauses of a reader that finds nothing to do. An append through the same provider ends them.
const (
	readMin = 5 * time.Millisecond
	readMax = time.Second
	// while deliveries are left to readers, and while a build is near the live generation
	sharedMax = 20 * time.Millisecond
)

// serve reads until ctx ends, the lease is lost, or an error. It returns ErrFenced if another
// reader has changed the checkpoint.
func (r *reader) serve(ctx, hard context.Context) error {
	ctx, lost := context.WithCancel(ctx)
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		r.runner.renew(ctx, r.lease, r.terms, lost)
	}()
	defer func() {
		lost()
		<-renewed
		if r.next != nil {
			<-r.next.read
		}
		r.detach(context.WithoutCancel(ctx))
	}()
	if err := r.attach(ctx); err != nil {
		return err
	}
	if r.segment == 0 {
		if err := r.restore(ctx, hard); err != nil {
			return err
		}
	}
	for tries, pause := 0, readMin; ctx.Err() == nil; {
		var appended <-chan struct{}
		if w, ok := r.log.(provider.LogWaker); ok && r.at.Mode == provider.ModeCatchUp {
			appended = w.Appended()
		}
		if g := r.current.Load(); g.Build != r.serving.Build || g.isLive() != r.serving.isLive() {
			return nil // it serves another generation now, or in another way
		} else {
			r.serving = g
		}
		more, err := r.step(ctx, hard)
		r.loop.Rest()
		if tries++; err == nil {
			tries = 0
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, provider.ErrFenced), errors.Is(err, ErrLogChanged), errors.Is(err, provider.ErrEnded):
			return err
		case errors.Is(err, errServer), errors.Is(err, errTurn):
			pause = readMin
		case err != nil:
			r.reportError(err)
			pause, _ = r.runner.cfg.Retry.Delay(tries)
			r.next = nil
		case more:
			pause = readMin
			continue
		case r.at.Mode == provider.ModeLive:
			pause = min(max(r.runner.cfg.Grace/5, readMin), readMax)
		case r.serving.shared || r.serving.isBuild() || r.serving.Promoted:
			pause = min(2*pause, sharedMax)
		default:
			pause = min(2*pause, readMax)
		}
		r.resting = pause == readMax
		select {
		case <-ctx.Done():
		case <-appended:
			pause, r.resting = readMin, false
		case <-r.assigned:
		case <-time.After(pause):
		}
	}
	return nil
}

// acquire acquires a lease. If ctx ends meanwhile, it waits for the reply, and releases the lease: a
// statement that was canceled may still acquire it, and then no program had it until it expires.
func (r *Runner) acquire(ctx context.Context, name string, terms claim.Terms) (bool, error) {
	patient, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(terms.Lease/3, r.cfg.Timeout))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, cancel) })()
	has, err := r.store.AcquireLease(patient, name, terms)
	if err = cmp.Or(ctx.Err(), err); err != nil {
		r.release(ctx, name, terms)
		return false, err
	}
	return has, nil
}

// release releases a lease. If that fails, the lease expires.
func (r *Runner) release(ctx context.Context, name string, terms claim.Terms) {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = r.store.ReleaseLease(limited, name, terms.Token)
}

// renew extends a lease three times per lease. It calls lost when another program has the lease, or
// when it could not be extended in time.
func (r *Runner) renew(ctx context.Context, name string, terms claim.Terms, lost func()) {
	lease, clock := terms.Lease, r.cfg.Clock
	for last := clock(); ; {
		if wait(ctx, lease/3); ctx.Err() != nil {
			return
		}
		limited, cancel := context.WithTimeout(ctx, lease/3)
		has, err := r.store.AcquireLease(limited, name, terms)
		cancel()
		if err == nil {
			last = clock()
		}
		if err == nil && !has || clock().Sub(last) > lease*2/3 {
			lost()
			return
		}
	}
}

// step does one thing. more reports whether the next one can follow at once.
func (r *reader) step(ctx, hard context.Context) (more bool, err error) {
	if now := r.runner.cfg.Clock(); now.Sub(r.verified) > r.runner.cfg.Lease/3 {
		if err := r.verify(ctx, r.build(), r.at); err != nil {
			return false, err
		}
		if err := r.checkModel(ctx); err != nil {
			return false, err
		}
		r.verified = now
	}
	if err := r.showLive(ctx, hard); err != nil {
		return false, err
	}
	if err := r.record(ctx); err != nil {
		return false, err
	}
	if r.at.Mode == provider.ModeCatchUp && r.segment == 0 {
		is, err := r.resplit(ctx)
		if err != nil {
			return false, err
		}
		if is {
			return r.followSegments(ctx)
		}
	}
	if r.serving.Paused && r.serving.isReplaying() || r.isPaused() {
		return false, nil
	}
	switch r.at.Mode {
	case provider.ModeCatchUp:
		return r.catchUpPage(ctx, hard)
	case provider.ModeClosing:
		return true, r.goLive(ctx, hard)
	default:
		return r.completePages(ctx, hard)
	}
}

// idleAdvance is how far the checkpoint may be behind a log that has no events for the projector.
const idleAdvance = 1000

// catchUpPage applies a page of settled events, and moves the checkpoint.
func (r *reader) catchUpPage(ctx, hard context.Context) (more bool, err error) {
	if r.atHead && r.resting && r.mayRest() {
		if head, err := r.runner.head(ctx); err == nil && head == r.read {
			return false, nil
		}
	}
	page, msgs, err := r.readPage(ctx)
	if err == nil {
		err = r.check(ctx, &page)
	}
	if err == nil && !r.serving.isLive() {
		err = r.trail(ctx, &page)
	}
	if err != nil {
		return false, err
	}
	r.reportWaiting(page.Waiting)
	before, began, wasRestored := r.read, r.runner.cfg.Clock(), r.isRestored()
	r.saw(page.Events)
	msgs = slices.DeleteFunc(msgs, func(m *inbound) bool { return m.position > page.End.Position })
	if err := r.setReplayed(ctx, msgs); err != nil {
		return false, err
	}
	if len(msgs) > 0 {
		r.page, r.last = &page, msgs[len(msgs)-1]
		err := r.inTurn(ctx, hard, msgs, r.setReplayed, func(ctx, hard context.Context) { r.apply(ctx, hard, msgs) })
		r.page = nil
		if err != nil {
			return false, err
		}
		if r.at.Place != page.End {
			return false, cmp.Or(ctx.Err(), provider.ErrFenced)
		}
	} else if r.isToAdvance(page.End) {
		if err := r.advance(hard, page.End); err != nil {
			return false, err
		}
	}
	r.read, r.atHead = page.End.Position, !page.More && len(page.Waiting) == 0
	r.applied += int64(len(msgs))
	r.endRestored(wasRestored)
	switch {
	case r.read > before && page.More:
		r.throttle(ctx, len(msgs), r.runner.cfg.Clock().Sub(began))
		return true, nil
	case r.segment > 0:
		if len(page.Events) == 0 && r.read > before {
			wait(ctx, readMin)
		}
		return false, nil
	case r.before != nil: // until the checkpoint has passed the segments that were ahead
		return r.read > before, nil
	case !r.serving.isLive():
		return r.reached(ctx, hard)
	case r.isSource && r.serving.isReplaying():
		return r.caughtUp(ctx)
	case r.isSource:
		if len(page.Events) == 0 && r.read > before {
			wait(ctx, readMin) // other projectors' events wake this reader too
		}
		return false, nil
	case len(page.Waiting) > 0:
		full, err := r.completeUnsettled(ctx, hard, 0)
		if full || err != nil {
			return full, err
		}
	}
	if r.serving.shared && len(page.Waiting) == 0 {
		if _, err := r.caughtUp(ctx); err != nil { // it does not go live: see leave.go
			return false, err
		}
	}
	if r.serving.shared || r.runner.cfg.Clock().Before(r.closeAt) {
		return false, nil
	}
	return true, r.setMode(ctx, provider.ModeClosing)
}

// mayRest reports whether a reader that has applied all events only waits for others.
func (r *reader) mayRest() bool {
	return r.isSource && r.serving.isLive() && !r.serving.isReplaying() && !r.serving.shared && r.before == nil && !r.isRestored()
}

// headAge is how old the head of the log may be that readers without work compare with.
const headAge = 100 * time.Millisecond

// head returns the position of the last visible event, for all readers of the runner that have no work: then a
// hundred projectors ask no more than one.
func (r *Runner) head(ctx context.Context) (int64, error) {
	r.heads.Lock()
	defer r.heads.Unlock()
	if now := r.cfg.Clock(); r.headRead.IsZero() || now.Sub(r.headRead) >= headAge {
		limited, cancel := context.WithTimeout(ctx, r.cfg.Timeout)
		defer cancel()
		position, err := r.log.LogPosition(limited, eventstore.From{Now: true})
		if err != nil {
			return 0, err
		}
		r.headAt, r.headRead = position, now
	}
	return r.headAt, nil
}

// isToAdvance reports whether the checkpoint moves to the end of a page without messages. A segment
// moves soon, because the checkpoint waits for all of them.
func (r *reader) isToAdvance(end provider.LogPlace) bool {
	ahead := end.Position - r.at.Place.Position
	if r.segment == 0 {
		return ahead >= idleAdvance || ahead > 0 && r.before != nil
	}
	now := r.runner.cfg.Clock()
	if ahead < idleAdvance && (ahead <= 0 || now.Sub(r.pushed) < time.Second) {
		return false
	}
	r.pushed = now
	return true
}

func (r *reader) pageAfter(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	ctx, cancel := context.WithTimeout(ctx, r.runner.cfg.Timeout)
	defer cancel()
	return r.log.LogPage(ctx, q)
}

// errServer: the page was read from another server than the one before it.
var errServer = errors.New("the server of the log was restarted or replaced")

// check is called with each page before it is applied. If the server has changed, the log may be an
// older one: the reader compares its checkpoint with the log, and begins there again.
func (r *reader) check(ctx context.Context, page *provider.LogPage) error {
	if page.Server == r.server {
		return nil
	}
	if err := r.verify(ctx, r.build(), r.at); err != nil {
		return err
	}
	isFirst := r.server == ""
	if r.server = page.Server; isFirst {
		return nil
	}
	r.read, r.asked, r.next = r.at.Place.Position, 0, nil
	return errServer
}

// pageOn returns a page that was checked.
func (r *reader) pageOn(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	page, err := r.pageAfter(ctx, q)
	if err == nil {
		err = r.check(ctx, &page)
	}
	return page, err
}

// accept returns the events that the projector takes. If the generation is replaying, it asks which
// of them another generation has applied.
func (r *reader) accept(ctx context.Context, events []eventstore.Raw) ([]*inbound, error) {
	msgs := r.messages(events)
	return msgs, r.setReplayed(ctx, msgs)
}

// messages returns the messages of the events that the projector takes.
func (r *reader) messages(events []eventstore.Raw) []*inbound {
	msgs, log := make([]*inbound, 0, len(events)), r.runner.logID.Load().String()
	for _, raw := range events {
		if len(r.byType[raw.Type]) == 0 && !slices.Contains(r.categories, eventstore.Category(raw.Stream)) {
			continue
		}
		if m := r.projection.accept(logged(raw, log), nil); m != nil {
			m.mark, m.position = r.marks, raw.Position
			msgs = append(msgs, m)
		}
	}
	return msgs
}

// prepare completes a unit of the reader's worker. If the reader catches up, the unit moves the
// checkpoint to its last event, or to the end of the page.
func (r *reader) prepare(u *unit) {
	if u.intent.IsReplay() {
		return
	}
	u.intent.Reader, u.intent.Restore, u.intent.Segment = r.identity(), r.restores, r.segment
	u.intent.Once = u.intent.Once || r.isRestored() // so that events that are still applied are not counted
	if r.page == nil {
		return
	}
	m := u.msgs[len(u.msgs)-1]
	to := logPlace(m.raw)
	if m == r.last {
		to = r.page.End
	}
	u.intent.Advance = r.advanceTo(to)
}

func (r *reader) identity() *provider.Reader {
	return &provider.Reader{Mode: r.at.Mode, Token: r.at.Token}
}

func (r *reader) advanceTo(to provider.LogPlace) *provider.Advance {
	return &provider.Advance{From: r.at.Place.Position, To: to, Mode: r.at.Mode, Token: r.at.Token}
}

// committed is called after each unit of the projector.
func (r *reader) committed(u *unit) {
	if u.intent.Advance != nil {
		r.at.Place = u.intent.Advance.To
		r.suspects = max(r.suspects-len(u.msgs), 0)
		r.countAgain(u.applied)
		return
	}
	if u.worker == r.worker && (r.isRestored() || r.restores) {
		r.countAgain(u.applied)
		return
	}
	if u.worker == r.worker && r.at.Mode != provider.ModeLive {
		return // the projector catches up: its events were left to the reader
	}
	var missed []*inbound
	for _, m := range u.applied {
		if m.isLogged {
			missed = append(missed, m)
		}
	}
	if len(missed) > 0 {
		r.reportMissed(missed)
	}
}

// advance moves the checkpoint without applying anything.
func (r *reader) advance(hard context.Context, to provider.LogPlace) error {
	ctx, cancel := context.WithTimeout(hard, r.runner.cfg.Timeout)
	defer cancel()
	u := provider.Unit{Projector: r.name, Generation: r.build().Generation, Reader: r.identity(), Advance: r.advanceTo(to), Segment: r.segment}
	err := r.do(ctx, u, func(context.Context, caller, provider.Found) (provider.Closing, error) {
		return provider.Closing{}, nil
	})
	if err == nil {
		r.at.Place = to
	}
	return err
}

func (r *reader) reportError(err error) {
	if provider.ClassOf(err) == ClassShutdown {
		return
	}
	attrs := []any{"projector", r.name}
	if errors.Is(err, eventstore.ErrUnsafeLog) { // its text has no data of users
		attrs = append(attrs, "reason", err.Error())
	}
	r.runner.report(slog.LevelWarn, "log not read", err, attrs...)
}

// reportWaiting logs an open append that delays the reader for more than a second, every ten
// seconds.
func (r *reader) reportWaiting(open []provider.OpenAppend) {
	if r.segment > 0 && r.segment != r.at.Split().First {
		return // one of the segments does it
	}
	now := r.runner.cfg.Clock()
	if !slices.Contains(open, r.waitsFor) {
		if r.waitsFor = (provider.OpenAppend{}); len(open) > 0 {
			r.waitsFor = open[0]
		}
		r.reported = now.Add(time.Second - reportEvery)
	}
	if r.waitsFor != (provider.OpenAppend{}) && now.Sub(r.reported) >= reportEvery {
		r.reported = now
		r.runner.cfg.Logger.Warn("an open append delays the reading of the log",
			"projector", r.name, "backend", r.waitsFor.Backend, "since", r.waitsFor.Since)
	}
}

const reportEvery = 10 * time.Second
