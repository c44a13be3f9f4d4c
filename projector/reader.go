package projector

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
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
	// of which events of unregistered types are read too
	categories []string
	terms      claim.Terms // of its lease

	at       provider.Checkpoint // as this reader has written it
	read     int64               // every event up to it is applied; may be behind at.Place
	server   string              // LogPage.Server of the last page
	verified time.Time           // when the log was last compared with the checkpoint
	suspects int                 // number of next events that may have been in flight when a reader crashed
	page     *provider.LogPage   // whose events the worker applies; nil: without moving the checkpoint
	last     *inbound            // of the page
	next     *pageAhead
	closings int                 // attempts to go live that were broken off
	closeAt  time.Time           // when the next one may begin
	asked    int64               // unsettled events up to it were completed
	waitsFor provider.OpenAppend // that delays it
	reported time.Time           // when this was last reported
	older    time.Time           // since when this program is older than the recorded one and could read
}

func newReader(p *projection, keeps provider.Keeps, number int) *reader {
	cfg := &p.runner.cfg
	batch := cmp.Or(cfg.Batch, logBatch)
	if !keeps.Atomic {
		batch = 1
	}
	r := &reader{
		worker: &worker{projection: p, number: number, batch: batch, size: batch},
		log:    p.runner.log, isSource: p.runner.src.log != nil, marks: keeps.Markers,
		terms: claim.Terms{Holder: p.runner.id, Token: claim.NewToken(), Lease: cfg.Lease},
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
	cfg, store := &r.runner.cfg, r.runner.store
	for ctx.Err() == nil {
		has, err := store.AcquireLease(ctx, r.leaseName(), r.terms)
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
			wait(ctx, cfg.Lease/3)
		case err != nil && !errors.Is(err, provider.ErrFenced):
			r.reportError(err)
			wait(ctx, cfg.Lease/3)
		case !has:
			if id, err := r.log.LogID(ctx); err == nil {
				r.runner.logID.Store(&id)
			}
			wait(ctx, cfg.Lease/3)
		default:
			wait(ctx, readMin)
		}
	}
}

func (r *reader) leaseName() string { return "reader/" + r.name }

// Pauses of a reader that finds nothing to do. An append through the same provider ends them.
const (
	readMin = 5 * time.Millisecond
	readMax = time.Second
)

// serve reads until ctx ends, the lease is lost, or an error. It returns ErrFenced if another
// reader has changed the checkpoint.
func (r *reader) serve(ctx, hard context.Context) error {
	ctx, lost := context.WithCancel(ctx)
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		r.renew(ctx, lost)
	}()
	defer func() {
		lost()
		<-renewed
		if r.next != nil {
			<-r.next.done
		}
		r.detach(context.WithoutCancel(ctx))
	}()
	if err := r.attach(ctx); err != nil {
		return err
	}
	for tries, pause := 0, readMin; ctx.Err() == nil; {
		var appended <-chan struct{}
		if w, ok := r.log.(provider.LogWaker); ok && r.at.Mode == provider.ModeCatchUp {
			appended = w.Appended()
		}
		more, err := r.step(ctx, hard)
		if tries++; err == nil {
			tries = 0
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, provider.ErrFenced), errors.Is(err, ErrLogChanged):
			return err
		case errors.Is(err, errServer):
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
		default:
			pause = min(2*pause, readMax)
		}
		select {
		case <-ctx.Done():
		case <-appended:
			pause = readMin
		case <-time.After(pause):
		}
	}
	return nil
}

// renew extends the lease three times per lease. It calls lost when another reader has the lease,
// or when it could not be extended in time.
func (r *reader) renew(ctx context.Context, lost func()) {
	lease, clock := r.runner.cfg.Lease, r.runner.cfg.Clock
	for last := clock(); ; {
		if wait(ctx, lease/3); ctx.Err() != nil {
			return
		}
		limited, cancel := context.WithTimeout(ctx, lease/3)
		has, err := r.runner.store.AcquireLease(limited, r.leaseName(), r.terms)
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
		if err := r.verify(ctx, r.at); err != nil {
			return false, err
		}
		r.verified = now
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
	page, err := r.readPage(ctx)
	if err == nil {
		err = r.check(ctx, &page)
	}
	if err != nil {
		return false, err
	}
	r.reportWaiting(page.Waiting)
	before := r.read
	if msgs := r.accept(page.Events); len(msgs) > 0 {
		r.page, r.last = &page, msgs[len(msgs)-1]
		r.apply(ctx, hard, msgs)
		r.page = nil
		if r.at.Place != page.End {
			return false, cmp.Or(ctx.Err(), provider.ErrFenced)
		}
	} else if page.End.Position-r.at.Place.Position >= idleAdvance {
		if err := r.advance(hard, page.End); err != nil {
			return false, err
		}
	}
	r.read = page.End.Position
	switch {
	case r.read > before && page.More:
		return true, nil
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
	if r.runner.cfg.Clock().Before(r.closeAt) {
		return false, nil
	}
	return true, r.setMode(ctx, provider.ModeClosing)
}

// pageAhead is a page that is read while the one before it is applied.
type pageAhead struct {
	after int64
	done  chan struct{}
	page  provider.LogPage
	err   error
}

// readPage returns the page behind r.read, and begins to read the one after it.
func (r *reader) readPage(ctx context.Context) (provider.LogPage, error) {
	ahead := r.next
	if ahead == nil || ahead.after != r.read {
		ahead = r.readAhead(ctx, r.read)
	}
	r.next = nil
	<-ahead.done
	if ahead.err == nil && ahead.page.More && ahead.page.End.Position > ahead.after {
		r.next = r.readAhead(ctx, ahead.page.End.Position)
	}
	return ahead.page, ahead.err
}

func (r *reader) readAhead(ctx context.Context, after int64) *pageAhead {
	a := &pageAhead{after: after, done: make(chan struct{})}
	go func() {
		defer close(a.done)
		a.page, a.err = r.pageAfter(ctx, provider.LogQuery{After: after, Filter: r.filter, Limit: r.batch})
	}()
	return a
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
	if err := r.verify(ctx, r.at); err != nil {
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

// accept returns the events that the projector takes.
func (r *reader) accept(events []eventstore.Raw) []*inbound {
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
	u.intent.Reader = r.identity()
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
	u := provider.Unit{Projector: r.name, Reader: r.identity(), Advance: r.advanceTo(to)}
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
