package redis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// The steps of a unit of both stores. A process is killed before each of them.
const (
	stepScripts = "the scripts"
	stepCommit  = "the commit of the second store"
	stepParks   = "the commit of what is parked"
	stepRecord  = "the record of what is parked"
	stepEnd     = "the end of the unit"
)

// stepKiller kills its process before a step of a unit, when that comes for the n-th time.
type stepKiller struct {
	*redis.Units
	step string
	left *int
}

func (k stepKiller) reached(step string) {
	if k.step != step {
		return
	}
	if *k.left--; *k.left == 0 {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

func (k stepKiller) DoCombined(ctx context.Context, u provider.Unit, run func(context.Context, pipe, provider.Found) (provider.Closing, error)) (func(context.Context) error, error) {
	ran, parks := false, false
	commit, err := k.Units.DoCombined(ctx, u, func(ctx context.Context, tx pipe, found provider.Found) (provider.Closing, error) {
		c, err := run(ctx, tx, found)
		parks = len(c.Park) > 0
		if ran = ran || tx.Len() > 0 || len(c.Park) > 0; ran && err == nil {
			k.reached(stepScripts)
		}
		return c, err
	})
	if err == nil && ran {
		k.reached(stepCommit)
	}
	if err == nil && parks {
		k.reached(stepParks)
	}
	switch {
	case commit != nil:
		return func(ctx context.Context) error {
			k.reached(stepRecord)
			err := commit(ctx)
			k.reached(stepEnd)
			return err
		}, err
	case err == nil && ran:
		return func(context.Context) error { k.reached(stepEnd); return nil }, nil
	}
	return nil, err
}

// ownChild applies the events of an order with markers in Redis, from a broker or from the log. One event
// fails twice.
func ownChild(arm string, o order, db *sqlite.DB) error {
	options, err := goredis.ParseURL(o.URL)
	if err != nil {
		return err
	}
	s := space{goredis.NewClient(options), o.Prefix}
	units, err := redis.New(s.client, &redis.Config{OwnMarkers: true, Prefix: o.Prefix[:len(o.Prefix)-1]})
	if err != nil {
		return err
	}
	u := provider.Combine(stepKiller{units, o.Step, &o.KillAfter}, db)
	p := define(marked, func(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
		if e.Data.Stars == 4 && e.Stream == "review-1" {
			if n, err := s.client.Incr(ctx, s.prefix+"tries").Result(); n <= 2 || err != nil {
				return errors.Join(err, errors.New("it fails twice"))
			}
		}
		return s.list(ctx, tx, e)
	})
	cfg := projector.RunnerConfig{Batch: 4, Lease: time.Second, Logger: slog.New(slog.DiscardHandler)}
	if arm == "broker" {
		return apply(o, cfg, db, u, p)
	}
	r, err := projector.NewRunner(u, projector.FromLog(db), cfg, p)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	for {
		lag, err := p.Lag(ctx, projector.StateOf(u, db))
		rows, failed := db.Parked(ctx, projector.ParkedFilter{})
		if err := errors.Join(err, failed); err != nil {
			return err
		}
		if lag.Events == 0 && len(rows) == 0 {
			break
		}
		time.Sleep(5 * time.Millisecond) // it polls
	}
	cancel()
	return <-done
}

// A worker that is killed at any step leaves a read model in which each event takes effect once, in
// order, also if it fails and is parked in between.
// Promise: G5.3
func TestAKillAtAnyStepLosesAndDoublesNothing(t *testing.T) {
	t.Parallel()
	for _, source := range []string{"broker", "log"} {
		for _, step := range []string{stepScripts, stepCommit, stepParks, stepRecord, stepEnd} {
			t.Run(source+", before "+step, func(t *testing.T) {
				t.Parallel()
				s := sharedSpace(t)
				s.prefix = strings.TrimSuffix(s.prefix, ":") + "-own_"
				path := filepath.Join(t.TempDir(), "store.db")
				db, err := sqlite.Open(t.Context(), path, nil)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, db.Close()) })
				require.NoError(t, db.Migrate(t.Context()))
				o := order{URL: redistest.Shared(t), Prefix: s.prefix, Path: path, Step: step}
				counts := map[string]int{}
				for i := range 30 {
					key := fmt.Sprintf("review-%d", i%3)
					counts[key]++
					e := event{ID: fmt.Sprintf("%s-%d", key, counts[key]), Key: key, Posted: posted{key, counts[key]}}
					o.Events = append(o.Events, e)
					if source == "log" {
						drafts, err := types.Encode(t.Context(), e.Posted)
						require.NoError(t, err)
						_, err = db.Append(t.Context(), key, eventstore.Any, drafts)
						require.NoError(t, err)
					}
				}
				kills := []int{2, 5, 3}
				if step == stepParks || step == stepRecord { // once for each unit that parks
					kills = []int{1, 1}
				}
				killed := rerun(t, source, o, kills)
				s.requireLists(t, counts)
				require.Positive(t, killed)
			})
		}
	}
}

