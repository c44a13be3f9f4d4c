package projector_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// diary records the calls of an observer.
type diary struct {
	mu    sync.Mutex
	lines []string
}

func (d *diary) write(format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lines = append(d.lines, strings.TrimSpace(fmt.Sprintf(format, args...)))
}

// read returns the lines since the last call.
func (d *diary) read() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	lines := d.lines
	d.lines = nil
	return lines
}

func (d *diary) observer() projector.RunnerObserver {
	return projector.RunnerObserver{
		Handled: func(handler string, skipped bool, waited, took time.Duration, err error) {
			d.write("handled %s: skipped %t, waited %s, took %s, failed %t", handler, skipped, waited, took, err != nil)
		},
		Unit: func(projector string, messages int, took time.Duration, err error) {
			d.write("unit %s: %d messages, took %s, failed %t", projector, messages, took, err != nil)
		},
		Retried: func(projector string, class projector.Class, after time.Duration) {
			d.write("retried %s: %s, after %s", projector, class, after)
		},
		Parked: func(projector, handler string, class projector.Class, code string) {
			d.write("parked %s %s: %s %s", projector, handler, class, code)
		},
		Replayed: func(projector string) { d.write("replayed %s", projector) },
		Pruned:   func(rows int) { d.write("pruned %d", rows) },
		Unmarked: func(handler string) { d.write("unmarked %s", handler) },
	}
}

var errTeapot = errors.New("teapot")

// The observer receives every step of a runner, in order, with its duration.
func TestObserverReceivesEveryStepOfARunner(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, d := newDB(t), make(subscription), &diary{}
		tries := map[string]int{}
		p := define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			time.Sleep(time.Second)
			switch tries[e.ID]++; {
			case e.ID == "k-1" && tries[e.ID] == 1:
				return errTeapot
			case e.ID == "k-2" && tries[e.ID] == 1:
				return errNo
			}
			return add(ctx, tx, e)
		})
		stop := run(t, db, f, projector.RunnerConfig{
			Classify: func(err error) projector.Class {
				if errors.Is(err, errTeapot) {
					return projector.ClassTransient
				}
				return projector.ClassUnknown
			},
			Observer: d.observer(),
		}, p)
		f.deliver(t, recorded(keyed("k", 1), time.Now().Add(-time.Minute)))
		synctest.Wait()
		require.Equal(t, []string{
			"unit p: 1 messages, took 1s, failed true",
			"retried p: transient, after 100ms",
			"unit p: 1 messages, took 1s, failed false",
			"handled p/a: skipped false, waited 1m2.1s, took 1s, failed false",
		}, d.read())

		f.deliver(t, keyed("k", 1))
		synctest.Wait()
		require.Equal(t, []string{
			"unit p: 1 messages, took 0s, failed false",
			"handled p/a: skipped true, waited 0s, took 0s, failed false",
		}, d.read(), "a duplicate")

		f.deliver(t, keyed("k", 2))
		f.deliver(t, keyed("k", 3))
		time.Sleep(10 * time.Second)
		require.Equal(t, []string{
			"unit p: 1 messages, took 1s, failed true",
			"unit p: 1 messages, took 0s, failed false",
			"parked p p/a: unknown",
			"handled p/a: skipped false, waited 0s, took 0s, failed true",
			"unit p: 1 messages, took 0s, failed false",
			"parked p : held",
			"handled p/a: skipped false, waited 0s, took 1s, failed false",
			"replayed p",
			"unit p: 1 messages, took 1s, failed false",
			"handled p/a: skipped false, waited 0s, took 1s, failed false",
			"replayed p",
		}, d.read(), "a failure, the message that waits behind it, and the replay of both")
		require.NoError(t, stop())
	})
}

func TestObserverReceivesSuspectsAndStuckMessages(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, d := newDB(t), make(subscription), &diary{}
		crash(t, db, "dead", time.Second, "k-1")
		time.Sleep(2 * time.Second)
		bad := newFaults(map[string]error{"k-1": errNever})
		only := projector.RunnerObserver{Parked: d.observer().Parked}
		stop := run(t, db, f, projector.RunnerConfig{Observer: only}, define(marked, bad.run))
		f.deliver(t, keyed("k", 1), msg("x", "who knows", "{}"))
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.ElementsMatch(t, []string{"parked p p/a: permanent", "parked p : unknown crashed", "parked p : unable unregistered"}, d.read())
	})
}

