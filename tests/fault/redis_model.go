package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// readRedis reads the read model of a projector by plain commands.
func readRedis(ctx context.Context, client *goredis.Client, projector string) (model, error) {
	m := model{map[string]int64{}, map[string][]int{}}
	sums, err := client.HGetAll(ctx, redisSums(projector)).Result()
	if err != nil {
		return m, err
	}
	for stream, text := range sums {
		if m.Totals[stream], err = strconv.ParseInt(text, 10, 64); err != nil {
			return m, err
		}
	}
	err = ofLists(ctx, client, projector, func(p goredis.Pipeliner, key string) goredis.Cmder { return p.LRange(ctx, key, 0, -1) }, func(stream string, c goredis.Cmder) error {
		m.Lists[stream] = nil
		for _, text := range c.(*goredis.StringSliceCmd).Val() {
			n, err := strconv.Atoi(text)
			if err != nil {
				return err
			}
			m.Lists[stream] = append(m.Lists[stream], n)
		}
		return nil
	})
	return m, err
}

// countRedis returns the number of items in all lists of a projector.
func countRedis(ctx context.Context, client *goredis.Client, projector string) (n int, err error) {
	err = ofLists(ctx, client, projector, func(p goredis.Pipeliner, key string) goredis.Cmder { return p.LLen(ctx, key) }, func(_ string, c goredis.Cmder) error {
		n += int(c.(*goredis.IntCmd).Val())
		return nil
	})
	return n, err
}

// ofLists sends a command for each list of a projector, and calls each with the replies.
func ofLists(ctx context.Context, client *goredis.Client, projector string, ask func(goredis.Pipeliner, string) goredis.Cmder, each func(stream string, c goredis.Cmder) error) error {
	of := map[string]goredis.Cmder{}
	p := client.Pipeline()
	all := client.Scan(ctx, 0, redisList(projector, "*"), 1000).Iterator()
	for all.Next(ctx) {
		if stream := strings.TrimPrefix(all.Val(), redisList(projector, "")); of[stream] == nil { // SCAN may return a key twice
			of[stream] = ask(p, all.Val())
		}
	}
	if err := all.Err(); err != nil || len(of) == 0 {
		return err
	}
	if _, err := p.Exec(ctx); err != nil {
		return err
	}
	for stream, c := range of {
		if err := each(stream, c); err != nil {
			return err
		}
	}
	return nil
}

// judge drains all processes, and compares the read models in Redis with the ledger.
func (s *redisRun) judge() {
	for _, as := range []role{producing, relaying, running} {
		for _, p := range s.of(as) {
			p.stop()
		}
	}
	var v verdict
	ledger, h := s.judgeAppends(&v)
	for _, name := range []string{exactName, readName} {
		var one verdict
		judgeModel(h, s.model(name), &one)
		s.traceWrong(name, &one)
		v.merge(name, &one)
	}
	for _, why := range v.reasons {
		s.trace.printf("verdict %s", why)
	}
	s.judgeBroker(h)
	s.judgeHeldAgainst()
	s.count(ledger, &v, s.countOf(`select count(*) from kinora.parked`))
}

// gaugeModels reads what the projectors in Redis have lost, and what the readers have applied again.
func (s *redisRun) gaugeModels() {
	verdictOf := func(name string) (v verdict) {
		var log verdict
		_, h := s.judgeAppends(&log)
		judgeModel(h, s.model(name), &v)
		return v
	}
	s.gauge("control_lost", func() int { return verdictOf(controlName).Lost })
	s.gauge("control_doubled", func() int { return verdictOf(controlName).Doubled })
	s.gauge("control_misordered", func() int { return verdictOf(controlName).Misordered })
	s.gauge("broker_lost", func() int { return verdictOf(brokerName).Lost })
	s.gauge("broker_misordered", func() int { return verdictOf(brokerName).Misordered })
	for i, name := range []string{exactName, readName} {
		s.gauge(name+"_came_again", func() int { return int(s.sum(running, wordAgain+i)) })
	}
	s.control = func() (wrong, byFault int) {
		events, err := readEvents(s.suite.ctx, s.pool)
		s.must(err)
		return len(verdictOf(controlName).streams), doubledBy(events, s.broker.copies(), s.model(controlName))
	}
}

// traceWrong writes the lists with violations to the history.
func (s *redisRun) traceWrong(projector string, v *verdict) {
	m := s.model(projector)
	for _, stream := range slices.Sorted(maps.Keys(v.streams)) {
		s.trace.printf("list %s %s %d", projector, stream, m.Lists[stream])
	}
}

// judgeBroker judges the projector without the log. The events that Redis has lost are missing, and a copy
// that comes later is applied later. Nothing is doubled.
func (s *redisRun) judgeBroker(h history) {
	var v verdict
	judgeModel(h, s.model(brokerName), &v)
	for _, why := range v.reasons {
		s.trace.printf("verdict %s %s", brokerName, why)
	}
	if v.Doubled+v.Phantom > 0 {
		s.fail("%s: lost 0, doubled %d, phantom %d", brokerName, v.Doubled, v.Phantom)
	}
}

func (s *redisRun) model(projector string) model {
	m, err := readRedis(s.suite.ctx, s.client, projector)
	s.must(err)
	return m
}

// items returns the number of items of a projector.
func (s *redisRun) items(projector string) int {
	n, err := countRedis(s.suite.ctx, s.client, projector)
	s.must(err)
	return n
}

// awaitItems waits until the read models have all events that exist now.
func (s *redisRun) awaitItems(limit time.Duration) (done bool, rest string) {
	begin, all := time.Now(), s.countOf(`select count(*) from kinora.events`)
	done = s.awaitOr(limit, func() bool {
		exact, logged := s.items(exactName), s.items(readName)
		rest = fmt.Sprintf("exact has %d and logged %d of %d events", exact, logged, all)
		return exact >= all && logged >= all
	})
	if done {
		s.measure("back_ms", time.Since(begin))
	}
	return done, rest
}