// rerun runs children until one ends by itself. It returns how many were killed.
func rerun(t *testing.T, arm string, o order, kills []int) (killed int) {
	for n := 0; ; n++ {
		if o.KillAfter = 0; n < len(kills) {
			o.KillAfter = kills[n]
		}
		said, err := runChild(t, arm, o)
		for line := range strings.Lines(said) {
			if id, ok := strings.CutPrefix(strings.TrimSpace(line), "acked "); ok {
				o.Events = slices.DeleteFunc(o.Events, func(e event) bool { return e.ID == id })
			}
		}
		if err == nil {
			return killed
		}
		require.EqualError(t, err, "signal: killed")
		killed++
	}
}

// If the reply to a script is lost, its messages are applied once: the markers decide, or the
// checkpoint.
// Promise: G5.3
func TestALostReplyOfAScriptDoublesNothing(t *testing.T) {
	t.Parallel()
	for _, source := range []string{"broker", "log"} {
		for name, how := range map[string]func(net.Conn){
			"the connection ends":    func(c net.Conn) { _ = c.Close() },
			"there is never a reply": func(net.Conn) {},
		} {
			t.Run(source+", "+name, func(t *testing.T) {
				t.Parallel()
				server := redistest.Private(t)
				p := newProxy(t, server.Addr)
				s := newSpace(redistest.Client(t, "redis://"+p.addr, func(o *goredis.Options) {
					o.ReadTimeout, o.MaxRetries = 300*time.Millisecond, -1
				}))
				db := newRouted(t)
				w, cfg := newWriter(t, db), projector.RunnerConfig{Batch: 5, Lease: time.Second, Grace: 100 * time.Millisecond}
				cfg.Retry.Base, cfg.Retry.Max = time.Millisecond, 20*time.Millisecond
				var ambiguous atomic.Int64
				cfg.Observer.Retried = func(_ string, class projector.Class, _ time.Duration) {
					if class == provider.ClassAmbiguous {
						ambiguous.Add(1)
					}
				}
				u, f := provider.Combine(s.own(t), db), make(subscription)
				w.write(10, streams(3)...)
				if source == "log" {
					fromLog(t, u, db, cfg, define(projector.Options{}, s.list))
				} else {
					run(t, u, f, cfg, define(marked, s.list))
				}
				applied := func() bool {
					return !slices.ContainsFunc(streams(3), func(name string) bool { return len(s.listed(t, name)) < w.n[name] })
				}
				eventually(t, "the first are applied", applied)
				for round := range 4 {
					p.loseReply(how)
					w.write(3, streams(3)...)
					if source == "broker" && round%2 == 0 { // else the log brings them
						for _, m := range w.published(streams(3)...) {
							f <- m
							<-m.Acked()
						}
					}
					eventually(t, "all are applied", applied)
				}
				require.Positive(t, ambiguous.Load(), "the reply of a unit was lost")
				s.requireLists(t, w.n)
			})
		}
	}
}
