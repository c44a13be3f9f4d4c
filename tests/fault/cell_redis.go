package main

import (
	"os"
	"slices"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/kinora-go/kinora/internal/redistest"
)

var redisCell = &cell{
	// Promise: G5.3, G5.4, G5.11
	name: "redis", number: 27,
	summary: "read models in a Redis that is killed and restarts empty or from an old snapshot, fed by a lossy broker and the log, by the log, and by the broker alone; under kill -9",
	full:    150 * time.Second, short: 3 * time.Second, redelivers: true, fails: true,
	requires: []string{"kill_runner", "kill_redis", "redis_empty", "redis_snapshot", "redis_saved", "redis_suspended", "exact_came_again", "logged_came_again", "broker_lost"},
	requiresLong: []string{"kill_reader", "died_at_point", "kill_redis_with_runner", "lost_while_catching_up", "terminated_at_work", "concurrent", "attempts",
		"parked_in_snapshot", "control_doubled"},
	run: runRedis,
}

// redisPoints are the points between the two stores. A runner kills itself there the third time, or later.
var redisPoints = []string{"redis: before the scripts", "redis: after the scripts", "redis: before the record", "redis: after the record"}

// redisRun is the cell with its Redis. The server keeps nothing on disk, unless the suite sends SAVE.
type redisRun struct {
	*run
	redis   *redistest.Server
	client  *goredis.Client
	runners []*process
	saved   int // items of exact in the snapshot, at most; -1: there is no snapshot
}

func runRedis(r *run) {
	if skipsRedis() {
		r.note, r.result.Judged = "skipped: KINORA_SKIP=redis", true
		return
	}
	r.ahead = 200
	r.server(brokerConfig{Window: 1024, Duplicate: 0.05, Groups: []string{"readers", brokerName, controlName}})
	s := &redisRun{run: r, saved: -1}
	s.start()
	s.gaugeModels()
	r.prove(func() {
		s.calm(0)
		r.during(s.disturb)
		s.settle()
	})
	s.judge()
}

func skipsRedis() bool { return slices.Contains(strings.Split(os.Getenv("KINORA_SKIP"), ","), "redis") }

// calm sets whether handlers do not fail any more.
func (s *redisRun) calm(is int64) {
	for _, p := range s.runners {
		p.status.set(wordCalm, is)
	}
}

// start starts Redis and the processes.
func (s *redisRun) start() {
	server, err := redistest.Start("--save", "", "--appendonly", "no")
	s.must(err)
	s.redis = server
	s.last = append(s.last, server.Stop)
	o, err := goredis.ParseURL(server.URL)
	s.must(err)
	s.client = goredis.NewClient(o)
	s.cleanup = append(s.cleanup, func() { _ = s.client.Close() })
	timeout := 4 * time.Second
	if !s.isLong() {
		timeout = 2 * time.Second // a suspect waits so long, and a lease, for its next attempt
	}
	_, _, s.runners = s.startAll(1, 3, func(c *settings) {
		c.Rate, c.Streams, c.Hot = 120, 60, 2
		if c.Role == running {
			c.Lease, c.Timeout, c.Grace, c.Lossy, c.Slow = builtLease, timeout, lossyGrace, true, 2*time.Millisecond
			c.Careful = s.intn(4) == 0
			c.More = map[string]string{"redis": server.URL}
		}
	})
}

// disturb injects one fault.
func (s *redisRun) disturb() {
	s.sleep(s.between(50*time.Millisecond, 400*time.Millisecond))
	for _, p := range s.runners { // those that have killed themselves
		if isClosed(p.life()) {
			s.inject("died_at_point", 1)
			p.Point = ""
			s.must(p.begin())
		}
	}
	done := s.kinds()
	lacks := func(kind string) bool { return done[kind] == 0 && s.intn(2) == 0 }
	switch n := s.intn(100); {
	case lacks("kill_runner"), n < 25:
		s.killRunner()
	case lacks("redis_saved"), n < 45:
		s.save()
	case lacks("redis_snapshot"), lacks("redis_empty"), lacks("kill_redis"), n < 65:
		s.loseRedis()
	case lacks("redis_suspended"), n < 80:
		s.suspend()
	default:
		terminate(s.run)
	}
}

