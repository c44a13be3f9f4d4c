package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
)

// The projectors with read models in Redis are:
//
//	exact    markers of its own, fed by a lossy broker and completed by the log
//	logged   fed by the log
//	broker   markers of its own, without the log: what Redis loses is missing
//	control  without markers
//
// The last two have consumer groups of their own, named as they are.

// Words of the status of a runner with Redis.
const (
	wordAgain      = 80 // events that the reader of exact applied again after a loss, of all lives; then those of logged
	wordReaderOpen = 82 // open units of logged
	wordCalm       = 83 // handlers do not fail any more; set by the suite
)

// redisList is the key of the list of command numbers of a stream.
func redisList(projector, stream string) string { return projector + ":list:" + stream }

// redisSums is the key of the hash of sums by stream.
func redisSums(projector string) string { return projector + ":sums" }

// Handlers fail now and then, and those of some events often.
const (
	redisFailOneIn    = 200
	redisStubborn     = 40 // one event in so many
	redisStubbornFail = 70 // percent of the attempts at it
)

var errRedisHandler = errors.New("it fails now")

// redisClient returns a client. Half of the runners have one that tries each command once.
func (w *work) redisClient() (*goredis.Client, error) {
	o, err := goredis.ParseURL(w.More["redis"])
	if err != nil {
		return nil, err
	}
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout = time.Second, time.Second, time.Second
	o.ContextTimeoutEnabled = w.Batched
	if w.Batched {
		o.MaxRetries = -1
	}
	return goredis.NewClient(o), nil
}

// projectRedis runs the projectors whose read models are in Redis.
func (w *work) projectRedis(ctx context.Context) error {
	client, err := w.redisClient()
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	own, err := redis.New(client, &redis.Config{OwnMarkers: true})
	if err != nil {
		return err
	}
	bare, err := redis.New(client, nil)
	if err != nil {
		return err
	}
	s := &started{status: w.status, ids: map[string]bool{}}
	heard := func(group string) *subscriber {
		return &subscriber{socket: w.Socket, name: w.Name, group: group, acking: func(string) {}}
	}
	lossyOne := heard(w.Group)
	lossyOne.acking = s.acking
	units := w.watchRedis(provider.Combine(own, w.db), s)
	marked := projector.Options{Markers: true, Ordered: true}
	var services []kinora.Service
	var last *projector.Runner
	add := func(u provider.Units[goredis.Pipeliner], src projector.Source, name string, opts projector.Options) {
		if err == nil {
			last, err = projector.NewRunner(u, src, w.redisConfig(), projector.Define(name, types, opts, projector.On(movedAs, w.applyRedis(name, s))))
			services = append(services, last)
		}
	}
	add(units, projector.Subscribe(newLossy(w, lossyOne), category), exactName, marked)
	add(units, projector.FromLog(w.db), readName, projector.Options{})
	add(units, projector.Subscribe(heard(brokerName), category), brokerName, projector.Options{Markers: true, BrokerOnly: true})
	add(provider.Combine(bare, w.db), projector.Subscribe(heard(controlName), category), controlName, projector.Options{})
	if err != nil {
		return err
	}
	w.ready(last.Running())
	return kinora.Run(ctx, services...)
}

func (w *work) redisConfig() projector.RunnerConfig {
	return projector.RunnerConfig{
		Concurrency: w.Concurrency, Batch: w.Unit, Careful: w.Careful, Lease: w.Lease, Timeout: w.Timeout, Drain: w.Patience, LogErrors: true,
		Retry: claim.Backoff{Base: 50 * time.Millisecond, Max: time.Second, Attempts: w.Attempts}, Grace: w.Grace, Log: w.db,
		Observer: projector.RunnerObserver{Completed: w.appliedAgain},
	}
}

// appliedAgain implements projector.RunnerObserver.Completed.
func (w *work) appliedAgain(name, reason string) {
	switch {
	case reason != "lost":
	case name == exactName:
		w.status.add(wordAgain, 1)
	case name == readName:
		w.status.add(wordAgain+1, 1)
	}
}

