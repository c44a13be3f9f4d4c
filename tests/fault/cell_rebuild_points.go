package main

import (
	"bufio"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
)

var rebuildPointsCell = &cell{
	// Promise: R1.1, R2.1
	name: "rebuild-points", number: 40,
	summary: "SIGKILL at each named point of the first generation, rebuilds in place and blue/green, rollbacks, clearing, verification and repair; another process goes on",
	full:    4 * time.Minute, short: 3 * time.Second,
	requires: []string{"died_blue-green", "died_in-place", "died_repair"}, requiresLong: []string{"died_first", "died_rollback"},
	run: runRebuildPoints,
}

// What a process does when it dies at a point. Each is done in the state that the one before it leaves.
const (
	pointFirst     = "first" // the first generation
	pointBlueGreen = "blue-green"
	pointRollback  = "rollback"
	pointInPlace   = "in-place"
	pointRepair    = "repair"
)

const (
	pointEvents    = 300 // before the first generation
	pointRate      = 5   // events per second; with more, the log grows faster than the work at many points ends
	pointRateShort = 20
)

func runRebuildPoints(r *run) {
	r.server(brokerConfig{})
	_, err := r.pool.Exec(r.suite.ctx, callsTable)
	r.must(err)
	r.must(r.writePast(pointEvents))
	rate := pointRate
	if r.suite.short {
		rate = pointRateShort
	}
	r.child(producing, func(s *settings) {
		s.Rate, s.Alone, s.Streams, s.Hot, s.More = rate, false, 50, 0, map[string]string{"unrouted": "yes"}
	}).awaitReady()
	r.gate(1)
	all := [][]string{{pointFirst, pointBlueGreen, pointRollback, pointInPlace, pointRepair}}
	lanes := 4
	if r.suite.short {
		all, lanes = [][]string{{pointFirst, pointBlueGreen, pointRollback}, {pointFirst, pointInPlace}, {pointFirst, pointRepair}}, 3
	}
	var ls []*pointLane
	for i := range lanes {
		l := &pointLane{r: r, number: i, kinds: all[i%len(all)], todo: map[string][]string{}}
		if half := i / 2; !r.suite.short {
			l.share = &half
		}
		ls = append(ls, l)
	}
	r.prove(func() {
		var running sync.WaitGroup
		for _, l := range ls {
			running.Go(func() { r.guard(l.run) })
		}
		running.Wait()
	})
	r.gate(0)
	for _, p := range r.all {
		p.stop()
	}
	var v verdict
	ledger, _ := r.judgeAppends(&v)
	if !v.ok() {
		r.fail("lost %d, doubled %d, phantom %d, misordered %d: %s", v.Lost, v.Doubled, v.Phantom, v.Misordered, v.reasons[0])
	}
	r.tally(ledger, &v)
	r.requireKinds()
	judgeSteps(r)
}

// pointLane works with one projector after another. Several lanes run at once.
type pointLane struct {
	r        *run
	number   int
	cycles   int  // projectors so far
	share    *int // which half of the points are for this lane; nil: all
	kinds    []string
	todo     map[string][]string // points, by kind; absent: they are not known yet
	name     string              // of the projector
	watch    *builtWatch
	dies     *process // dies at a point
	goesOn   *process
	verifies *process
}

// run does each kind of work without a fault, to learn its points, and then dies at each of them.
func (l *pointLane) run() {
	r := l.r
	for first := l.cycles; l.goOn(first); l.cycles++ {
		l.name = fmt.Sprintf("lane_%d_%d", l.number, l.cycles)
		for _, kind := range l.kinds {
			point, isKnown := "", l.todo[kind] != nil
			if isKnown && len(l.todo[kind]) == 0 && l.lacks(kind) { // learn them again
				isKnown = false
			}
			if n := len(l.todo[kind]); n > 0 {
				point = l.todo[kind][n-1]
				l.todo[kind] = l.todo[kind][:n-1]
			}
			r.trace.printf("lane %s: %s at %q", l.name, kind, point)
			p := l.work(kind, point)
			if kind == pointFirst {
				l.watch = r.watchBuilt(l.name)
			}
			if !isKnown {
				l.todo[kind] = l.pointsOf(p)
				r.inject("points_"+kind, len(l.todo[kind]))
			}
		}
		l.judge()
	}
}

