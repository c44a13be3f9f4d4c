package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

var readersCell = &cell{
	// Promise: G7.4, G7.7
	name: "readers", number: 31, summary: "three processes share the readers of ten projectors from the log, killed, and stopped past the lease",
	full: 2 * time.Minute, short: 4 * time.Second, alone: true, fails: true,
	requires: []string{"kill_reader", "zombie_reader", "exit"}, requiresLong: []string{"fenced"}, run: runReaders,
}

const (
	readerProcesses  = 3
	readerProjectors = 10
	readerEvents     = 100_000 // events of a full run
	readerEventsFew  = 4_000   // events of a short run
	readerRateFew    = 250     // events per second of a short run
	// readerAhead is how far the slowest projector may be behind the log before the producer waits.
	readerAhead = 5_000
	// readerUnit is the most events of a unit. While the machine is loaded, a unit of 500 takes a
	// second, and a kill loses it.
	readerUnit = 100
)

func runReaders(r *run) {
	r.server(brokerConfig{}, idleLimit)
	r.readerTables(readerProjectors)
	// With three attempts, kills and stops alone can make a message stuck that is not at fault.
	const attempts = 4
	events, rate, lease := readerEvents, 0, lease
	if r.suite.short {
		events, rate, lease = readerEventsFew, readerRateFew, time.Second
	}
	r.child(producing, func(s *settings) {
		s.Rate, s.Streams, s.Hot, s.Length, s.More = rate, 400, 0, 20, map[string]string{"unrouted": "yes"}
	})
	for range readerProcesses {
		p := r.child(reading, func(s *settings) {
			s.Conns, s.Attempts, s.Lease, s.Unit = 24, attempts, lease, readerUnit
			s.More = map[string]string{"projectors": strconv.Itoa(readerProjectors), "failsOneIn": "2000", "poison": "yes"}
		})
		p.onEnd(func(code int) bool {
			if code == poisonStatus {
				r.inject("exit", 1)
				go p.revive()
			}
			return code == poisonStatus
		})
	}
	for _, p := range r.all {
		p.awaitReady()
	}
	w := r.watchProgress(readerProjectors)
	r.needShares(readerProjectors)
	r.gauge("fenced", func() int { return int(r.sum(reading, wordLate)) })
	until, n := int64(0), 0
	r.prove(func() {
		for until += int64(r.part(events)); r.sum(producing, wordAcked) < until; n++ {
			counts, p := false, r.of(reading)[r.intn(readerProcesses)]
			p.awaitReady()
			w.longest()
			if n%3 == 1 {
				counts = r.stopReader(p, lease)
			} else {
				p.lives.Lock()
				p.awaitBusy()
				counts = p.restart()
				p.lives.Unlock()
			}
			r.sleep(r.between(2*lease, 4*lease)) // others have taken over by then
			if stood := w.longest(); counts {
				w.stood = append(w.stood, stood)
			}
		}
	})
	w.fed.Store(true)
	var poison []string
	for _, p := range readerPoisons {
		poison = append(poison, p.stream)
	}
	r.awaitRead(w)
	r.forgive(poison...)
	r.awaitRead(w) // also what was held behind them
	r.judgeReaders(w, attempts, lease)
}

// revive begins the next life of a process that ended by itself, unless that has happened.
func (p *process) revive() {
	p.lives.Lock()
	defer p.lives.Unlock()
	if isClosed(p.life()) {
		if err := p.begin(); err != nil {
			p.r.fail("start %s: %v", p.Name, err)
		}
	}
}

// stopReader stops a process with an open unit for longer than its lease, so that others take its
// readers over, and then resumes it. It reports whether the process had one.
func (r *run) stopReader(p *process, lease time.Duration) bool {
	p.lives.Lock()
	defer p.lives.Unlock()
	if !p.stopBusy() {
		return false
	}
	open := p.open()
	r.sleep(r.between(lease+lease/4, 2*lease))
	p.signal(syscall.SIGCONT)
	if open {
		r.inject("zombie_reader", 1)
	}
	return open
}

// progress watches the checkpoints of the readers, and lets the producer wait for them.
type progress struct {
	r    *run
	n    int         // number of projectors
	fed  atomic.Bool // no more events are needed
	all  sync.WaitGroup
	done chan struct{}

	mu       sync.Mutex
	position map[string]int64
	since    map[string]time.Time // when a projector last moved, or had nothing to do
	most     time.Duration        // the longest time that one did not move, since longest was called
	stood    []time.Duration      // the same after each fault
	idle     bool                 // every projector is at the head
}

func (r *run) watchProgress(projectors int) *progress {
	w := &progress{r: r, n: projectors, done: make(chan struct{}), position: map[string]int64{}, since: map[string]time.Time{}}
	w.all.Go(func() {
		for !isClosed(w.done) {
			if err := w.look(r.suite.ctx); err != nil && !isClosed(w.done) {
				r.trace.printf("progress %v", err)
			}
			pause(r.suite.ctx, 20*time.Millisecond)
		}
	})
	r.cleanup = append(r.cleanup, w.stop)
	return w
}

func (w *progress) stop() {
	if !isClosed(w.done) {
		close(w.done)
	}
	w.all.Wait()
}

func (w *progress) atHead() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.idle
}

// longest returns the longest time that a projector behind the head did not move, since it was last
// called.
func (w *progress) longest() (most time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.r.measure("stood_ms", w.most)
	most, w.most = w.most, 0
	return most
}

