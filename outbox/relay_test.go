package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/longtest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// publication is one message of one Publish call.
type publication struct {
	call int
	id   string
	at   time.Duration // since the publisher was created
}

// publisher records the publications that verdict accepts.
type publisher struct {
	mu      sync.Mutex
	start   time.Time
	calls   int
	log     []publication
	payload map[string]string
	verdict func(call int, topic string, ms []*message.Message) error
}

func newPublisher(verdict func(call int, topic string, ms []*message.Message) error) *publisher {
	return &publisher{start: time.Now(), payload: map[string]string{}, verdict: verdict}
}

func (p *publisher) Publish(topic string, ms ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls++
	if p.verdict != nil {
		if err := p.verdict(p.calls, topic, ms); err != nil {
			return err
		}
	}
	for _, m := range ms {
		p.log = append(p.log, publication{p.calls, m.UUID, time.Since(p.start)})
		p.payload[m.UUID] = fmt.Sprintf("%s %v", m.Payload, m.Metadata)
	}
	return nil
}

func (*publisher) Close() error { return nil }

func (p *publisher) ids() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var ids []string
	for _, x := range p.log {
		ids = append(ids, x.id)
	}
	return ids
}

func newDB(t *testing.T) *memory.DB {
	t.Helper()
	db, err := memory.New(nil)
	require.NoError(t, err)
	return db
}

// enqueue adds messages to topic t in order. The first letter of an id is its key.
func enqueue(t *testing.T, db *memory.DB, ids ...string) {
	t.Helper()
	require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
		for _, id := range ids {
			m := outbox.Message{ID: id, Topic: "t", Key: id[:1], Payload: []byte("payload of " + id)}
			if err := db.InTx(tx).Enqueue(t.Context(), m); err != nil {
				return err
			}
		}
		return nil
	}))
}

const none = -1 // retention of published entries: none is kept

// start runs a relay until the returned function stops it.
func start(t *testing.T, s provider.Outbox, p message.Publisher, cfg outbox.RelayConfig) (stop func() error) {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	switch cfg.Keep.Published {
	case 0:
		cfg.Keep.Published = 24 * time.Hour // so that tests can inspect published entries
	case none:
		cfg.Keep.Published = 0
	}
	r, err := outbox.NewRelay(s, p, &cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	return func() error {
		cancel()
		return <-done
	}
}

func entries(t *testing.T, db *memory.DB) map[string]outbox.Entry {
	t.Helper()
	list, err := db.Entries(t.Context(), outbox.Filter{Limit: 100_000})
	require.NoError(t, err)
	byID := map[string]outbox.Entry{}
	for _, e := range list {
		byID[e.ID] = e
	}
	return byID
}

// The name of a relay is stored with each claim: with one that cannot be stored it would never claim.
func TestTheNameOfARelayMustBeStorable(t *testing.T) {
	t.Parallel()
	for _, holder := range []string{"relay\x00", "\xff", strings.Repeat("r", 256)} {
		_, err := outbox.NewRelay(newDB(t), newPublisher(nil), &outbox.RelayConfig{Holder: holder})
		require.ErrorIs(t, err, eventstore.ErrInvalid)
	}
}

// Promise: G3.1
func TestRelayPublishesInOrderAndMarks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(nil)
		enqueue(t, db, "a1", "b1", "a2", "c1", "a3")
		stop := start(t, db, pub, outbox.RelayConfig{})
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, []string{"a1", "b1", "c1", "a2", "a3"}, pub.ids())
		require.Equal(t, 3, pub.calls, "at most one message per key in a call")
		for id, e := range entries(t, db) {
			require.Equal(t, outbox.Published, e.Status, id)
			require.Equal(t, 1, e.Attempts, id)
			require.False(t, e.PublishedAt.IsZero(), id)
		}
	})
}

func TestRelayWithOrderedPublisherTakesOneCall(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(nil)
		enqueue(t, db, "a1", "b1", "a2", "c1", "a3")
		stop := start(t, db, pub, outbox.RelayConfig{OrderedPublisher: true})
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, []string{"a1", "b1", "a2", "c1", "a3"}, pub.ids())
		require.Equal(t, 1, pub.calls)
	})
}