// goOn reports whether another cycle follows. The planned work is one cycle to learn the points, and then, in the short
// form, one point of each kind; in the full form, all points. A lane whose kinds have had their faults does no more.
func (l *pointLane) goOn(first int) bool {
	r := l.r
	left := 0
	for _, points := range l.todo {
		left += len(points)
	}
	switch {
	case l.cycles < 2:
		return true
	case r.suite.short:
		return l.cycles < first+2 && slices.ContainsFunc(l.kinds, l.lacks)
	default:
		return left > 0 || l.cycles == first && slices.ContainsFunc(l.kinds, l.lacks)
	}
}

// lacks reports whether a kind must still have its fault.
func (l *pointLane) lacks(kind string) bool {
	return slices.Contains(l.r.needs, "died_"+kind) && !l.r.has("died_"+kind)
}

// work does one kind of work in a process that dies at a point. Another process finishes it. It returns
// the first one.
func (l *pointLane) work(kind, point string) *process {
	r, dies := l.r, &l.dies
	done := l.begin(kind)
	if kind == pointRepair {
		l.start(&l.goesOn, "", "")
		dies = &l.verifies
	}
	l.start(dies, kind, point)
	ended := (*dies).life()
	r.awaitOr(r.suite.patience(), func() bool { return isClosed(ended) || kind != pointRepair && done() })
	switch {
	case !isClosed(ended) && kind == pointRepair:
		r.must(fmt.Errorf("%s: a verification has not ended at %q", l.name, point))
	case isClosed(ended) && killed((*dies).state):
		r.inject("died_"+kind, 1)
		r.inject("kill_builder", 1)
	case point != "":
		r.inject("not_reached", 1)
	}
	if kind == pointRepair {
		if killed((*dies).state) {
			l.start(dies, kind, "")
			r.verified(*dies)
		}
	} else {
		l.end(*dies)
		l.start(&l.goesOn, "", "")
	}
	l.goesOn.awaitReady()
	r.await(fmt.Sprintf("%s of %s after a kill at %q", kind, l.name, point), done)
	if l.watch != nil && kind == pointInPlace {
		l.watch.inPlace(false)
	}
	l.goesOn.stop()
	return *dies
}

// end ends a process, which may die at its point meanwhile.
func (l *pointLane) end(p *process) {
	if p.Point == "" {
		p.stop()
		return
	}
	p.signal(syscall.SIGTERM)
	ended := p.life()
	l.r.await(p.Name+" to end after SIGTERM", func() bool { return isClosed(ended) })
}

// begin requests a kind of work. done reports whether it is finished.
func (l *pointLane) begin(kind string) (done func() bool) {
	r := l.r
	db, err := postgres.New(r.pool, nil)
	r.must(err)
	defer db.Close()
	request := func(how projector.RebuildHow) func() bool {
		was := len(r.generations(l.name))
		n, err := projector.RequestRebuild(r.suite.ctx, db, l.name, projector.Rebuild{How: how, Decision: bySuite})
		r.must(err)
		return func() bool {
			if now := len(r.generations(l.name)); now != was+1 {
				r.fail("lost 0, doubled 1, phantom 0, misordered 0: %s has %d generations, and had %d before one rebuild", l.name, now, was)
			}
			return r.isBuilt(l.name, n)
		}
	}
	switch kind {
	case pointFirst:
		return func() bool { return r.isBuilt(l.name, 1) }
	case pointInPlace:
		l.watch.inPlace(true)
		return request(projector.InPlace)
	case pointBlueGreen:
		return request(projector.BlueGreen)
	case pointRollback:
		n := r.standby(l.name).Number
		r.must(projector.Control(r.suite.ctx, db, l.name, n, projector.Promote, bySuite))
		return func() bool { return r.generation(l.name, n).State == "live" }
	default: // repair
		for _, g := range r.generations(l.name) {
			if g.State == "live" {
				_, err = r.pool.Exec(r.suite.ctx, fmt.Sprintf(`update %s_sums%s set total = total + 7 where stream in (select stream from %[1]s_sums%[2]s limit 3)`, l.name, g.Suffix))
				r.must(err)
			}
		}
		return func() bool { return true }
	}
}

