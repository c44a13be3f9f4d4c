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
	"github.com/kinora-go/kinora/providers/postgres"
)

var readersCell = &cell{
	name: "readers", number: 31, summary: "three processes share the readers of ten projectors from the log, killed, and stopped past the lease",
	full: 4 * time.Minute, short: 10 * time.Second, fails: true,
	requires: []string{"kill_reader", "zombie_reader", "exit"}, requiresLong: []string{"fenced"}, run: runReaders,
}

const (
	readerProcesses  = 3
	readerProjectors = 10
	readerEvents     = 200_000 // events of a full run
	readerEventsFew  = 8_000   // events of a short run
	// readerAhead is how far the slowest projector may be behind the log before the producer waits.
	readerAhead = 5_000
	// readerUnit is the most events of a unit. While the machine is loaded, a unit of 500 takes a
	// second, and a kill loses it.
	readerUnit = 100
)

func runReaders(r *run) {
	r.server(brokerConfig{}, idleLimit)
	for i := range readerProjectors {
		_, err := r.pool.Exec(r.suite.ctx, fmt.Sprintf(readerTables, readerPrefix(i)))
		r.must(err)
	}
	events, attempts, lease := readerEvents, 4, lease
	if r.suite.short {
		events, attempts, lease = readerEventsFew, 3, time.Second
	}
	r.child(producing, func(s *settings) {
		s.Streams, s.Hot, s.Length, s.More = 400, 0, 20, map[string]string{"unrouted": "yes"}
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
		p.awaitReady(30 * time.Second)
	}
	w := r.watchProgress()
	lacks := func(kind string) bool { return r.kinds()[kind] == 0 }
	begin := time.Now()
	for n := 0; ; n++ {
		late := time.Since(begin) > r.length+patience
		if r.sum(producing, wordAcked) >= int64(events) && (late || !slices.ContainsFunc(r.cell.requires, lacks)) {
			break
		}
		r.sleep(r.between(2*lease, 4*lease)) // others have taken over by then
		p := r.of(reading)[r.intn(readerProcesses)]
		if n%3 == 1 {
			r.stopReader(p, lease)
			continue
		}
		p.lives.Lock()
		p.restart()
		p.lives.Unlock()
	}
	w.fed.Store(true)
	r.awaitRead(w)
	r.judgeReaders(attempts, lease)
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
// readers over, and then resumes it.
func (r *run) stopReader(p *process, lease time.Duration) {
	p.lives.Lock()
	defer p.lives.Unlock()
	if !p.stopBusy() {
		return
	}
	open := p.open()
	r.sleep(r.between(lease+lease/4, 2*lease))
	p.signal(syscall.SIGCONT)
	if open {
		r.inject("zombie_reader", 1)
	}
}

// progress watches the checkpoints of the readers, and lets the producer wait for them.
type progress struct {
	r    *run
	fed  atomic.Bool // no more events are needed
	all  sync.WaitGroup
	done chan struct{}

	mu       sync.Mutex
	position map[string]int64
	since    map[string]time.Time // when a projector last moved, or had nothing to do
	idle     bool                 // every projector is at the head
}

func (r *run) watchProgress() *progress {
	w := &progress{r: r, done: make(chan struct{}), position: map[string]int64{}, since: map[string]time.Time{}}
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
			if stood := now.Sub(w.since[name]); !w.since[name].IsZero() && stood > time.Second {
				w.r.trace.printf("%s stood at %d for %s", name, w.position[name], stood)
			}
			w.position[name], w.since[name] = position, now
		}
		w.r.measure("stalled_ms", now.Sub(w.since[name]))
		least, seen = min(least, position), seen+1
		return nil
	})
	if err != nil {
		return err
	}
	w.idle = seen == readerProjectors && least >= head
	var open int64
	if !w.fed.Load() && head-least < readerAhead {
		open = 1
	}
	w.r.gate(open)
	return nil
}

// awaitRead waits until every projector has read the whole log, and no parked message is due.
func (r *run) awaitRead(w *progress) {
	begin, limit := time.Now(), 2*r.suite.drainLimit()
	if !r.awaitOr(limit, func() bool {
		return w.atHead() && r.sum(producing, wordOpen) == 0 && r.countOf(`select count(*) from kinora.holds where due_at < 'infinity'`) == 0
	}) {
		r.fail("the log was not read in %s", limit)
	}
	r.measure("drained_ms", time.Since(begin))
	w.stop()
}

// judgeReaders compares the read model of each projector with the ledger.
func (r *run) judgeReaders(attempts int, lease time.Duration) {
	for _, p := range r.all {
		p.stop(r.drain)
	}
	ledger, err := readLedgers(r.dir)
	r.must(err)
	events, err := readEvents(r.suite.ctx, r.pool)
	r.must(err)
	var v verdict
	h := judgeLog(ledger, events, &v)
	for i := range readerProjectors {
		m, err := readModel(r.suite.ctx, r.pool, readerPrefix(i))
		r.must(err)
		var one verdict
		judgeModel(r.withoutPoison(i, h, m), m, &one)
		v.merge(readerName(i), &one)
	}
	r.judgePoisons(h, attempts)
	r.shares()
	r.tally(ledger, &v)
	if !v.ok() {
		r.fail("lost %d, doubled %d, phantom %d, misordered %d: %s", v.Lost, v.Doubled, v.Phantom, v.Misordered, v.reasons[0])
	}
	limit := 2 * lease
	if r.suite.short {
		limit *= 3
	}
	if stalled := time.Duration(r.result.Measured["stalled_ms"]) * time.Millisecond; stalled > limit {
		r.fail("a projector did not move for %s, the limit is %s", stalled, limit)
	}
	r.inject("fenced", int(r.sum(reading, wordLate)))
	r.requireKinds()
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
		case p.Class == projector.ClassHeld:
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

// shares checks that every process had some of the readers.
func (r *run) shares() {
	for _, p := range r.of(reading) {
		had := 0
		for i := range readerProjectors {
			if p.status.get(wordRead+i) > 0 {
				had++
			}
		}
		r.inject("projectors_of_"+p.Name, had)
		if had == 0 {
			r.fail("%s had no reader", p.Name)
		}
	}
}