// look reads the checkpoints, and measures for how long a projector behind the head has not moved.
func (w *progress) look(ctx context.Context) error {
	rows, err := w.r.pool.Query(ctx, `
		select c.projector, c.position, (select coalesce(max(position), 0) from kinora.events) from kinora.checkpoints c`)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var name string
	var position, head int64
	least, seen, now := int64(1)<<62, 0, time.Now()
	_, err = pgx.ForEachRow(rows, []any{&name, &position, &head}, func() error {
		if position != w.position[name] || position >= head || w.since[name].IsZero() {
			if stood := now.Sub(w.since[name]); stood > time.Second && stood < time.Hour {
				w.r.trace.printf("%s stood at %d for %s", name, w.position[name], stood)
			}
			w.position[name], w.since[name] = position, now
		}
		w.most = max(w.most, now.Sub(w.since[name]))
		least, seen = min(least, position), seen+1
		return nil
	})
	if err != nil {
		return err
	}
	w.idle = seen == w.n && least >= head
	var open int64
	if !w.fed.Load() && head-least < readerAhead {
		open = 1
	}
	w.r.gate(open)
	return nil
}

// awaitRead waits until every projector has read the whole log, and no parked message is due.
func (r *run) awaitRead(w *progress) {
	begin, limit := time.Now(), r.suite.patience()
	if !r.awaitOr(limit, func() bool {
		return w.atHead() && r.sum(producing, wordOpen) == 0 && r.countOf(`select count(*) from kinora.holds where due_at < 'infinity'`) == 0
	}) {
		r.fail("the log was not read in %s", limit)
	}
	r.measure("drained_ms", time.Since(begin))
	w.stop()
}

// judgeReaders compares the read model of each projector with the ledger.
func (r *run) judgeReaders(w *progress, attempts int, lease time.Duration) {
	for _, p := range r.all {
		p.stop()
	}
	var v verdict
	ledger, h := r.judgeAppends(&v)
	r.judgeProjectors(readerProjectors, true, h, &v)
	r.judgePoisons(h, attempts)
	r.tally(ledger, &v)
	w.judge(2 * lease)
	r.readGauges(true)
	r.requireKinds()
}

// judgeAppends compares the log with the ledger.
func (r *run) judgeAppends(v *verdict) (map[string]*command, history) {
	ledger, err := readLedgers(r.dir)
	r.must(err)
	events, err := readEvents(r.suite.ctx, r.pool)
	r.must(err)
	return ledger, judgeLog(ledger, events, v)
}

// judgeProjectors compares the read models of n projectors with the expected effect.
func (r *run) judgeProjectors(n int, poisoned bool, h history, v *verdict) {
	for i := range n {
		m, err := readModel(r.suite.ctx, r.pool, readerPrefix(i))
		r.must(err)
		var one verdict
		if poisoned {
			judgeModel(r.withoutPoison(i, h, m), m, &one)
		} else {
			judgeModel(h, m, &one)
		}
		v.merge(readerName(i), &one)
	}
	for _, why := range v.reasons {
		r.trace.printf("verdict %s", why)
	}
	if !v.ok() {
		r.fail("lost %d, doubled %d, phantom %d, misordered %d: %s", v.Lost, v.Doubled, v.Phantom, v.Misordered, v.reasons[0])
	}
}

// judge fails a full run if a projector stood for longer than limit after most of the faults. After a
// single fault it may: other work on the machine delays all processes.
func (w *progress) judge(limit time.Duration) {
	slices.Sort(w.stood)
	if len(w.stood) > 0 {
		w.r.within("stood_median_ms", "after most faults a projector moved", w.stood[len(w.stood)/2], limit)
	}
}

// withoutPoison judges the stream of a projector that has its poison, and returns the other
// streams. It removes the stream from the model.
func (r *run) withoutPoison(i int, h history, m model) history {
	p, ok := readerPoisons[i]
	if !ok {
		return h
	}
	if got := fmt.Sprint(m.Lists[p.stream]); got != "[1 2 3 4]" {
		r.fail("%s: %s is %s, want [1 2 3 4], the events before its poison", readerName(i), p.stream, got)
	}
	h = maps.Clone(h)
	delete(h, p.stream)
	delete(m.Lists, p.stream)
	delete(m.Totals, p.stream)
	return h
}

// judgePoisons checks that each poison is stuck after its attempts, that the events of its stream
// wait behind it, and that nothing else is parked.
func (r *run) judgePoisons(h history, attempts int) {
	db, err := postgres.New(r.pool, nil)
	r.must(err)
	list, err := db.Parked(r.suite.ctx, projector.ParkedFilter{
		States: []projector.ParkedState{projector.StateWaiting, projector.StateStuck}, Limit: 1_000_000,
	})
	r.must(err)
	want, found := map[string]int{}, map[string]int{}
	for i, p := range readerPoisons {
		want[readerName(i)+" "+p.stream] = len(h[p.stream]) - poisonN + 1
	}
	for _, p := range list {
		found[p.Projector+" "+p.Key]++
		switch {
		case p.Class == provider.ClassHeld:
		case p.State != projector.StateStuck || p.Attempts != attempts:
			r.fail("%s of %s is %s as %s %q after %d attempts, want %d", p.MessageID, p.Projector, p.State, p.Class, p.Code, p.Attempts, attempts)
		default:
			r.inject("stuck", 1)
		}
	}
	if !maps.Equal(want, found) {
		r.fail("parked %v, want %v", found, want)
	}
	r.result.Parked = len(list)
}

// needShares requires that every process has had some of the readers.
func (r *run) needShares(projectors int) {
	for _, p := range r.of(reading) {
		kind := "projectors_of_" + p.Name
		r.needs = append(r.needs, kind)
		r.gauge(kind, func() (had int) {
			for i := range projectors {
				if p.status.get(wordRead+i) > 0 {
					had++
				}
			}
			return had
		})
	}
}
