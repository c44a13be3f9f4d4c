package projector_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// shopOrder is a message of other software: {"Stars": 4}, with headers.
func shopOrder(id, key string, stars int) *message.Message {
	m := message.NewMessage("delivery of "+id, []byte(fmt.Sprintf(`{"Stars":%d}`, stars)))
	m.Metadata["order"], m.Metadata["customer"] = id, key
	return m
}

// decodeOrder decodes it. It is the decoder that a user would write.
func decodeOrder(topic string, m *message.Message) (eventstore.Raw, error) {
	raw := eventstore.Raw{ID: "order " + m.Metadata["order"], Type: "posted", Stream: m.Metadata["customer"], Data: m.Payload}
	switch {
	case topic != "review":
		return raw, errors.New("another topic")
	case m.Metadata["order"] == "":
		return eventstore.Raw{}, errors.New("header order is missing")
	case m.Metadata["panic"] != "":
		panic("no")
	}
	return raw, nil
}

var decoding = projector.RunnerConfig{Decode: decodeOrder}

// Messages of other software and of Kinora come on one topic.
// Promise: G10.1
func TestMessagesOfOtherSoftwareAreAppliedOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		stop := run(t, db, f, decoding, define(delivered, note("a")))
		var all []*message.Message
		for n := 1; n <= 3; n++ {
			all = append(all, shopOrder(fmt.Sprint(n), "ann", n), keyed("k", n))
		}
		f.deliver(t, all...)
		for i := range all { // redelivered with another UUID
			all[i].Metadata["again"] = "x"
			if all[i].Metadata["order"] != "" {
				all[i].UUID = "again"
			}
		}
		f.deliver(t, all...)
		require.NoError(t, stop())
		stop = run(t, db, f, decoding, define(delivered, note("a")))
		f.deliver(t, all...)
		require.NoError(t, stop())
		require.Equal(t, upTo(3), noted(db, "a", "ann"))
		require.Equal(t, upTo(3), noted(db, "a", "k"))
		require.Empty(t, parked(t, db))
	})
}

// Promise: G10.2
func TestMessageThatTheDecoderRefusesIsParked(t *testing.T) {
	t.Parallel()
	broken := map[string]projector.Decoder{
		"error": func(string, *message.Message) (eventstore.Raw, error) {
			return eventstore.Raw{}, errors.New("no")
		},
		"panic": func(string, *message.Message) (eventstore.Raw, error) { panic("no") },
		"no id": func(_ string, m *message.Message) (eventstore.Raw, error) {
			return eventstore.Raw{Type: "posted", Data: m.Payload}, nil
		},
		"an id that cannot be stored": func(_ string, m *message.Message) (eventstore.Raw, error) {
			return eventstore.Raw{ID: "a\x00", Type: "posted", Data: m.Payload}, nil
		},
		"no type": func(_ string, m *message.Message) (eventstore.Raw, error) { return eventstore.Raw{ID: "1"}, nil },
		"schema": func(_ string, m *message.Message) (eventstore.Raw, error) {
			return eventstore.Raw{ID: "1", Type: "posted", Schema: -1, Data: m.Payload}, nil
		},
		"a time of a year that is not stored": func(_ string, m *message.Message) (eventstore.Raw, error) {
			return eventstore.Raw{ID: "1", Type: "posted", Data: m.Payload, RecordedAt: time.Date(300_000, 1, 1, 0, 0, 0, 0, time.UTC)}, nil
		},
		"it changes the message": func(_ string, m *message.Message) (eventstore.Raw, error) {
			m.Nack()
			clear(m.Metadata)
			m.UUID = ""
			return eventstore.Raw{}, errors.New("no")
		},
	}
	for name, decoder := range broken {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				cfg := projector.RunnerConfig{Decode: func(topic string, m *message.Message) (eventstore.Raw, error) {
					if m.Metadata["order"] == "bad" {
						return decoder(topic, m)
					}
					return decodeOrder(topic, m)
				}}
				bad := shopOrder("bad", "ann", 7)
				stop := run(t, db, f, cfg, define(delivered, note("a")))
				f.deliver(t, shopOrder("1", "ann", 1), bad, shopOrder("2", "ann", 2))
				require.NoError(t, stop())
				require.Equal(t, upTo(2), noted(db, "a", "ann"))
				list := parked(t, db)
				require.Len(t, list, 1)
				require.Equal(t, projector.StateStuck, list[0].State)
				require.Equal(t, "malformed", list[0].Code)
				require.Equal(t, bad.Payload, message.Payload(list[0].Payload))
				require.Equal(t, map[string]string{"order": "bad", "customer": "ann"}, without(list[0].Headers, "kinora_uuid"))

				replayAll(t, db, all) // with a decoder that accepts it
				drain(t, db, decoding, define(delivered, note("a")))
				require.Equal(t, []int{1, 2, 7}, noted(db, "a", "ann"))
				stop = run(t, db, f, decoding, define(delivered, note("a")))
				f.deliver(t, bad)
				require.NoError(t, stop())
				require.Equal(t, []int{1, 2, 7}, noted(db, "a", "ann"), "its marker has the id of the new decoder")
			})
		})
	}
}

