package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

var taskPointsCell = &cell{
	// Promise: T3.1, T9.1
	name: "task-points", number: 33,
	summary: "a worker killed, and stopped past the lease, at each point: around calls, steps, audit, status, and the completion of a group",
	full:    60 * time.Second, short: time.Second, redelivers: true,
	requires: []string{"died_at_a_point", "stopped_at_a_point"}, run: runTaskPoints,
}

// isTaskPoint reports whether a point is one of tasks. Workers reach those.
func isTaskPoint(name string) bool {
	first, _, _ := strings.Cut(name, ":")
	return strings.Contains(first, "task") || slices.Contains([]string{"step", "step in transaction", "audit", "group"}, first)
}

// workersToo are the points of units, in which workers commit too.
var workersToo = []string{"open", "close", "commit"}

// stopsShort are the first words of the points at which the short form also stops workers.
var stopsShort = []string{"step", "step in transaction", "audit", "group", "commit", "task"}

func runTaskPoints(r *run) {
	points, err := findPoints()
	r.must(err)
	r.server(brokerConfig{}, "idle_in_transaction_session_timeout=300")
	_, err = r.pool.Exec(r.suite.ctx, effects)
	r.must(err)
	o := r.systems()
	var workers []*process
	for range 3 {
		workers = append(workers, r.worker(o, "shop", func(s *settings) {
			s.More["audit"], s.More["steps"], s.More["operates"] = "yes", "1", "yes"
		}))
	}
	round, n := 0, 0
	r.prove(func() {
		stop := r.orders(n, 15)
		for _, p := range workers {
			p.awaitReady()
		}
		for begin, first := time.Now(), round; round == first || time.Since(begin) < r.span; round++ {
			todo := make(chan todoPoint, 2*len(points))
			for _, point := range points {
				first, _, _ := strings.Cut(point, ":")
				if !isTaskPoint(point) && !slices.Contains(workersToo, first) {
					continue
				}
				todo <- todoPoint{point, false}
				if !r.suite.short || slices.Contains(stopsShort, first) {
					todo <- todoPoint{point, true}
				}
			}
			var all sync.WaitGroup
			for _, p := range workers {
				all.Go(func() { r.guard(func() { visitPoints(r, p, todo, round) }) })
			}
			all.Wait()
		}
		for _, p := range workers {
			p.kill()
			p.Point, p.Stops = "", false
			r.must(p.begin())
		}
		n = stop()
		r.awaitEnded()
	})
	r.stopWorkers()
	r.judgeShop(o, n)
	judgeSteps(r)
}

type todoPoint struct {
	name  string
	stops bool
}

// visitPoints ends or stops p at one point after another.
func visitPoints(r *run, p *process, todo chan todoPoint, round int) {
	for {
		select {
		case point := <-todo:
			p.signal(syscall.SIGKILL)
			<-p.life()
			r.visit(p, point, 1+r.intn(1+3*min(round, 1)))
		default:
			return
		}
	}
}

// visit starts lives of p until one reaches the point. On a slow or busy machine a life may need longer: each one has more
// time than the one before it.
func (r *run) visit(p *process, point todoPoint, nth int) {
	life := 4 * time.Second
	for begin := time.Now(); time.Since(begin) < r.suite.patience(); life += life / 4 {
		p.Point, p.Stops = fmt.Sprintf("%s#%d", point.name, nth), point.stops
		r.must(p.begin())
		ended := p.life()
		reached := r.awaitOr(life, func() bool { return isClosed(ended) || point.stops && p.isStopped() })
		switch {
		case reached && point.stops:
			r.sleep(p.Lease + p.Lease/2)
			p.signal(syscall.SIGCONT)
			r.inject("stopped_at_a_point", 1)
			r.sleep(p.Lease / 4) // it goes on, and finds that it is late
			return
		case reached:
			r.inject("died_at_a_point", 1)
			return
		}
		p.kill()
		nth = 1
	}
	r.fail("no worker reached the point %q", point.name)
	r.must(p.begin())
}