// Backoff sets the schedule and the limit: a failure is retried after 30 s, then after a minute,
// and so on. After the eighth failure the entry is abandoned; its key waits, and no other does.
// Promise: G3.5, G3.6
func TestRelayBackoffScheduleThenAbandoned(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var tries []time.Duration
		begin := time.Now()
		pub := newPublisher(func(_ int, _ string, ms []*message.Message) error {
			if slices.ContainsFunc(ms, func(m *message.Message) bool { return m.UUID == "a1" }) {
				if len(ms) == 1 {
					tries = append(tries, time.Since(begin).Round(time.Second))
				}
				return errors.New("refused: secret-of-a-user")
			}
			return nil
		})
		db := newDB(t)
		enqueue(t, db, "a1", "a2", "b1")
		stop := start(t, db, pub, outbox.RelayConfig{})
		time.Sleep(longtest.Or(3*time.Hour, 24*time.Hour))
		synctest.Wait()
		require.Equal(t, []string{"b1"}, pub.ids(), "the failing key waits, the other does not")
		all := entries(t, db)
		a1, a2 := all["a1"], all["a2"]
		require.Equal(t, outbox.Abandoned, a1.Status)
		require.Equal(t, 8, a1.Attempts)
		require.Equal(t, "*errors.errorString", a1.LastError, "the class, never the text")
		require.Equal(t, outbox.Held, a2.Status)
		require.Zero(t, a2.Attempts, "an entry that was never tried has no attempt counted")
		var want []time.Duration
		at := time.Duration(0)
		for _, d := range []time.Duration{0, 30, 60, 120, 240, 480, 960, 1920} {
			at += d * time.Second
			want = append(want, at)
		}
		require.Len(t, tries, 8)
		for i := range want {
			require.InDelta(t, want[i].Seconds(), tries[i].Seconds(), float64(2*(i+1)), "try %d: each at most one poll late", i+1)
		}

		pub.verdict = nil
		n, err := db.Requeue(t.Context(), outbox.Filter{Key: "a", Topic: "t"})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"b1", "a1", "a2"}, pub.ids(), "after the requeue the key continues in order")
		require.NoError(t, stop())
	})
}

// Promise: G3.5
func TestSkippedEntryReleasesItsKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pub := newPublisher(func(_ int, _ string, ms []*message.Message) error {
			if slices.ContainsFunc(ms, func(m *message.Message) bool { return m.UUID == "a1" }) {
				return errors.New("no")
			}
			return nil
		})
		db := newDB(t)
		enqueue(t, db, "a1", "a2", "b1")
		stop := start(t, db, pub, outbox.RelayConfig{Backoff: claim.Backoff{Attempts: 1}})
		synctest.Wait()
		require.Equal(t, []string{"b1"}, pub.ids())
		require.Equal(t, outbox.Abandoned, entries(t, db)["a1"].Status)
		_, err := db.Skip(t.Context(), outbox.Filter{Status: []outbox.Status{outbox.Abandoned}})
		require.NoError(t, err)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"b1", "a2"}, pub.ids())
		require.NoError(t, stop())
	})
}

// A failed call with several messages may have published some of them: all are published again one
// by one, with the same ids and bytes.
// Promise: G3.1
func TestRelayFindsThePoisonInABatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var first []string
		pub := newPublisher(nil)
		pub.verdict = func(call int, _ string, ms []*message.Message) error {
			if call == 1 { // two of three were published before the broker closed the connection
				for _, m := range ms[:2] {
					first = append(first, fmt.Sprintf("%s %v", m.Payload, m.Metadata))
				}
				return errors.New("connection closed")
			}
			if ms[0].UUID == "b1" {
				return errors.New("poison")
			}
			return nil
		}
		db := newDB(t)
		enqueue(t, db, "a1", "b1", "c1", "b2", "c2")
		stop := start(t, db, pub, outbox.RelayConfig{})
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, []string{"a1", "c1", "c2"}, pub.ids())
		require.Equal(t, first[0], pub.payload["a1"], "the same bytes and headers every time")
		all := entries(t, db)
		require.Equal(t, outbox.Failed, all["b1"].Status)
		require.Equal(t, outbox.Held, all["b2"].Status)
		require.Zero(t, all["b2"].Attempts)
	})
}

