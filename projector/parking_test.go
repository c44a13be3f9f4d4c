package projector_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// A message that fails alone is parked with one attempt and acked. The rest of its key waits behind
// it; other keys continue without delay.
// Promise: G6.6
func TestFailedMessageIsParkedAtOnceAndHoldsItsKey(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err   error
		first string
		end   func(t *testing.T, db *memory.DB, bad *faults)
		want  []int
	}{
		"until it is applied": {errNo, "k-1 waiting unknown 1", func(_ *testing.T, _ *memory.DB, bad *faults) { bad.fix() }, upTo(3)},
		"until it is replayed": {errNever, "k-1 stuck permanent 1", func(t *testing.T, db *memory.DB, bad *faults) {
			bad.fix()
			require.Equal(t, 1, replayAll(t, db, projector.ParkedFilter{Seqs: []int64{1}}))
		}, upTo(3)},
		"until it is skipped": {errNever, "k-1 stuck permanent 1", func(t *testing.T, db *memory.DB, _ *faults) {
			require.Equal(t, 1, skip(t, db, projector.ParkedFilter{Seqs: []int64{1}}))
		}, []int{2, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				bad := newFaults(map[string]error{"k-1": c.err})
				stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
				began := time.Now()
				for n := 1; n <= 3; n++ {
					f.deliver(t, keyed("k", n), keyed("other", n))
				}
				require.Zero(t, time.Since(began))
				f.deliver(t, keyed("k", 1), keyed("k", 3)) // duplicates
				require.Equal(t, []string{c.first, "k-2 waiting held 0", "k-3 waiting held 0"}, rows(parked(t, db)))
				require.Equal(t, upTo(3), noted(db, "a", "other"))
				time.Sleep(time.Second)
				require.Empty(t, noted(db, "a", "k"))
				c.end(t, db, bad)
				time.Sleep(5 * time.Second)
				require.Empty(t, parked(t, db))
				f.deliver(t, series("k", 1, 4)...) // again: parking kept their markers
				require.NoError(t, stop())
				require.Equal(t, append(c.want, 4), noted(db, "a", "k"))
			})
		})
	}
}

// A key is held for all handlers of its projector (docs/adr/0013). Another projector continues.
func TestHeldKeyIsHeldOnlyForItsProjector(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		edited := projector.On("edited", func(_ context.Context, tx txn, e eventstore.Event[unhandled]) error {
			tx.Put("edited", e.Stream, true)
			return nil
		})
		p := projector.Define("p", types, marked, projector.On("a", bad.run), projector.On("b", note("b")), edited)
		q := projector.Define("q", types, marked, projector.On("c", note("c")))
		stop := run(t, db, f, projector.RunnerConfig{}, p, q)
		m := keyed("k", 3)
		m.Metadata[provider.HeaderType] = "unhandled"
		f.deliver(t, keyed("k", 1), keyed("k", 2), m)
		require.Equal(t, []string{"k-1 stuck permanent 1", "k-2 waiting held 0", "k-3 waiting held 0"}, rows(parked(t, db)))
		require.Empty(t, noted(db, "b", "k"), "the other handler of the same projector")
		require.Equal(t, upTo(2), noted(db, "c", "k"))
		bad.fix()
		replayAll(t, db, all)
		time.Sleep(5 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(2), noted(db, "a", "k"))
		require.Equal(t, upTo(2), noted(db, "b", "k"))
		db.View(func(m *memory.Model) {
			done, _ := m.Get("edited", "k")
			require.Equal(t, true, done)
		})
	})
}

// Promise: G6.6
func TestParkMessageHoldsNothing(t *testing.T) {
	t.Parallel()
	for _, opts := range []projector.Options{{Markers: true, Parking: projector.ParkMessage}, {Parking: projector.ParkMessage}} {
		t.Run(fmt.Sprint("markers ", opts.Markers), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				bad := newFaults(map[string]error{"k-1": errNever})
				stop := run(t, db, f, projector.RunnerConfig{}, define(opts, bad.run))
				f.deliver(t, append(series("k", 1, 3), keyed("k", 1))...)
				require.Equal(t, []string{"k-1 stuck permanent 1"}, rows(parked(t, db)), "once, even without markers")
				require.Equal(t, []int{2, 3}, noted(db, "a", "k"))
				bad.fix()
				replayAll(t, db, all)
				time.Sleep(5 * time.Second)
				require.NoError(t, stop())
				require.Equal(t, []int{2, 3, 1}, noted(db, "a", "k"))
			})
		})
	}
}

// A message without a key waits for no other, and no other waits for it.
func TestMessageWithoutKeyHoldsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		bad.handle = add
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		for n := 1; n <= 3; n++ {
			m := keyed("k", n)
			delete(m.Metadata, outbox.HeaderKey)
			delete(m.Metadata, provider.HeaderStream)
			f.deliver(t, m)
		}
		require.NoError(t, stop())
		require.Equal(t, []string{"k-1 stuck permanent 1"}, rows(parked(t, db)))
		require.Equal(t, 2+3, total(db, "totals"))
	})
}

