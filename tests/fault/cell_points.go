package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

var pointsCell = &cell{
	// Promise: G3.1, G4.1, G4.2
	name: "points", number: 1, summary: "SIGKILL at each named point of the library, before and after each step; every statement has points",
	full: 100 * time.Second, short: time.Second, redelivers: true, byFault: true, fails: true,
	requires: []string{"died_at_a_point", "parked_and_replayed"}, run: runPoints,
}

// pointRole maps the first word of a point's name to the process that reaches it. A runner reaches
// all other points.
var pointRole = map[string]string{
	"append": "producer", "claim": "relay", "publish": "relay", "mark": "relay", "transaction": "relay", "one": "batched",
	"set": "reader", "acquire": "reader", "release": "reader",
}

// readerToo are the first words of points that the reader of a log reaches too. Its units move the
// checkpoint. In this cell they take two round trips, because every reader follows a crash.
var readerToo = []string{"open", "close", "commit", "handler", "prune", "beat", "in"}

// operatorPoints are the first words of points that the processes of the suite do not reach: acts of operators,
// archives, and what services report about themselves. These are one statement or one transaction, and they are repeated.
var operatorPoints = []string{"report", "pause", "add", "take", "change", "cancel", "archive"}

func isOperatorPoint(point string) bool {
	first, _, _ := strings.Cut(strings.ReplaceAll(point, ":", " "), " ")
	return slices.Contains(operatorPoints, first)
}

// runPoints ends processes at one point after another. Handlers fail, so that messages are parked,
// held and replayed, and the replayed handlers' output is an event again.
func runPoints(r *run) {
	points, err := findPoints()
	r.must(err)
	r.ahead, r.parked = 60, 1<<30
	r.server(brokerConfig{Duplicate: 0.05})
	r.readerTables(pointReaders)
	change := func(s *settings) {
		s.Streams, s.Hot, s.Workers, s.More = 60, 0, 4, map[string]string{"steps": "1"}
		if s.Role == reading {
			s.Lease, s.Attempts, s.Unit = time.Second, 2, 200
			s.More["projectors"], s.More["failsOneIn"] = strconv.Itoa(pointReaders), "1000"
		}
		if s.Role != running {
			return
		}
		s.Lease, s.Attempts, s.More["fails"], s.More["log"] = time.Second, 2, "1", "1"
		if !s.Batched {
			s.More["emits"], s.More["replays"] = "1", "1"
		}
	}
	r.startAll(2, 3, change)
	r.child(reading, change).awaitReady()
	todo := map[string]chan string{}
	for _, name := range []string{"producer", "relay", "runner", "batched", "reader"} {
		todo[name] = make(chan string, 10*len(points))
	}
	deal := func() {
		for _, point := range points {
			if isTaskPoint(point) || slices.Contains(redisPoints, point) || isOperatorPoint(point) { // see the cells task-points and redis
				continue
			}
			first, _, _ := strings.Cut(strings.ReplaceAll(point, ":", " "), " ")
			who, ok := pointRole[first]
			if !ok {
				who = "runner"
			}
			todo[who] <- point
			if who != "reader" && slices.Contains(readerToo, first) {
				todo["reader"] <- point
			}
		}
	}
	round := 0
	r.prove(func() {
		stop := r.flow()
		for begin, first := time.Now(), round; round == first || time.Since(begin) < r.span; round++ {
			deal()
			var all sync.WaitGroup
			for _, p := range r.all {
				who := string(p.Role)
				if p.Batched {
					who = "batched"
				}
				all.Go(func() { r.guard(func() { dieAtEach(r, p, todo[who], round) }) })
			}
			all.Wait()
		}
		stop()
		r.await("the reader reads the whole log", func() bool {
			return r.countOf(`select count(*) from kinora.checkpoints where projector like 'reader-%' and position = (select max(position) from kinora.events)`) == pointReaders
		})
		awaitReplayed(r)
		r.waitDrained(8 * lease)
	})
	r.judge()
	var v verdict
	_, h := r.judgeAppends(&v)
	r.judgeProjectors(pointReaders, false, h, &v)
	r.inject("points", len(points))
	judgeSteps(r)
}

// pointReaders are the projectors of the reader: one with transactions, and one with batches.
const pointReaders = 2

// dieAtEach ends p at one point after another, until none is left.
func dieAtEach(r *run, p *process, todo chan string, round int) {
	for {
		select {
		case point := <-todo:
			p.signal(9)
			<-p.life()
			r.dieAt(p, point, 1+r.intn(1+4*min(round, 1)))
		default:
			if p.Point != "" {
				p.Point = ""
				r.begin(p)
			}
			return
		}
	}
}

// dieAt starts lives of p until one ends at the point. Some points are reached only after a SIGKILL
// during work. On a slow or busy machine a life may need longer: each one has more time than the one before it.
func (r *run) dieAt(p *process, point string, nth int) {
	life := 3 * time.Second
	switch {
	case p.Role == relaying:
		life = 8 * time.Second // for the work that relays do every five seconds
	case p.Role == reading || p.Batched: // units of one round trip only have events that are younger than each crash
		life = 15 * time.Second
	}
	for begin := time.Now(); time.Since(begin) < r.suite.patience(); life += life / 4 {
		p.Point = fmt.Sprintf("%s#%d", point, nth)
		r.must(p.begin())
		ended := p.life()
		if strings.HasPrefix(point, "release lease") { // it is released at the end
			p.awaitReady()
			r.sleep(2 * p.Lease)
			p.signal(syscall.SIGTERM)
		}
		if r.awaitOr(life, func() bool { return isClosed(ended) }) {
			r.inject("died_at_a_point", 1)
			if p.open() {
				r.inject("kill_"+string(p.Role), 1)
			}
			return
		}
		p.kill()
		nth = 1
	}
	p.r.fail("no process reached the point %q", point)
	r.must(p.begin())
}

// life returns a channel that is closed when the current life of the process has ended.
func (p *process) life() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// awaitReplayed waits until no message is waiting or stuck.
func awaitReplayed(r *run) {
	var left int
	if !r.awaitOr(r.suite.patience(), func() bool {
		rest, _, failed := r.backlog()
		err := r.pool.QueryRow(r.suite.ctx, `select count(*) filter (where state in ('waiting', 'stuck')), count(*) from kinora.parked`).Scan(&left, &r.parked)
		return err == nil && failed == nil && left == 0 && rest == ""
	}) {
		r.fail("%d messages are still parked", left)
	}
	r.inject("parked_and_replayed", r.parked)
	r.parked = 1 << 30
}

// judgeSteps fails the cell if a statement has no point right before it or right after it.
func judgeSteps(r *run) {
	bare, passed, err := bareSteps(r.dir)
	r.must(err)
	for _, sql := range slices.Sorted(maps.Keys(bare)) {
		r.fail("%d times %s statement: %s", bare[sql].n, bare[sql].where, sql)
	}
	r.inject("points_passed", passed)
}