func TestRelayWithOrderedPublisherStopsAKeyAtItsFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		pub := newPublisher(func(_ int, _ string, ms []*message.Message) error {
			if slices.ContainsFunc(ms, func(m *message.Message) bool { return m.UUID == "a1" }) {
				return errors.New("poison")
			}
			return nil
		})
		db := newDB(t)
		enqueue(t, db, "a1", "a2", "b1", "b2", "a3")
		stop := start(t, db, pub, outbox.RelayConfig{OrderedPublisher: true})
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, []string{"b1", "b2"}, pub.ids())
		require.Zero(t, entries(t, db)["a2"].Attempts)
	})
}

// crash is a store that loses every mark, as if the relay died after publishing.
type crash struct{ provider.Outbox }

func (crash) MarkEntries(context.Context, []outbox.Mark) ([]int64, error) {
	return nil, errors.New("gone")
}

// Promise: G2.1
func TestRelayTakesOverUnmarkedEntries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(nil)
		enqueue(t, db, "a1", "b1", "a2")
		stopFirst := start(t, crash{db}, pub, outbox.RelayConfig{Lease: time.Minute})
		synctest.Wait()
		before := pub.payload["a1"]
		stop := start(t, db, pub, outbox.RelayConfig{Lease: time.Minute})
		time.Sleep(59 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"a1", "b1"}, pub.ids()[:2])
		for _, e := range entries(t, db) {
			require.NotEqual(t, outbox.Published, e.Status, "a live lease is not stolen")
		}
		require.NoError(t, stopFirst())
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.NoError(t, stop())
		ids := pub.ids()
		require.Equal(t, []string{"a1", "b1", "a2"}, ids[len(ids)-3:], "published again, in order, with the same ids")
		require.Equal(t, before, pub.payload["a1"])
		for id, e := range entries(t, db) {
			require.Equal(t, outbox.Published, e.Status, id)
		}
	})
}

// flaky is a store that fails the first calls of each method.
type flaky struct {
	provider.Outbox
	mu            sync.Mutex
	claims, marks int
}

func (f *flaky) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]outbox.Entry, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.claims++; f.claims < 4 {
		return nil, errors.New("away")
	}
	return f.Outbox.ClaimEntries(ctx, q, t)
}

func (f *flaky) MarkEntries(ctx context.Context, marks []outbox.Mark) ([]int64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.marks++; f.marks < 4 {
		return nil, errors.New("away")
	}
	return f.Outbox.MarkEntries(ctx, marks)
}

func TestRelaySurvivesErrorsOfTheStore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(nil)
		enqueue(t, db, "a1")
		stop := start(t, &flaky{Outbox: db}, pub, outbox.RelayConfig{})
		time.Sleep(time.Minute)
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, []string{"a1"}, pub.ids(), "a failed mark is written again, and the message is not published again")
		require.Equal(t, outbox.Published, entries(t, db)["a1"].Status)
	})
}

// Promise: G9.2
func TestRelayStopsCleanly(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		entered, let := make(chan struct{}), make(chan struct{})
		pub := newPublisher(func(call int, _ string, _ []*message.Message) error {
			if call == 1 {
				close(entered)
				<-let
			}
			return nil
		})
		db := newDB(t)
		enqueue(t, db, "a1", "b1", "a2", "a3")
		require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
			return db.InTx(tx).Enqueue(t.Context(), outbox.Message{ID: "other", Topic: "another topic"})
		}))
		stop := start(t, db, pub, outbox.RelayConfig{})
		<-entered
		done := make(chan error)
		go func() { done <- stop() }()
		synctest.Wait()
		close(let)
		require.NoError(t, <-done)
		require.Equal(t, []string{"a1", "b1"}, pub.ids(), "the call in flight ends, and no other call begins")
		all := entries(t, db)
		require.Equal(t, outbox.Published, all["b1"].Status)
		for _, id := range []string{"a2", "a3", "other"} {
			require.Equal(t, outbox.Pending, all[id].Status, id)
			require.Zero(t, all[id].Attempts, "releasing gives the attempt back")
		}
	})
}

