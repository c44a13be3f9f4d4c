package main

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

var segmentsCell = &cell{
	// Promise: G7.8, G7.9
	name: "segments", number: 43, summary: "three processes share the segments of two projectors from the log, killed, and stopped past the lease, while the number of segments changes",
	full: 2 * time.Minute, short: 4 * time.Second, alone: true, fails: true,
	requires: []string{"kill_reader", "zombie_reader", "resplit"}, requiresLong: []string{"fenced"}, run: runSegments,
}

const (
	segmentProjectors = 2 // one with transactions, one with batches
	segmentsBefore    = 8
	segmentsAfter     = 5
	segmentEvents     = 100_000
	segmentEventsFew  = 6_000
)

func runSegments(r *run) {
	r.server(brokerConfig{}, idleLimit)
	r.readerTables(segmentProjectors)
	events, lease := segmentEvents, lease
	if r.suite.short {
		events, lease = segmentEventsFew, time.Second
	}
	r.child(producing, func(s *settings) {
		s.Streams, s.Hot, s.Length, s.More = 400, 0, 20, map[string]string{"unrouted": "yes"}
	})
	for range readerProcesses {
		r.child(reading, func(s *settings) {
			s.Conns, s.Attempts, s.Lease, s.Unit = 24, 100, lease, readerUnit
			s.More = map[string]string{
				"projectors": strconv.Itoa(segmentProjectors), "failsOneIn": "2000", "segments": strconv.Itoa(segmentsBefore),
			}
		})
	}
	for _, p := range r.all {
		p.awaitReady()
	}
	w := r.watchProgress(segmentProjectors)
	r.awaitShares(readerProcesses, segmentsBefore)
	r.needShares(segmentProjectors)
	r.gauge("fenced", func() int { return int(r.sum(reading, wordLate)) })
	until, n := int64(0), 0
	r.prove(func() {
		until += int64(r.part(events))
		for acked := r.sum(producing, wordAcked); acked < until; acked = r.sum(producing, wordAcked) {
			r.disturbSegments(w, n, lease, acked >= int64(events)/2)
			n++
		}
	})
	w.fed.Store(true)
	r.awaitRead(w)
	for _, p := range r.all {
		p.stop()
	}
	var v verdict
	ledger, h := r.judgeAppends(&v)
	r.judgeProjectors(segmentProjectors, false, h, &v)
	r.tally(ledger, &v)
	w.judge(2 * lease)
	r.judgeShares(2 * lease)
	r.readGauges(true)
	r.requireKinds()
}

// disturbSegments stops or kills a process, or changes the number of segments once, and waits until the segments are
// shared fairly again.
func (r *run) disturbSegments(w *progress, n int, lease time.Duration, resplit bool) {
	p := r.of(reading)[r.intn(readerProcesses)]
	w.longest()
	counts := false
	switch {
	case resplit && !r.has("resplit"):
		r.resplit()
	case n%3 == 1:
		counts = r.stopReader(p, lease)
	default:
		p.lives.Lock()
		counts = p.restart()
		p.lives.Unlock()
	}
	segments := segmentsBefore
	if r.has("resplit") {
		segments = segmentsAfter
	}
	r.awaitShares(readerProcesses, segments)
	r.sleep(r.between(lease/2, 2*lease))
	if stood := w.longest(); counts {
		w.stood = append(w.stood, stood)
	}
}

// resplit starts the processes again, one after another, with another number of segments. Meanwhile
// processes with both numbers run.
func (r *run) resplit() {
	for _, p := range r.of(reading) {
		p.lives.Lock()
		p.More = maps.Clone(p.More)
		p.More["segments"] = strconv.Itoa(segmentsAfter)
		p.restart()
		p.lives.Unlock()
		p.awaitReady()
	}
	r.inject("resplit", 1)
}

// sharesSQL returns how many segments of a projector each process has that is known to run.
const sharesSQL = `
select count(*) filter (where name !~ '/runner/') from kinora.leases
where name like 'segments/' || $1::text || '/%' and expires_at > clock_timestamp() group by holder`

// awaitShares waits until each of the processes has a fair share of the segments of each projector. The
// shares differ by at most one, and all segments have a reader.
func (r *run) awaitShares(processes, segments int) {
	begin := time.Now()
	fair := func() bool {
		for i := range segmentProjectors {
			rows, err := r.pool.Query(r.suite.ctx, sharesSQL, readerName(i))
			if err != nil {
				return false
			}
			shares, err := pgx.CollectRows(rows, pgx.RowTo[int])
			sum := 0
			for _, n := range shares {
				sum += n
			}
			if err != nil || len(shares) != processes || sum != segments || slices.Max(shares)-slices.Min(shares) > 1 {
				return false
			}
		}
		return true
	}
	r.await("segments to be shared fairly", fair)
	took := time.Since(begin)
	r.measure("fair_after_ms", took)
	r.fairAfter = append(r.fairAfter, took)
}

// judgeShares fails a full run if segments were shared fairly only after limit, after most of the faults.
// After a single fault it may: other work on the machine delays all processes.
func (r *run) judgeShares(limit time.Duration) {
	slices.Sort(r.fairAfter)
	r.within("fair_median_ms", "after most faults the segments were shared fairly", r.fairAfter[len(r.fairAfter)/2], limit)
}
