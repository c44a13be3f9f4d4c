package projector_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// A run of messages that can never be applied delays no other message: each is parked at once, those that no
// handler has seen even without an attempt.
// Promise: G6.6
func TestARunOfBadMessagesDelaysNoOther(t *testing.T) {
	t.Parallel()
	const bad, good = 1000, 1000
	for _, source := range []string{"log", "broker"} {
		for why, draft := range map[string]eventstore.Draft{
			"undecodable":          {Type: "posted", Schema: 1, Data: []byte(`{"Stars":"many"}`)},
			"unregistered version": {Type: "posted", Schema: 2, Data: []byte(`{"Stars":1}`)},
			"unregistered type":    {Type: "other", Schema: 1, Data: []byte(`{"Stars":1}`)},
			"malformed":            {Type: "posted", Schema: 1, Data: []byte(`{"Stars":1}`)},
			"permanent":            {Type: "posted", Schema: 1, Data: []byte(`{"Stars":-1}`)},
		} {
			if source == "log" && (why == "unregistered type" || why == "malformed") { // it reads none of these
				continue
			}
			t.Run(source+"/"+why, func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					db, f := newDB(t), make(subscription, bad+good)
					src, opts := projector.FromLog(db), marked
					if source == "broker" {
						src, opts = projector.Subscribe(f, "review"), delivered
					}
					for i := range bad + good {
						if i == bad {
							draft = eventstore.Draft{Type: "posted", Schema: 1, Data: []byte(`{"Stars":1}`)}
						}
						draft.ID = uuid.NewString()
						stream := fmt.Sprint("review-", i)
						_, err := db.Append(t.Context(), stream, eventstore.Any, []eventstore.Draft{draft})
						require.NoError(t, err)
						if source == "log" {
							continue
						}
						m := published(t, db, stream)[0]
						if why == "malformed" && i < bad {
							m.Metadata[provider.HeaderSchema] = "none"
						}
						f <- m
					}
					p := define(opts, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
						if e.Data.Stars < 0 {
							return errNever
						}
						return add(ctx, tx, e)
					})
					stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, p))
					time.Sleep(time.Second) // by the virtual clock: only pauses count
					require.NoError(t, stop())
					require.Equal(t, good, total(db, "totals"))
					list := parked(t, db)
					require.Len(t, list, bad)
					for _, row := range list {
						require.Equal(t, row.Needs == "", row.Attempts == 1)
						require.NotEmpty(t, row.Payload)
					}
				})
			})
		}
	}
}

// coded returns an error with this code.
func coded(code string) error {
	return &projector.Error{Class: projector.ClassUnknown, Code: code, Err: errNo}
}

// A worker waits after three failures of one cause in a row. Those of other causes do not add up, and those of
// parked messages do not count. It is logged, and the runner reports it until a message is applied.
// Promise: G6.6
func TestABrakeIsOfOneCause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription, 64)
		bad := newFaults(map[string]error{})
		codes := []string{"x", "y", "x", "y", "", "x", "y", "x"} // the third failure with code x is the sixth message
		for n, code := range codes {
			bad.set(fmt.Sprint("m", n, "-1"), coded(code))
			f <- keyed(fmt.Sprint("m", n), 1)
		}
		log := &logs{}
		cfg := projector.RunnerConfig{Retry: claim.Backoff{Base: time.Hour}, Logger: log.logger()}
		stop := run(t, db, f, cfg, define(marked, bad.run))
		time.Sleep(50 * time.Millisecond)
		outages := func() []provider.Outage {
			s, err := db.Survey(t.Context(), 100)
			require.NoError(t, err)
			require.Len(t, s.Services, 1)
			return s.Services[0].Outages
		}
		time.Sleep(10 * time.Second)
		require.Contains(t, log.String(), `msg="messages fail one after the other: the worker waits" projector=p handler=p/a code=x failures=3 again_in=100ms`)
		require.Len(t, outages(), 1)
		one := outages()[0]
		one.Until = time.Time{}
		require.Equal(t, provider.Outage{Projector: "p", Handler: "p/a", Class: "unknown", Code: "x"}, one)
		f.deliver(t, keyed("good", 1))
		time.Sleep(10 * time.Second)
		require.Empty(t, outages(), "a message was applied")
		require.NoError(t, stop())
		var at []time.Duration
		for n := range codes {
			at = append(at, bad.at[fmt.Sprint("m", n, "-1")][0])
		}
		ms := time.Millisecond
		require.Equal(t, []time.Duration{0, 0, 0, 0, 0, 0, 100 * ms, 200 * ms}, at)
	})
}

// A reader of the log waits too, also if each event is a page of its own.
// Promise: G6.6
func TestAReaderOfTheLogWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, began := newDB(t), time.Now()
		var at []time.Duration
		p := define(projector.Options{}, func(context.Context, txn, eventstore.Event[posted]) error {
			at = append(at, time.Since(began).Round(time.Millisecond))
			return coded("x")
		})
		cfg := projector.RunnerConfig{Retry: claim.Backoff{Base: time.Hour}}
		stop := start(t, newRunner(t, db, projector.FromLog(db), cfg, p))
		for n := range 5 {
			draft := eventstore.Draft{ID: uuid.NewString(), Type: "posted", Schema: 1, Data: []byte(`{"Stars":1}`)}
			_, err := db.Append(t.Context(), fmt.Sprint("review-", n), eventstore.Any, []eventstore.Draft{draft})
			require.NoError(t, err)
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(time.Second)
		require.NoError(t, stop())
		ms := time.Millisecond
		require.Equal(t, []time.Duration{0, 10 * ms, 20 * ms, 130 * ms, 330 * ms}, at)
	})
}

// A worker that waits goes on as soon as another one of its projector applies a message.
// Promise: G6.6
func TestAWaitEndsWhenAnotherWorkerAppliesAMessage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription, 64)
		bad := newFaults(map[string]error{})
		ofFirst := func(key string) bool { return provider.LaneOfKey(key)[1]%2 == 0 } // of two workers
		var keys []string
		for n := 0; len(keys) < 12; n++ {
			if key := fmt.Sprint("bad", n); ofFirst(key) {
				keys = append(keys, key)
			}
		}
		good := "good"
		for n := 0; ofFirst(good); n++ {
			good = fmt.Sprint("good", n)
		}
		for _, key := range keys {
			bad.set(key+"-1", errNo)
			f <- keyed(key, 1)
		}
		stop := run(t, db, f, projector.RunnerConfig{Concurrency: 2, Batch: 1, Retry: claim.Backoff{Base: time.Hour}}, define(marked, bad.run))
		time.Sleep(13 * time.Second) // it waits for 12.8 s before the eleventh, from 12.7 s on
		next := keys[10] + "-1"
		require.Zero(t, bad.tried(next))
		f.deliver(t, keyed(good, 1))
		time.Sleep(time.Second)
		require.Equal(t, 1, bad.tried(next))
		require.NoError(t, stop())
	})
}
