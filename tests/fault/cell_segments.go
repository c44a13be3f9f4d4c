package main

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

var segmentsCell = &cell{
	name: "segments", number: 43, summary: "three processes share the segments of two projectors from the log, killed, and stopped past the lease, while the number of segments changes",
	full: 4 * time.Minute, short: 10 * time.Second, fails: true,
	requires: []string{"kill_reader", "zombie_reader", "resplit"}, requiresLong: []string{"fenced"}, run: runSegments,
}

const (
	segmentProjectors = 2 // one with transactions, one with batches
	segmentsBefore    = 8
	segmentsAfter     = 5
	segmentEvents     = 200_000
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
		p.awaitReady(30 * time.Second)
	}
	w := r.watchProgress(segmentProjectors)
	lacks := func(kind string) bool { return r.kinds()[kind] == 0 }
	begin := time.Now()
	r.awaitShares(lease, readerProcesses, segmentsBefore)
	for n := 0; ; n++ {
		late := time.Since(begin) > r.length+patience
		acked := r.sum(producing, wordAcked)
		if acked >= int64(events) && (late || !slices.ContainsFunc(r.cell.requires, lacks)) {
			break
		}
		p := r.of(reading)[r.intn(readerProcesses)]
		w.longest()
		counts, is := false, segmentsBefore
		switch {
		case acked >= int64(events)/2 && lacks("resplit"):
			r.resplit()
			is = segmentsAfter
		case n%3 == 1:
			counts = r.stopReader(p, lease)
		default:
			p.lives.Lock()
			counts = p.restart()
			p.lives.Unlock()
		}
		if !lacks("resplit") {
			is = segmentsAfter
		}
		r.awaitShares(lease, readerProcesses, is)
		r.sleep(r.between(lease/2, 2*lease))
		if stood := w.longest(); counts {
			w.stood = append(w.stood, stood)
		}
	}
	w.fed.Store(true)
	r.awaitRead(w)
	for _, p := range r.all {
		p.stop(r.drain)
	}
	var v verdict
	ledger, h := r.judgeAppends(&v)
	r.judgeProjectors(segmentProjectors, false, h, &v)
	r.shares(segmentProjectors)
	r.tally(ledger, &v)
	w.judge(2 * lease)
	r.judgeShares(2 * lease)
	r.inject("fenced", int(r.sum(reading, wordLate)))
	r.requireKinds()
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
		p.awaitReady(30 * time.Second)
	}
	r.inject("resplit", 1)
}

// sharesSQL returns how many segments of a projector each process has that is known to run.
const sharesSQL = `
select count(*) filter (where name !~ '/runner/') from kinora.leases
where name like 'segments/' || $1::text || '/%' and expires_at > clock_timestamp() group by holder`

// awaitShares waits until each of the processes has a fair share of the segments of each projector. The
// shares differ by at most one, and all segments have a reader.
func (r *run) awaitShares(lease time.Duration, processes, segments int) {
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
	if limit := 20 * lease; !r.awaitOr(limit, fair) {
		r.fail("the segments were not shared fairly within %s", limit)
	}
	took := time.Since(begin)
	r.measure("fair_after_ms", took)
	r.fairAfter = append(r.fairAfter, took)
}

// judgeShares fails the cell if segments were shared fairly only after limit, after most of the faults.
// After a single fault it may: other work on the machine delays all processes.
func (r *run) judgeShares(limit time.Duration) {
	if r.suite.short {
		limit *= 3
	}
	slices.Sort(r.fairAfter)
	median := r.fairAfter[len(r.fairAfter)/2]
	r.measure("fair_median_ms", median)
	if median > limit {
		r.fail("after most faults the segments were shared fairly after %s, the limit is %s", median, limit)
	}
}
