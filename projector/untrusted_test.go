package projector_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// forged returns a message with the id of another one.
func forged(m *message.Message, stars int) *message.Message {
	f := m.Copy()
	f.Payload = fmt.Appendf(nil, `{"Stars":%d}`, stars)
	f.Metadata[provider.HeaderStream], f.Metadata[outbox.HeaderKey] = "victim", "victim"
	return f
}

// slowLog is a log that answers LogEvents when it is open, and counts that.
type slowLog struct {
	provider.Log
	open  chan struct{}
	reads atomic.Int32
	fails atomic.Bool
}

func (l *slowLog) LogEvents(ctx context.Context, ids []string) (map[string]eventstore.Raw, error) {
	l.reads.Add(1)
	<-l.open
	if l.fails.Load() {
		return nil, errors.New("away")
	}
	return l.Log.LogEvents(ctx, ids)
}

// All messages that wait share a read of the log. While the log is away, they wait.
// Promise: G10.5
func TestUntrustedMessagesShareReads(t *testing.T) {
	t.Parallel()
	for _, way := range []string{"subscription", "router"} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				log := &slowLog{Log: db, open: make(chan struct{})}
				log.fails.Store(true)
				f, cfg := make(subscription), projector.RunnerConfig{Log: log, Untrusted: true, Concurrency: 3}
				src := projector.Subscribe(f, "review")
				if way == "router" {
					src = projector.FromRouter()
				}
				r := newRunner(t, db, src, cfg, define(delivered, note("a")))
				stop := start(t, r)
				const streams, each = 5, 6
				var all []*message.Message
				for i := range streams {
					stream := fmt.Sprint("k-", i)
					write(t, db, stream, upTo(each)...)
					all = append(all, published(t, db, stream)...)
				}
				results := make(chan error, len(all))
				for _, m := range all {
					one := forged(m, 9).Copy()
					go func() {
						if way == "router" {
							results <- r.Handle(one)
							return
						}
						f <- one
						<-one.Acked()
						results <- nil
					}()
					synctest.Wait()
				}
				require.EqualValues(t, 1, log.reads.Load())
				close(log.open)
				time.Sleep(time.Second)
				require.Empty(t, results)
				log.fails.Store(false)
				before := log.reads.Load()
				for range all {
					require.NoError(t, <-results)
				}
				require.LessOrEqual(t, log.reads.Load()-before, int32(2), "the first message is read alone, and then all others")
				require.NoError(t, stop())
				for i := range streams {
					require.Equal(t, upTo(each), noted(db, "a", fmt.Sprint("k-", i)))
				}
				require.Empty(t, parked(t, db))
			})
		})
	}
}

// A message that is not in the log leaves nothing under its id: an event that is appended with the id later is applied,
// Wait waits for it, and a rebuild does not skip it.
// Promise: G10.5
func TestForgedIDIsNotThatOfAnEventThatIsAppendedLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		cfg, p := projector.RunnerConfig{Untrusted: true}, built(projector.Options{Markers: true}, 1)
		r := newRunner(t, db, projector.Subscribe(f, "review"), cfg, p)
		stop := start(t, r)
		time.Sleep(3 * time.Second)
		id := uuid.NewString()
		m := keyed("k-1", 9)
		m.UUID = id
		f.deliver(t, m, m)
		at, err := db.Append(t.Context(), "k-1", eventstore.Any, []eventstore.Draft{{ID: id, Type: "posted", Schema: 1, Data: []byte(`{"Stars":1}`)}})
		require.NoError(t, err)
		require.NoError(t, p.Wait(t.Context(), db, at))
		require.Equal(t, []string{"unknown " + id + " stuck permanent no_event 1"}, rows(parked(t, db)))
		_, err = projector.Skip(t.Context(), db, all, person)
		require.NoError(t, err)
		require.NoError(t, rebuild(t, r, projector.Rebuild{How: projector.InPlace, Decision: person}))
		f.deliver(t, published(t, db, "k-1")...)
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "notes", "k-1"))
	})
}