func without(h map[string]string, name string) map[string]string {
	h = maps.Clone(h)
	delete(h, name)
	return h
}

// The headers of a position do not make a message of other software an event of the log.
// Promise: G10.4
func TestMessageOfOtherSoftwareIsNotInTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		write(t, db, "k-1", 1, 2, 3)
		stop := run(t, db, f, decoding, define(marked, note("a")))
		time.Sleep(3 * time.Second)
		require.Equal(t, provider.ModeLive, checkpoint(t, db).Mode)
		log, err := db.LogID(t.Context())
		require.NoError(t, err)
		for i, id := range []string{log.String(), log.Lineage + "/before", log.Lineage, ""} {
			m := shopOrder(fmt.Sprint(i), "ann", i+1)
			m.Metadata[provider.HeaderPosition], m.Metadata[provider.HeaderLog] = "2", id
			f.deliver(t, m, m)
		}
		place := func(_ string, m *message.Message) (eventstore.Raw, error) {
			raw, err := decodeOrder("review", m)
			raw.Position = 1
			return raw, err
		}
		require.NoError(t, stop())
		positions := int64(-1)
		stop = run(t, db, f, projector.RunnerConfig{Decode: place}, define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			positions = e.Position
			return note("a")(ctx, tx, e)
		}))
		f.deliver(t, shopOrder("5", "ann", 5))
		require.Zero(t, positions)
		require.NoError(t, stop())
		require.Empty(t, parked(t, db))
		require.Equal(t, upTo(5), noted(db, "a", "ann"))
	})
}

// A message that a relay published without a type has the key and the time of its entry.
// Promise: G10.1
func TestPlainMessageOfARelayKeepsItsKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		at := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
		entry := outbox.Entry{CreatedAt: at, OutboxMessage: outbox.Message{
			ID: "m-1", Topic: "review", Key: "ann", Payload: []byte(`{"Stars":1}`), Headers: map[string]string{"order": "1"},
		}}
		var got eventstore.Event[posted]
		stop := run(t, db, f, decoding, define(delivered, func(_ context.Context, _ txn, e eventstore.Event[posted]) error {
			got = e
			return projector.Permanent(errNever)
		}))
		f.deliver(t, outbox.ToWatermill(entry))
		require.NoError(t, stop())
		want := eventstore.Event[posted]{ID: "order 1", Stream: "ann", Type: "posted", Schema: 1, Data: posted{1}, RecordedAt: at}
		require.Equal(t, want, got)
		require.Equal(t, "ann", parked(t, db)[0].Key)
	})
}