// Promise: G9.2
func TestRelayDrainHasADeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		let := make(chan struct{})
		pub := newPublisher(func(int, string, []*message.Message) error { <-let; return nil })
		db := newDB(t)
		enqueue(t, db, "a1")
		stop := start(t, db, pub, outbox.RelayConfig{Drain: time.Second})
		synctest.Wait()
		begin := time.Now()
		require.ErrorIs(t, stop(), outbox.ErrDrain)
		require.Equal(t, time.Second, time.Since(begin))
		require.Equal(t, outbox.Claimed, entries(t, db)["a1"].Status, "it stays claimed until its lease ends")
		close(let)
		synctest.Wait()
	})
}

func TestRelayWakesAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(nil)
		stop := start(t, db, pub, outbox.RelayConfig{Poll: 2 * time.Hour})
		time.Sleep(10 * time.Hour)
		synctest.Wait()
		begin := time.Since(pub.start)
		enqueue(t, db, "a1")
		synctest.Wait()
		require.Equal(t, []string{"a1"}, pub.ids())
		require.Equal(t, begin, pub.log[0].at)
		require.NoError(t, stop())
	})
}

// polled hides that the store can wake the relay, and counts the scans.
type polled struct {
	provider.Outbox
	scans atomic.Int64
}

func (p *polled) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]outbox.Entry, error) {
	p.scans.Add(1)
	return p.Outbox.ClaimEntries(ctx, q, t)
}

func TestRelayPollsAdaptively(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(nil)
		s := &polled{Outbox: db}
		stop := start(t, s, pub, outbox.RelayConfig{})
		time.Sleep(100 * time.Second)
		synctest.Wait()
		require.InDelta(t, 100, s.scans.Load(), 12, "idle: about one scan per second")
		enqueue(t, db, "a1")
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, []string{"a1"}, pub.ids())
		require.NoError(t, stop())
	})
}

func TestRelayPublishesOnlyItsTopics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(nil)
		enqueue(t, db, "a1")
		require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx *memory.Model) error {
			return db.InTx(tx).Enqueue(t.Context(), outbox.Message{ID: "x1", Topic: "other"})
		}))
		stop := start(t, db, pub, outbox.RelayConfig{Topics: []string{"other"}})
		synctest.Wait()
		require.NoError(t, stop())
		require.Equal(t, []string{"x1"}, pub.ids())
	})
}

func TestNewRelayRefuses(t *testing.T) {
	t.Parallel()
	db, pub := newDB(t), newPublisher(nil)
	_, err := outbox.NewRelay(nil, pub, nil)
	require.Error(t, err)
	_, err = outbox.NewRelay(db, nil, nil)
	require.Error(t, err)
	for name, cfg := range map[string]outbox.RelayConfig{
		"batch":   {Batch: -1},
		"large":   {Batch: math.MaxInt},
		"topics":  {Topics: []string{}},
		"topic":   {Topics: []string{"t", ""}},
		"lease":   {Lease: -1},
		"backoff": {Backoff: claim.Backoff{Jitter: 2}},
		"poll":    {Poll: -1},
		"drain":   {Drain: -1},
		"keep":    {Keep: outbox.EntryRetention{Skipped: -1}},
	} {
		_, err := outbox.NewRelay(db, pub, &cfg)
		require.Error(t, err, name)
	}
	r, err := outbox.NewRelay(db, pub, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, r.Run(ctx))
	require.Error(t, r.Run(ctx), "Run called twice")
}