// killRunner kills a runner. Some of the next lives end at a point between the two stores.
func (s *redisRun) killRunner() {
	p := s.runners[s.intn(len(s.runners))]
	if p.kill() && p.status.get(wordReaderOpen) > 0 {
		s.inject("kill_reader", 1)
	}
	s.beginRunner(p)
}

func (s *redisRun) beginRunner(p *process) {
	p.status.set(wordReaderOpen, 0)
	p.Point = ""
	if s.intn(4) == 0 {
		p.Point = redisPoints[s.intn(len(redisPoints))] + []string{"#3", "#10", "#30"}[s.intn(3)]
	}
	s.must(p.begin())
}

// save lets Redis write a snapshot, and counts the messages that are parked then.
func (s *redisRun) save() {
	parked := s.countOf(`select count(*) from kinora.parked where projector = any($1)`, []string{exactName, readName})
	s.must(s.client.Save(s.suite.ctx).Err())
	s.saved = s.items(exactName)
	s.trace.printf("saved %d", s.saved)
	s.inject("redis_saved", 1)
	s.inject("parked_in_snapshot", parked)
}

// suspend stops Redis for a time that is often longer than the clients wait.
func (s *redisRun) suspend() {
	s.must(s.redis.Suspend())
	s.trace.printf("suspended redis")
	most := 3 * time.Second
	if !s.isLong() {
		most = time.Second
	}
	s.sleep(s.between(100*time.Millisecond, most))
	if s.intn(5) == 0 {
		s.inject("redis_killed_suspended", 1)
		s.restartRedis(0)
		return
	}
	s.must(s.redis.Resume())
	s.trace.printf("resumed redis")
	s.inject("redis_suspended", 1)
}

// loseRedis kills Redis, which restarts empty or with the last snapshot. Half of the times it waits until the
// read models are complete again.
func (s *redisRun) loseRedis() {
	all, items := s.countOf(`select count(*) from kinora.events`), s.items(exactName)
	if items < all-s.ahead {
		s.inject("lost_while_catching_up", 1)
	}
	s.restartRedis(items)
	if limit := 15 * time.Second; s.intn(2) == 0 {
		if !s.isLong() {
			limit = time.Second
		}
		s.awaitItems(limit)
	}
}

// restartRedis kills Redis and starts it again, sometimes with a runner. items is the number of items that it has.
func (s *redisRun) restartRedis(items int) {
	var dead *process
	if s.intn(4) == 0 {
		dead = s.runners[s.intn(len(s.runners))]
		if dead.kill() {
			s.inject("kill_redis_with_runner", 1)
		}
	}
	isOpen := slices.ContainsFunc(s.runners, func(p *process) bool { return p.status.get(wordUnitOpen)+p.status.get(wordManyOpen) > 0 })
	s.must(s.redis.End("KILL"))
	kind, has := "redis_snapshot", s.saved
	if s.saved < 0 || s.kinds()[kind] > 0 && s.intn(2) == 0 {
		kind, has = "redis_empty", 0
		s.saved = -1
		s.must(s.redis.DeleteData())
	}
	s.trace.printf("killed redis: %s, it had %d, and has %d", kind, items, has)
	if dead != nil && s.intn(2) == 0 {
		s.beginRunner(dead)
		dead = nil
	}
	s.sleep(s.between(0, 300*time.Millisecond))
	s.must(s.redis.Begin())
	s.trace.printf("began redis")
	if dead != nil {
		s.beginRunner(dead)
	}
	if isOpen {
		s.inject("kill_redis", 1)
	}
	if items > has {
		s.inject(kind, 1)
	}
}

// settle waits until everything is applied.
func (s *redisRun) settle() {
	s.calm(1)
	for _, p := range s.runners {
		if p.Point != "" { // it must not die now
			p.kill()
			p.Point = ""
			s.must(p.begin())
		}
	}
	for _, p := range s.all {
		p.awaitReady()
	}
	s.waitDrained(10 * lease)
	if done, rest := s.awaitItems(s.suite.patience()); !done {
		s.fail("lost 1, doubled 0: not complete: %s", rest)
		return
	}
	s.waitDrained(10 * lease) // events that came again may have been parked
}