// applyRedis returns a handler that appends to a list and adds to a sum, so that a lost, doubled or misordered event shows.
func (w *work) applyRedis(name string, s *started) func(context.Context, goredis.Pipeliner, eventstore.Event[moved]) error {
	return func(ctx context.Context, tx goredis.Pipeliner, e eventstore.Event[moved]) error {
		if name == exactName {
			s.start(e.ID)
			w.status.add(wordDone, 1)
			w.trace.printf("start %s %s %d", e.ID, e.Data.Stream, e.Data.N)
		}
		if w.isSlow(e) {
			pause(ctx, w.Least+rand.N(w.Slow-w.Least))
		}
		if name != controlName && w.failsNow(e.Data) {
			return errRedisHandler
		}
		tx.RPush(ctx, redisList(name, e.Data.Stream), e.Data.N)
		tx.HIncrBy(ctx, redisSums(name), e.Data.Stream, e.Data.Amount)
		return nil
	}
}

// failsNow reports whether a handler fails this time.
func (w *work) failsNow(m moved) bool {
	if w.status.get(wordCalm) != 0 {
		return false
	}
	return rand.IntN(redisFailOneIn) == 0 || m.Amount%redisStubborn == 0 && rand.IntN(100) < redisStubbornFail
}

// watchedRedis records the units of projectors with markers of their own.
type watchedRedis struct {
	provider.Provider[goredis.Pipeliner]
	provider.Restorer // without it, the reader of the log would not restore anything
	provider.ReadyChecker
	provider.Operations
	w *work
	s *started
}

func (w *work) watchRedis(u provider.Provider[goredis.Pipeliner], s *started) watchedRedis {
	return watchedRedis{Provider: u, Restorer: u.(provider.Restorer), ReadyChecker: u.(provider.ReadyChecker), Operations: provider.OperationsOf(u), w: w, s: s}
}

// Lost implements provider.Restorer.
func (p watchedRedis) Lost(ctx context.Context, b provider.Build) ([]string, error) {
	ids, err := p.Restorer.Lost(ctx, b)
	if len(ids) > 0 {
		p.w.trace.printf("lost-parked %s %v", b.Projector, ids)
	}
	return ids, err
}

// SetCheckpoint implements provider.Progress.
func (p watchedRedis) SetCheckpoint(ctx context.Context, b provider.Build, from, to provider.Checkpoint) (bool, error) {
	ok, err := p.Provider.SetCheckpoint(ctx, b, from, to)
	p.w.trace.printf("set %s %v %d to %v %d: %t %v", b.Projector, from.Mode, from.Place.Position, to.Mode, to.Place.Position, ok, err)
	return ok, err
}

// Do implements provider.Units.
func (p watchedRedis) Do(ctx context.Context, u provider.Unit, run func(context.Context, goredis.Pipeliner, provider.Found) (provider.Closing, error)) error {
	switch u.Projector {
	case exactName:
		defer p.w.unit(p.s, u)()
	case readName:
		p.w.status.add(wordReaderOpen, 1)
		defer p.w.status.add(wordReaderOpen, -1)
	}
	err := p.Provider.Do(ctx, u, func(ctx context.Context, tx goredis.Pipeliner, found provider.Found) (provider.Closing, error) {
		c, err := run(ctx, tx, found)
		for _, a := range c.Park {
			p.w.trace.printf("park %s %s %s %s attempts %d after %s", u.Projector, a.Parked.MessageID, a.Parked.Class, a.Parked.Code, a.Parked.Attempts, a.After)
		}
		return c, err
	})
	p.w.trace.printf("unit %s %s %v", u.Projector, kindOfUnit(&u), err)
	return err
}

// kindOfUnit describes a unit and its messages.
func kindOfUnit(u *provider.Unit) string {
	kind := "delivery"
	switch {
	case u.Restore:
		kind = "restore"
	case u.IsReplay():
		kind = "replay"
	case u.Advance != nil:
		kind = fmt.Sprintf("advance %d to %d", u.Advance.From, u.Advance.To.Position)
	case u.Reader != nil:
		kind = fmt.Sprintf("reader %v", u.Reader.Mode)
	}
	for _, m := range u.Messages {
		kind += fmt.Sprintf(" %s@%d", m.ID, m.Position)
	}
	return kind
}