// A message that fails holds its key, and keeps what its decoder needs.
// Promise: G10.3
func TestParkedMessageOfOtherSoftwareIsDecodedAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		// The id is made of the UUID, so that a second decoding shows whether it is kept.
		cfg := projector.RunnerConfig{Decode: func(topic string, m *message.Message) (eventstore.Raw, error) {
			raw, err := decodeOrder(topic, m)
			raw.ID += " in " + m.UUID
			raw.Stream, _ = m.Context().Value(keyOf{}).(string) // lost with the delivery
			return raw, err
		}}
		bad := newFaults(map[string]error{"order 1 in delivery of 1": errNo})
		p := define(delivered, bad.run)
		stop := run(t, db, f, cfg, p)
		var sent []*message.Message
		for n := 1; n <= 3; n++ {
			m := shopOrder(fmt.Sprint(n), "", n)
			m.SetContext(context.WithValue(t.Context(), keyOf{}, "ann"))
			f <- m
			acked(t, m)
			sent = append(sent, m)
		}
		require.NoError(t, stop())
		require.Equal(t, []string{
			"order 1 in delivery of 1 waiting unknown 1", "order 2 in delivery of 2 waiting held 0", "order 3 in delivery of 3 waiting held 0",
		}, rows(parked(t, db)))
		bad.fix()
		time.Sleep(time.Minute)
		dry, err := p.DryRun(t.Context(), db, all, &cfg)
		require.NoError(t, err)
		require.Equal(t, 3, dry.Messages)
		drain(t, db, cfg, p)
		require.Empty(t, parked(t, db))
		require.ElementsMatch(t, []string{"order 1 in delivery of 1", "order 2 in delivery of 2", "order 3 in delivery of 3"}, slices.Collect(maps.Keys(bad.tries)))
		stop = run(t, db, f, cfg, p)
		f.deliver(t, sent...)
		require.NoError(t, stop())
		require.Equal(t, upTo(3), noted(db, "a", "ann"))
	})
}

type keyOf struct{}

// Without the decoder, a tool and a runner leave parked messages to one that has it.
// Promise: G10.3
func TestReplayWithoutTheDecoder(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"order 1": errNo, "k-1": errNo})
		p := define(delivered, bad.run)
		stop := run(t, db, f, decoding, p)
		f.deliver(t, shopOrder("1", "ann", 1), shopOrder("2", "ann", 2), keyed("k", 1))
		require.NoError(t, stop())
		bad.fix()
		time.Sleep(time.Minute)

		dry, err := p.DryRun(t.Context(), db, all, nil)
		require.NoError(t, err)
		require.Equal(t, 1, dry.Messages)
		require.Len(t, dry.Failures, 2)
		require.ErrorContains(t, dry.Failures[0].Err, "set RunnerConfig.Decode to the decoder of its runner")

		for range 20 { // more than the attempts of a message
			err = applyParked(t, db, projector.RunnerConfig{}, p)
			require.ErrorContains(t, err, "set RunnerConfig.Decode to the decoder of its runner")
			require.Equal(t, "no_decoder", provider.CodeOf(err))
			time.Sleep(time.Minute)
		}
		require.Equal(t, []int{1}, noted(db, "a", "k"), "others are applied")
		require.Equal(t, []string{"order 1 waiting unable no_decoder 1", "order 2 waiting held 0"}, rows(parked(t, db)))
		stop = run(t, db, f, projector.RunnerConfig{}, p)
		time.Sleep(10 * time.Minute)
		require.NoError(t, stop())
		require.Equal(t, []string{"order 1 waiting unable no_decoder 1", "order 2 waiting held 0"}, rows(parked(t, db)))
		time.Sleep(time.Minute)
		require.ErrorContains(t, p.ApplyParked(t.Context(), db, nil), "set RunnerConfig.Decode")

		time.Sleep(time.Minute)
		drain(t, db, decoding, p)
		require.Empty(t, parked(t, db))
		require.Equal(t, upTo(2), noted(db, "a", "ann"))
	})
}

// Headers with which the runner marks parked messages have no effect in a delivery.
// Promise: G10.3
func TestDeliveryCannotMarkItself(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		fail := true
		p := projector.Define("p", types, delivered, projector.OnEmit("a", func(context.Context, txn, eventstore.Event[posted]) ([]outbox.Message, error) {
			if fail {
				return nil, errNever
			}
			return []outbox.Message{{Topic: "out"}}, nil
		}))
		stop := run(t, db, f, decoding, p)
		for _, m := range []*message.Message{shopOrder("1", "ann", 1), keyed("k", 1)} {
			m.Metadata["kinora_replayed"], m.Metadata["kinora_uuid"] = "true", "other"
			f.deliver(t, m)
		}
		require.NoError(t, stop())
		fail = false
		replayAll(t, db, all)
		drain(t, db, decoding, p)
		require.Empty(t, parked(t, db))
		entries, err := db.Entries(t.Context(), outbox.Filter{})
		require.NoError(t, err)
		require.Len(t, entries, 2)
		var causes []string
		for _, e := range entries {
			causes = append(causes, e.Headers[provider.HeaderCausation])
		}
		require.ElementsMatch(t, []string{"order 1", "k-1"}, causes)
	})
}