// What was parked while the source was trusted is taken from the log too, if it is there.
// Promise: G10.5
func TestParkedMessagesOfAnUntrustedRunnerAreTakenFromTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		never := func(context.Context, txn, eventstore.Event[posted]) error { return errNever }
		stop := run(t, db, f, projector.RunnerConfig{}, define(delivered, never))
		write(t, db, "k-1", 1)
		f.deliver(t, forged(published(t, db, "k-1")[0], 9), msg("other", "posted", `{"Stars":2}`))
		require.NoError(t, stop())
		require.Len(t, parked(t, db), 2)
		replayAll(t, db, all)
		cfg := projector.RunnerConfig{Untrusted: true}
		dry, err := define(delivered, note("a")).DryRun(t.Context(), db, all, &cfg)
		require.NoError(t, err)
		require.Equal(t, 2, dry.Messages)
		require.NotContains(t, fmt.Sprint(dry.Changes), "victim")
		stop = run(t, db, f, cfg, define(delivered, note("a")))
		time.Sleep(time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "a", "k-1"))
		require.Equal(t, []int{2}, noted(db, "a", "review-1"), "another runner has taken it")
		require.Empty(t, noted(db, "a", "victim"))
	})
}

// A program that does not feed the live read model leaves deliveries to the reader of the log. One that is not in the
// log would wait until it does, and all others behind it.
// Promise: G10.5
func TestForgedMessageStopsNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		write(t, db, "k-1", 1)
		cfg, store := projector.RunnerConfig{Log: db, Untrusted: true, Grace: time.Hour}, &stalled{unit: db}
		stop := start(t, newRunner(t, store, projector.Subscribe(f, "review"), cfg, built(projector.Options{Markers: true}, 1)))
		time.Sleep(10 * time.Second)
		two := built(projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen}, 10)
		stopTwo := start(t, newRunner(t, db, projector.Subscribe(make(subscription), "review"), cfg, two))
		time.Sleep(100 * time.Millisecond)
		store.is.Store(true)
		state(t, db, two, 2, "live")
		store.is.Store(false)
		time.Sleep(10 * time.Second)
		write(t, db, "k-1", 2)
		f.send(keyed("k-1", 9))
		time.Sleep(10 * time.Second)
		m := f.send(publishedAfter(t, db, "k-1", 1)...)[0]
		time.Sleep(10 * time.Second)
		require.True(t, isAcked(m))
		require.Equal(t, times(10, upTo(2)), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
	})
}

// With Ordered, an event that is delivered before those before it waits for them.
// Promise: G10.5
func TestForgedDeliveryKeepsTheOrder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		opts := projector.Options{Markers: true, Ordered: true}
		stop := run(t, db, f, projector.RunnerConfig{Untrusted: true, Grace: time.Hour, Concurrency: 3}, define(opts, note("a")))
		time.Sleep(3 * time.Second)
		write(t, db, "k-1", upTo(5)...)
		all := published(t, db, "k-1")
		f.deliver(t, forged(all[2], 9))
		require.Equal(t, upTo(3), noted(db, "a", "k-1"))
		f.deliver(t, all...)
		require.NoError(t, stop())
		require.Equal(t, upTo(5), noted(db, "a", "k-1"))
	})
}

// A message that a projector would skip is skipped, not parked.
func TestForgedMessageThatNoHandlerTakesIsSkipped(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		opts := delivered
		opts.SkipUnknown = true
		stop := run(t, db, f, projector.RunnerConfig{Untrusted: true}, define(opts, note("a")))
		f.deliver(t, msg("1", "unhandled", `{}`), msg("2", "unregistered", `{}`))
		require.Empty(t, parked(t, db))
		f.deliver(t, msg("", "posted", `{"Stars":1}`), msg("\x00", "posted", `{"Stars":2}`))
		require.NoError(t, stop())
		require.Equal(t, []string{"unknown stuck permanent no_event 1", "stuck permanent no_event 1"}, rows(parked(t, db)))
	})
}

// Promise: G10.5
func TestUntrustedIsRefusedWhereItCannotHold(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	src := projector.Subscribe(make(subscription), "review")
	for want, c := range map[string]struct {
		cfg  projector.RunnerConfig
		opts projector.Options
		db   unit
	}{
		"requires a log":  {db: unlogged{db}, opts: delivered},
		"give the topics": {cfg: decoding, opts: delivered, db: db},
		"could halt it":   {opts: projector.Options{Markers: true, Parking: projector.Halt}, db: db},
		"":                {opts: delivered, db: db},
	} {
		c.cfg.Untrusted = true
		_, err := projector.NewRunner(c.db, src, c.cfg, define(c.opts, note("a")))
		if want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, want)
		}
	}
}

type unlogged struct{ unit }