// Error texts may contain user data. They are logged only on request.
func TestErrorTextsAreLoggedOnlyOnRequest(t *testing.T) {
	t.Parallel()
	for _, texts := range []bool{false, true} {
		t.Run(fmt.Sprint(texts), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var log bytes.Buffer
				db, f := newDB(t), make(subscription)
				secret := errors.New("a secret of a user")
				bad := newFaults(map[string]error{"k-1": secret, "l-1": &projector.Error{Class: projector.ClassTransient, Err: secret}, "m-1": projector.Permanent(secret)})
				cfg := projector.RunnerConfig{LogErrors: texts, Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
				stop := run(t, db, f, cfg, define(marked, bad.run))
				f.deliver(t, keyed("k", 1), keyed("m", 1))
				f.send(keyed("l", 1))
				time.Sleep(10 * time.Second)
				require.NoError(t, stop())
				require.Contains(t, log.String(), "message_id=k-1")
				require.Contains(t, log.String(), "msg=stuck")
				require.Contains(t, log.String(), "again_in=")
				require.Equal(t, texts, strings.Contains(log.String(), "secret"))
			})
		})
	}
}

type contextKey struct{}

type ownKey struct{}

// The values that the observer of a unit returns reach its handlers, before those of the message, and it
// gets the error of each attempt. The observer of output can change headers, which have the cause by
// then.
// Promise: G13.1
func TestObserverSurroundsUnits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, d := newDB(t), make(subscription), &diary{}
		tries := 0
		p := projector.Define("p", types, projector.Options{Markers: true}, projector.OnEmit("a",
			func(ctx context.Context, _ txn, e eventstore.Event[posted]) ([]outbox.Message, error) {
				d.write("handler of %s in %v, %v", e.ID, ctx.Value(contextKey{}), ctx.Value(ownKey{}))
				if tries++; tries == 1 {
					return nil, errNo
				}
				return []outbox.Message{{Topic: "out"}}, nil
			}))
		stop := run(t, db, f, projector.RunnerConfig{Observer: projector.RunnerObserver{
			Processing: func(projector string, messages []eventstore.Raw) (context.Context, func(error)) {
				d.write("begin %s: %s %s", projector, messages[0].ID, messages[0].Metadata.Traceparent)
				ctx, cancel := context.WithCancel(context.WithValue(context.Background(), contextKey{}, "unit"))
				cancel() // its end does not matter
				return ctx, func(err error) { d.write("end, failed %t", err != nil) }
			},
			Emitting: func(ctx context.Context, handler string, output []outbox.Message) {
				d.write("emit %s in %v: %s", handler, ctx.Value(contextKey{}), output[0].Headers[provider.HeaderTraceparent])
				output[0].Headers[provider.HeaderTraceparent] = "00-2"
			},
		}}, p)
		m := keyed("k", 1)
		m.Metadata[provider.HeaderTraceparent] = "00-1"
		m.SetContext(context.WithValue(context.WithValue(m.Context(), contextKey{}, "message"), ownKey{}, "kept"))
		f <- m
		acked(t, m)
		time.Sleep(10 * time.Second)
		require.Equal(t, []string{
			"begin p: k-1 00-1", "handler of k-1 in unit, kept", "end, failed true",
			"begin p: k-1 00-1", "end, failed false", // it is parked
			"begin p: k-1 00-1", "handler of k-1 in unit, <nil>", "emit p/a in unit: 00-1", "end, failed false",
		}, d.read())
		entries, err := db.Entries(t.Context(), outbox.Filter{})
		require.NoError(t, err)
		require.Len(t, entries, 1)
		require.Equal(t, "00-2", entries[0].Headers[provider.HeaderTraceparent])
		require.NoError(t, stop())
	})
}