// After a crash, a message of other software is recorded as in flight whatever its clock says.
// Promise: G10.4
func TestClockOfOtherSoftwareDoesNotHideACrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		var mu sync.Mutex
		var inFlight []string
		store := &faulty{unit: db}
		store.beat = func(ctx context.Context, runner string, lease, record time.Duration) (provider.Health, error) {
			h, err := db.Beat(ctx, runner, lease, record)
			h.Crashed = time.Now().Add(-time.Minute)
			return h, err
		}
		store.name = func(ctx context.Context, b provider.Build, w provider.Worker, ids []string) error {
			mu.Lock()
			defer mu.Unlock()
			inFlight = append(inFlight, ids...)
			return db.InFlight(ctx, b, w, ids)
		}
		cfg := projector.RunnerConfig{Decode: func(topic string, m *message.Message) (eventstore.Raw, error) {
			raw, err := decodeOrder(topic, m)
			raw.RecordedAt = time.Now() // in its database, where it may have been set at any time
			return raw, err
		}}
		time.Sleep(time.Hour)
		stop := run(t, store, f, cfg, define(delivered, note("a")))
		time.Sleep(time.Minute)
		f.deliver(t, shopOrder("1", "ann", 1), recorded(keyed("k", 1), time.Now()))
		require.NoError(t, stop())
		require.Equal(t, []string{"order 1"}, slices.DeleteFunc(inFlight, func(id string) bool { return id == "" }))
	})
}

// Messages of other software have the keys of streams in the log, also with Options.Ordered.
// Promise: G10.1
func TestMessagesOfOtherSoftwareNextToTheLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		opts := projector.Options{Markers: true, Ordered: true}
		stop := run(t, db, f, decoding, define(opts, note("a")))
		time.Sleep(3 * time.Second)
		for n := 1; n <= 3; n++ {
			write(t, db, "k-1", 2*n-1)
			f.deliver(t, publishedAfter(t, db, "k-1", int64(n)-1)[0], shopOrder(fmt.Sprint(n), "k-1", 2*n))
		}
		require.NoError(t, stop())
		require.Equal(t, upTo(6), noted(db, "a", "k-1"))
	})
}

// FuzzDecoder gives the runner any event that a decoder may return. It is applied or parked.
// Promise: G10.2
func FuzzDecoder(f *testing.F) {
	f.Add("1", "posted", "ann", "uuid", []byte(`{"Stars":1}`), int64(1), 1, true)
	f.Add("", "\x00", "\xff", "", []byte{}, int64(-1), -1<<31, false)
	f.Add("a\nb", "unknown", "k", "\x00", []byte(`{`), int64(1)<<62, 1<<31, true)
	f.Fuzz(func(t *testing.T, id, eventType, stream, uuid string, data []byte, position int64, schema int, ok bool) {
		db, sub := newDB(t), make(subscription)
		cfg := projector.RunnerConfig{Decode: func(_ string, m *message.Message) (eventstore.Raw, error) {
			raw := eventstore.Raw{ID: id, Type: eventType, Stream: stream, Position: position, Schema: schema, Data: m.Payload}
			if !ok {
				return raw, errors.New("no")
			}
			return raw, nil
		}}
		stop := run(t, db, sub, cfg, define(delivered, add))
		m := message.NewMessage(uuid, data)
		m.Metadata["x"] = stream
		sub.deliver(t, m)
		require.NoError(t, stop())
		list := parked(t, db)
		var e posted
		isApplied := total(db, "totals") != 0
		if json.Unmarshal(data, &e) == nil && e.Stars == 0 {
			return
		}
		require.Equal(t, isApplied, len(list) == 0)
		if len(list) == 1 {
			require.Equal(t, message.Payload(list[0].Payload), m.Payload)
			require.Equal(t, stream, list[0].Headers["x"])
		}
	})
}
