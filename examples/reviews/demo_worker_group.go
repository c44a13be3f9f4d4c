package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync"
)

// workerGroup runs the workers, each in its own process.
type workerGroup struct {
	relays      []*supervisor
	projectors  []*supervisor               // or one worker that does everything
	waitDrained func(context.Context) error // waits until no message is in flight
	stopping    chan struct{}
	stop        func() // makes run drain and stop the workers
}

func newWorkerGroup(waitDrained func(context.Context) error) *workerGroup {
	g := &workerGroup{waitDrained: waitDrained, stopping: make(chan struct{})}
	g.stop = sync.OnceFunc(func() { close(g.stopping) })
	return g
}

// run keeps the workers running until stop is called. It then drains the relays, waits until no
// message is in flight, and drains the other workers. If ctx ends, run kills the workers.
func (g *workerGroup) run(ctx context.Context) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	start := func(all []*supervisor) (stop func()) {
		var running sync.WaitGroup
		for _, s := range all {
			running.Go(func() {
				if err := s.run(ctx); err != nil {
					fail(err)
				}
			})
		}
		return func() {
			for _, s := range all {
				s.stop()
			}
			running.Wait()
		}
	}
	stopProjectors := start(g.projectors)
	stopRelays := start(g.relays)
	select {
	case <-g.stopping:
	case <-ctx.Done():
	}
	stopRelays()
	if ctx.Err() == nil {
		if err := g.waitDrained(ctx); err != nil {
			fail(err)
		}
	}
	stopProjectors()
	return context.Cause(ctx)
}

// inOtherProcesses issues the commands in this process and runs the workers in processes that are
// killed: one worker that does everything, or with --processes relays and projectors.
func (d *demo) inOtherProcesses(ctx context.Context) (kills int, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	planned := map[role]int{wholeWork: d.Kills}
	if d.Processes > 0 {
		planned = map[role]int{relayWork: d.Kills / 2, projectWork: d.Kills - d.Kills/2}
	}
	k := newKiller(planned, d.due)
	g := newWorkerGroup(func(ctx context.Context) error { return waitDrained(ctx, d.broker, d.db) })
	if d.Processes == 0 {
		// The worker itself waits: messages may be in its memory.
		g.waitDrained = func(context.Context) error { return nil }
		g.projectors = append(g.projectors, d.supervisor(self, wholeWork, 0, k))
	}
	for i := range d.Processes {
		g.relays = append(g.relays, d.supervisor(self, relayWork, i, k))
		g.projectors = append(g.projectors, d.supervisor(self, projectWork, i, k))
	}
	err = d.runWithWorker(ctx, g.stop, g.run)
	if k.missed > 0 {
		d.logf("%d more kills hit no message or entry in flight and are not counted", k.missed)
	}
	return k.total(), err
}

func (d *demo) supervisor(self string, r role, number int, k *killer) *supervisor {
	return &supervisor{
		name: fmt.Sprintf("%s %d", r, number), role: r, ledger: d.ledger, killer: k, onKill: d.reportKill,
		command: func(incarnation int) *exec.Cmd {
			c := exec.Command(self, "demo-worker", "--role", string(r), "--broker", d.Broker,
				"--duplicates", strconv.FormatFloat(d.Duplicates, 'g', -1, 64),
				"--seed", strconv.FormatUint(d.Seed+uint64(incarnation)+uint64(number)<<32, 10))
			// Not an argument: the URL may have a password, and arguments are visible to all users.
			c.Env = append(os.Environ(), demoDBEnv+"="+d.DB.flag(), demoRedisEnv+"="+d.DB.redis.url)
			return c
		},
	}
}

func (d *demo) reportKill(kills int, r role) {
	point := "between a handler's start and its ack"
	if r == relayWork {
		point = "a relay between its claim and its mark"
	}
	d.logf("kill %d of %d: after %d deliveries, %s", kills, d.Kills, d.ledger.total().Deliveries, point)
}

// due spreads the kills over the run. It measures progress in published entries for a relay, and in
// acked messages for other workers.
func (d *demo) due(r role, kill, of int) bool {
	done := d.ledger.ackedMessages()
	if r == relayWork {
		done = d.ledger.publishedEntries()
	}
	return done*(of+1) >= kill*d.commander.estimate()
}
