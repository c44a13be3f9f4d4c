package main

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/projector"
)

var rebuildCell = &cell{
	// Promise: R1.1, R2.1, R3.1, R4.1, R8.1
	name: "rebuild", number: 21,
	summary: "rebuilds in place and blue/green, requested by three processes at once, fed by a broker and by the log, under 500 commands a second and kill -9; and rollbacks",
	full:    150 * time.Second, short: 3 * time.Second, alone: true,
	requires: []string{"rebuilds_in-place", "rebuilds_blue-green", "rollbacks"}, requiresLong: []string{"kill_builder", "killed_while_building"},
	run: runRebuild,
}

// Events that are in the log before the first rebuild, and the most events per second of a rebuild.
const (
	builtPast      = 50_000
	builtPastShort = 4_000
	builtRate      = 20_000
	builtRateShort = 4_000
	builtMost      = 10_000 // commands during a rebuild
)

func runRebuild(r *run) {
	past, rate := builtPast, builtRate
	if r.suite.short {
		past, rate = builtPastShort, builtRateShort
	}
	r.startBuilt(past)
	var ps []*process
	for range 3 {
		ps = append(ps, r.builder(heardName+","+readName+","+naiveName, func(s *settings) { s.More["rate"] = fmt.Sprint(rate) }))
	}
	for _, p := range ps {
		p.awaitReady()
	}
	r.awaitApplied(heardName, readName)
	names := []string{heardName, readName}
	watches := []*builtWatch{r.watchBuilt(heardName), r.watchBuilt(readName)}
	r.arms = []arm{{name: naiveName, prefix: naiveName + "_", wrong: true}}
	round := r.intn(2) // decides which projector is rebuilt in place first
	r.prove(func() {
		stop := r.flow()
		for begin, first := time.Now(), round; round == first || time.Since(begin) < r.span; round++ {
			var numbers [2]int
			for i, name := range names {
				how := []projector.RebuildHow{projector.InPlace, projector.BlueGreen}[(round+i)%2]
				watches[i].inPlace(how == projector.InPlace)
				numbers[i] = r.requestOfAll(name, how)
			}
			took := r.killWhileBuilding(ps, names, numbers)
			for i := range names {
				watches[i].inPlace(false)
			}
			r.rebuildByHand()
			r.rollBack(ps, names[(round+1)%2], took/10)
		}
		stop()
		r.waitDrained(10 * lease)
		r.awaitApplied(names...)
	})
	r.judgeBuilt(watches, names...)
}

// killWhileBuilding kills builders, mostly the one that builds, until both rebuilds are over. It returns how long they took.
func (r *run) killWhileBuilding(ps []*process, names []string, numbers [2]int) (took time.Duration) {
	begin, over := time.Now(), func() bool { return r.isBuilt(names[0], numbers[0]) && r.isBuilt(names[1], numbers[1]) }
	defer r.limitFlow(builtMost)()
	kills := 2 + r.intn(3)
	for !r.suite.short && r.intn(3) > 0 {
		kills++
	}
	for range kills {
		p := r.busiest(ps, r.between(50*time.Millisecond, 500*time.Millisecond))
		if over() {
			break
		}
		if p == nil || r.intn(4) == 0 {
			ps[r.intn(len(ps))].restart()
		} else if p.restart() {
			r.inject("killed_while_building", 1)
		}
		if r.intn(2) == 0 { // time for another process to go on
			r.sleep(r.between(builtLease, 2*builtLease))
		}
	}
	r.await(fmt.Sprintf("generations %d of %v", numbers, names), over)
	took = time.Since(begin)
	r.measure("rebuilds_ms", took)
	return took
}

// limitFlow holds the producers after this number of commands: on a machine that is too busy, no rebuild
// would catch up.
func (r *run) limitFlow(most int64) (stop func()) {
	done, begin := make(chan struct{}), r.sum(producing, wordAcked)
	var all sync.WaitGroup
	all.Go(func() {
		for !isClosed(done) {
			r.held.Store(r.sum(producing, wordAcked)-begin > most)
			pause(r.suite.ctx, 10*time.Millisecond)
		}
		r.held.Store(false)
	})
	return func() { close(done); all.Wait() }
}

// busiest returns the process whose readers have had the most units within a time, or nil.
func (r *run) busiest(ps []*process, within time.Duration) (most *process) {
	before := map[*process]int64{}
	for _, p := range ps {
		before[p] = p.status.get(wordReads)
	}
	r.sleep(within)
	for _, p := range ps {
		if n := p.status.get(wordReads) - before[p]; n > 0 && (most == nil || n > most.status.get(wordReads)-before[most]) {
			most = p
		}
	}
	return most
}

// rebuildByHand does what a program without generations might do: it empties the read model, deletes
// the markers, and lets the reader begin at the first event, each in a transaction of its own.
func (r *run) rebuildByHand() {
	for _, sql := range []string{
		`truncate naive_sums, naive_lists`,
		`delete from kinora.markers where handler = 'naive/moved'`,
		`update kinora.checkpoints set position = 0, event_id = '' where projector = 'naive'`,
	} {
		_, err := r.pool.Exec(r.suite.ctx, sql)
		for isDeadlock(err) { // with a handler
			_, err = r.pool.Exec(r.suite.ctx, sql)
		}
		r.must(err)
	}
}

func isDeadlock(err error) bool {
	e, ok := errors.AsType[*pgconn.PgError](err)
	return ok && e.Code == "40P01"
}

// rollBack makes the generation live that stands by, while no process is killed, and then the other one
// again, while one is. In the full form, the first rollback has a limit.
func (r *run) rollBack(ps []*process, name string, limit time.Duration) {
	for _, p := range ps {
		p.awaitReady()
	}
	g := r.standby(name)
	if g.Number == 0 {
		r.fail("no generation of %s stands by", name)
		return
	}
	r.awaitFed(name, g.Number)
	r.promote("rollback_ms", name, g.Number, limit)
	r.inject("rollbacks", 1)
	next := r.standby(name)
	r.awaitFed(name, next.Number)
	var killed sync.WaitGroup
	killed.Go(func() { ps[r.intn(len(ps))].restart() })
	r.promote("rollback_with_kill_ms", name, next.Number, r.suite.patience())
	killed.Wait()
}

// startBuilt starts the server, with events in the log, a producer and a relay.
func (r *run) startBuilt(past int) {
	r.server(brokerConfig{Duplicate: 0.05})
	for _, sql := range []string{callsTable, fmt.Sprintf(createSums, "naive_sums"), fmt.Sprintf(createLists, "naive_lists")} {
		_, err := r.pool.Exec(r.suite.ctx, sql)
		r.must(err)
	}
	r.must(r.writePast(past))
	rate := 500
	if r.suite.short { // other cells share the machine
		rate = 150
	}
	change := func(s *settings) { s.Rate, s.Alone, s.Streams, s.Hot = rate, false, quietFrom, 0 }
	r.child(producing, change).awaitReady()
	r.child(relaying, change).awaitReady()
}