// start starts the next life of a process.
func (l *pointLane) start(p **process, kind, point string) {
	change := func(s *settings) {
		s.Point, s.Unit, s.Batched = point, 100, l.number%2 == 1
		s.More = map[string]string{"built": l.name, "steps": "1"}
		if kind == pointRepair {
			s.More["verify"] = "repair"
		}
	}
	l.r.starting.Lock()
	defer l.r.starting.Unlock()
	if *p == nil {
		*p = l.r.builder(l.name, change)
		(*p).onEnd(func(code int) bool { return code == 0 && (*p).More["verify"] != "" })
		return
	}
	change(&(*p).settings)
	l.r.must((*p).begin())
}

// pointsOf returns the points that the last life of a process passed, as "name#n": the first two of a
// name, and one at the end. Lanes that do the same share them.
func (l *pointLane) pointsOf(p *process) []string {
	f, err := os.Open(filepath.Join(l.r.dir, "trace-"+p.Name))
	l.r.must(err)
	defer func() { _ = f.Close() }()
	passed := map[string]int{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		part := strings.SplitN(lines.Text(), " ", 4)
		switch {
		case len(part) > 1 && part[1] == "life":
			clear(passed)
		case len(part) == 4 && part[1] == "point":
			passed[part[3]]++
		}
	}
	points := []string{}
	for name, n := range passed {
		for i := range n {
			point, hash := name+"#"+strconv.Itoa(i+1), fnv.New32()
			_, _ = hash.Write([]byte(point))
			if (i < 2 || i == n-2) && (l.share == nil || int(hash.Sum32()>>8)%2 == *l.share) {
				points = append(points, point)
			}
		}
	}
	slices.Sort(points)
	l.r.shuffle(points)
	return points
}

func (r *run) shuffle(list []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rnd.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
}

// pointJudgeSQL counts the streams of a generation whose list or sum is wrong.
const pointJudgeSQL = `
select count(*) from %[1]s_lists%[2]s l full join %[1]s_sums%[2]s s on s.stream = l.stream
where s.stream is null or l.stream is null or l.items <> array(select generate_series(1, cardinality(l.items)))
	or s.total <> (select sum((data->>'amount')::bigint) from kinora.events e where e.stream = l.stream and e.version <= cardinality(l.items))`

// judge lets a process apply all events, and compares each generation with the log by plain SQL.
func (l *pointLane) judge() {
	r := l.r
	l.start(&l.goesOn, "", "")
	l.goesOn.awaitReady()
	r.awaitApplied(l.name)
	l.goesOn.stop()
	l.watch.stop()
	v := &l.watch.found
	for _, g := range r.fed(l.name) {
		if n := r.countOf(fmt.Sprintf(pointJudgeSQL, l.name, g.Suffix)); n > 0 {
			v.find(&v.Phantom, l.name, "%d streams of generation %d are wrong", n, g.Number)
		}
		r.inject("judged_generations", 1)
	}
	if n := r.countOf(`select count(*) from (select from calls where projector = $1 group by stream, n having count(*) > 1) c`, l.name); n > 0 {
		v.find(&v.Doubled, l.name, "other systems were called twice for %d events", n)
	}
	if n := r.countOf(`
		select count(*) from pg_class c where relkind = 'r' and relname like $1 || '\_lists\_g%' and not exists (
			select from kinora.generations g
			where projector = $1 and relname = $1 || '_lists' || (data->>'suffix') and not coalesce((data->>'cleared')::boolean, false))`, l.name); n > 0 {
		v.find(&v.Phantom, l.name, "%d tables are left behind", n)
	}
	if !v.ok() {
		r.fail("lost %d, doubled %d, phantom %d, misordered %d: %s: %s", v.Lost, v.Doubled, v.Phantom, v.Misordered, l.name, v.reasons[0])
	}
}