// Without markers, a parked message is recognized by its row.
// Promise: G4.1
func TestRedeliveredParkedMessageIsParkedOnce(t *testing.T) {
	t.Parallel()
	for _, opts := range []projector.Options{marked, {}} {
		t.Run(fmt.Sprint("markers ", opts.Markers), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				bad := newFaults(map[string]error{"k-1": errNever})
				stop := run(t, db, f, projector.RunnerConfig{}, define(opts, bad.run))
				for range 3 {
					f.deliver(t, keyed("k", 1), keyed("k", 2), msg("x", "who knows", "{}"))
				}
				require.Equal(t, []string{"k-1 stuck permanent 1", "k-2 waiting held 0", "x waiting unable unregistered 0"}, rows(parked(t, db)))
				require.Equal(t, 1, bad.tried("k-1"))
				bad.fix()
				replayAll(t, db, projector.ParkedFilter{Key: "k"})
				time.Sleep(5 * time.Second)
				require.NoError(t, stop())
				require.Equal(t, upTo(2), noted(db, "a", "k"))
			})
		})
	}
}

// A message that reaches no handler, or that cannot be decoded, is parked with its payload and
// headers.
// Promise: G6.7
func TestUnhandleableMessageIsParkedWithItsPayload(t *testing.T) {
	t.Parallel()
	newer := msg("5", "posted", `{}`)
	newer.Metadata[provider.HeaderSchema] = "9"
	for name, c := range map[string]struct {
		m                    *message.Message
		handler, code, needs string
	}{
		"no id":             {msg("", "posted", `{"Stars":1}`), "", "malformed", ""},
		"no type":           {msg("2", "", `{"Stars":2}`), "", "malformed", ""},
		"unregistered type": {msg("3", "who knows", `{"Stars":3}`), "", "unregistered", "event who knows 1"},
		"invalid type":      {msg("7", "\xff", `{"Stars":3}`), "", "unregistered", ""},
		"undecodable":       {msg("4", "posted", `{"Stars":"four"}`), "p/a", "undecodable", ""},
		"no JSON":           {msg("6", "posted", "\x00\xff"), "p/a", "undecodable", ""},
		"newer schema":      {newer, "", "unregistered", "event posted 9"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				stop := run(t, db, f, projector.RunnerConfig{Version: "v7"}, define(marked, add))
				f.deliver(t, c.m)
				f.deliver(t, keyed("next", 1))
				require.NoError(t, stop())
				require.Equal(t, 1, total(db, "totals"), "the next key continues")
				list := parked(t, db)
				require.Len(t, list, 1)
				got := list[0]
				require.False(t, got.At.IsZero())
				require.Contains(t, got.Error, c.code)
				got.Error = ""
				lane := provider.LaneOfKey("review-1")
				want := projector.Parked{
					Seq: got.Seq, At: got.At, Projector: "p", Generation: 1, Handler: c.handler, MessageID: c.m.UUID, Topic: "review", Key: "review-1",
					Lane: lane, Type: c.m.Metadata[provider.HeaderType], Version: "v7", State: projector.StateStuck,
					Payload: c.m.Payload, Headers: c.m.Metadata, Class: projector.ClassPermanent, Code: c.code, Attempts: 1,
				}
				if c.handler != "" || c.needs == "event posted 9" {
					want.Handlers = []string{"p/a"}
				}
				if c.needs != "" {
					want.State, want.Class, want.Needs, want.Attempts = projector.StateWaiting, provider.ClassUnable, c.needs, 0
				}
				require.Equal(t, want, got)
			})
		})
	}
}

// If the key is already held, the same message is parked behind it, and counted when its turn
// comes.
func TestUnhandleableMessageWaitsForItsTurn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		unknown := keyed("k", 2)
		unknown.Metadata[provider.HeaderType] = "who knows"
		f.deliver(t, keyed("k", 1), unknown, keyed("k", 3))
		require.Equal(t, []string{"k-1 stuck permanent 1", "k-2 waiting held 0", "k-3 waiting held 0"}, rows(parked(t, db)))
		skip(t, db, projector.ParkedFilter{Seqs: []int64{1}})
		time.Sleep(5 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, []string{"k-2 waiting unable unregistered 0", "k-3 waiting held 0"}, rows(parked(t, db)))
	})
}

func TestUnhandledTypesAreSkipped(t *testing.T) {
	t.Parallel()
	db, f := newDB(t), make(subscription)
	stop := run(t, db, f, projector.RunnerConfig{}, define(projector.Options{SkipUnknown: true}, add))
	f.deliver(t, msg("1", "unhandled", `{}`), msg("2", "who knows", `{}`))
	require.NoError(t, stop())
	require.Empty(t, parked(t, db))
}
