package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// mostWork limits the work of a cell that has no luck: it is this many times what was planned. A machine that does little
// in the planned time has all of the suite's patience.
const mostWork = 10

// prove calls work until the cell has everything that it is there for: the faults in needs, a control that is wrong, and
// arms that are wrong. work does the planned work, which takes r.span, and returns when everything is processed. When mostWork
// and the patience are used up, or after a failure, prove returns, and judge fails the cell for what is missing.
//
// In runs of a minute or more, only the first call does all of the planned work. Each later one does a share.
func (r *run) prove(work func()) {
	share := 1.0
	for begin := time.Now(); r.work < mostWork || time.Since(begin) < r.suite.patience(); {
		work()
		r.work += share
		missing := r.missing()
		if len(missing) == 0 || r.hasFailed() || r.suite.mutant {
			return
		}
		r.say("goes on after %.1f times the planned work: no %s", r.work, strings.Join(missing, ", "))
		if r.isLong() {
			share = max(0.1, float64(r.cell.short)/float64(r.length))
			r.span = time.Duration(share * float64(r.length))
		}
	}
}

// part returns how many of n the present call of prove's work is to do.
func (r *run) part(n int) int { return max(1, int(float64(n)*float64(r.span)/float64(r.length))) }

// isLong reports whether the cell must also inject the kinds of requiresLong.
func (r *run) isLong() bool { return r.length >= time.Minute }

// has reports whether a kind was injected.
func (r *run) has(kind string) bool { return r.kinds()[kind] > 0 }

// gauge lets a kind be read instead of counted. read returns its present count.
func (r *run) gauge(kind string, read func() int) { r.gauges[kind] = read }

// readGauges reads all kinds that are not counted. Those that have been read, and can only grow, are read again only
// if all is true.
func (r *run) readGauges(all bool) {
	for kind, read := range r.gauges {
		if all || !r.has(kind) && slices.Contains(r.needs, kind) {
			n := read()
			r.mu.Lock()
			if n > 0 {
				r.injected[kind] = n
			}
			r.mu.Unlock()
		}
	}
}

// missing names what the cell has not had yet, so that it proves nothing.
func (r *run) missing() (all []string) {
	r.readGauges(false)
	for _, kind := range r.needs {
		if !r.has(kind) {
			all = append(all, kind)
		}
	}
	if r.cell.redelivers {
		byFault := r.cell.byFault || r.cell.byFaultLong && r.isLong()
		switch wrong, doubled := r.control(); {
		case wrong == 0:
			all = append(all, "wrong control")
		case byFault && doubled == 0:
			all = append(all, "control that is wrong without the broker's copies")
		}
	}
	for _, a := range r.arms {
		if lacks := r.lacksOf(a); lacks != "" {
			all = append(all, fmt.Sprintf("%s event of the arm %s", lacks, a.name))
		}
	}
	return all
}

// requireKinds fails the cell for each thing that it has not had.
func (r *run) requireKinds() {
	for _, what := range r.missing() {
		r.fail("no %s in %.1f times the planned work: the cell proves nothing", what, max(r.work, 1))
	}
}

// controlArm counts the streams in which the control without markers is wrong, and its items that the fault doubled.
func (r *run) controlArm() (wrong, byFault int) {
	var log, v verdict
	_, h := r.judgeAppends(&log)
	m, err := readModel(r.suite.ctx, r.pool, "control_")
	r.must(err)
	judgeModel(h, m, &v)
	events, err := readEvents(r.suite.ctx, r.pool)
	r.must(err)
	return len(v.streams), doubledBy(events, r.broker.copies(), m)
}

// patience is how long the suite waits for something that must happen. The limit only ends a cell that hangs, so it is
// far beyond what a slow or busy machine needs. A mutant may wait for something that never happens.
func (s *suite) patience() time.Duration {
	if s.mutant {
		return 20 * time.Second
	}
	return 10 * time.Minute
}

// within records how long something took, and fails the cell if that is longer than limit. The time depends on the
// machine: only cells that have it for themselves, in the full form, have the limit.
func (r *run) within(what, text string, took, limit time.Duration) {
	r.measure(what, took)
	if took > limit && r.isAlone() {
		r.fail("%s after %s, the limit is %s", text, took.Round(time.Millisecond), limit)
	}
}

// isAlone reports whether the cell has the machine for itself, so that times prove something.
func (r *run) isAlone() bool { return r.cell.alone && !r.suite.short }

// acks waits until n more messages are acked.
func (r *run) acks(n int) {
	until := r.broker.count("acked") + n
	r.await(fmt.Sprintf("%d acks", n), func() bool { return r.broker.count("acked") >= until })
}
