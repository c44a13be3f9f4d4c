package outbox_test

import (
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

func TestWireFormRoundTrip(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 678_901_000, time.UTC)
	draft := eventstore.Draft{
		ID: "0198c1f0-0000-7000-8000-000000000001", Type: "review.posted", Schema: 3, Data: []byte(`{"n":1E5,"z":-0}`),
		Metadata: eventstore.Metadata{CorrelationID: "c", CausationID: "d", Traceparent: "t", Actor: "ann",
			Extra: map[string]string{"kinora_type": "not mine", "x": ""}},
	}
	m := provider.FromEvent("review-42-ann", 7, draft, "review")
	require.Equal(t, []string{draft.ID, "review", "review-42-ann"}, []string{m.ID, m.Topic, m.Key})
	wire := outbox.ToWatermill(outbox.Entry{OutboxMessage: m, CreatedAt: at})
	require.Equal(t, "review-42-ann", wire.Metadata[outbox.HeaderKey])
	wire.Metadata["a foreign header"] = "left alone"
	got, err := outbox.ParseWatermill(wire)
	require.NoError(t, err)
	require.Equal(t, eventstore.Raw{
		ID: draft.ID, Stream: "review-42-ann", Version: 7, Type: "review.posted", Schema: 3, Data: draft.Data,
		Metadata: draft.Metadata, RecordedAt: at,
	}, got)
}

func TestWatermillDoesNotShareHeaders(t *testing.T) {
	t.Parallel()
	e := outbox.Entry{OutboxMessage: outbox.Message{ID: "1", Headers: map[string]string{"a": "b"}}}
	outbox.ToWatermill(e).Metadata["a"] = "changed by a publisher's middleware"
	require.Equal(t, "b", e.Headers["a"])
}

func TestParseWatermillRefuses(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*message.Message){
		"no UUID":           func(m *message.Message) { m.UUID = "" },
		"UUID with NUL":     func(m *message.Message) { m.UUID = "a\x00" },
		"UUID too long":     func(m *message.Message) { m.UUID = strings.Repeat("x", 256) },
		"no type":           func(m *message.Message) { delete(m.Metadata, provider.HeaderType) },
		"schema no number":  func(m *message.Message) { m.Metadata[provider.HeaderSchema] = "one" },
		"schema 0":          func(m *message.Message) { m.Metadata[provider.HeaderSchema] = "0" },
		"version no number": func(m *message.Message) { m.Metadata[provider.HeaderVersion] = "1e3" },
		"version negative":  func(m *message.Message) { m.Metadata[provider.HeaderVersion] = "-1" },
		"time no time":      func(m *message.Message) { m.Metadata[provider.HeaderRecordedAt] = "yesterday" },
		"year 0":            func(m *message.Message) { m.Metadata[provider.HeaderRecordedAt] = "0000-12-31T23:59:59Z" },
		"year 10000 in UTC": func(m *message.Message) { m.Metadata[provider.HeaderRecordedAt] = "9999-12-31T23:59:59-01:00" },
	} {
		m := message.NewMessage("1", []byte(`{}`))
		m.Metadata[provider.HeaderType] = "t"
		_, err := outbox.ParseWatermill(m)
		require.NoError(t, err)
		change(m)
		_, err = outbox.ParseWatermill(m)
		require.ErrorIs(t, err, outbox.ErrMalformed, name)
	}
}

func FuzzParseWatermill(f *testing.F) {
	f.Add("1", "t", "1", "1", "2026-01-02T03:04:05Z", []byte(`{}`))
	f.Fuzz(func(t *testing.T, id, typ, schema, version, at string, payload []byte) {
		m := message.NewMessage(id, payload)
		m.Metadata = message.Metadata{provider.HeaderType: typ, provider.HeaderSchema: schema, provider.HeaderVersion: version, provider.HeaderRecordedAt: at}
		raw, err := outbox.ParseWatermill(m)
		if err != nil {
			require.ErrorIs(t, err, outbox.ErrMalformed)
			return
		}
		require.NotEmpty(t, raw.ID)
		require.NotEmpty(t, raw.Type)
		require.GreaterOrEqual(t, raw.Schema, 1)
		require.GreaterOrEqual(t, raw.Version, int64(0))
	})
}

func TestNormalize(t *testing.T) {
	t.Parallel()
	headers := map[string]string{"a": "b"}
	m, err := outbox.Message{Topic: "t", Headers: headers}.Normalize(t.Context(), 0)
	require.NoError(t, err)
	require.Len(t, m.ID, 36)
	require.Equal(t, m.ID, m.Key, "a message without a key waits for no other")
	headers["a"] = "changed later"
	require.Equal(t, "b", m.Headers["a"])
	for name, bad := range map[string]outbox.Message{
		"no topic":         {},
		"topic with NUL":   {Topic: "a\x00"},
		"topic too long":   {Topic: strings.Repeat("x", 256)},
		"id not UTF-8":     {Topic: "t", ID: "\xff"},
		"key too long":     {Topic: "t", Key: strings.Repeat("x", 256)},
		"payload too long": {Topic: "t", Payload: make([]byte, 11)},
		"header with NUL":  {Topic: "t", Headers: map[string]string{"a": "\x00"}},
	} {
		_, err := bad.Normalize(t.Context(), 10)
		require.ErrorIs(t, err, eventstore.ErrInvalid, name)
	}
}

func TestRouteTopics(t *testing.T) {
	t.Parallel()
	ds := []eventstore.Draft{{Type: "a"}, {Type: "b"}}
	topics, err := provider.Topics(nil, "review-1", ds)
	require.NoError(t, err)
	require.Equal(t, [][]string{nil, nil}, topics)
	topics, err = provider.Topics(outbox.ByCategory, "review-1", ds)
	require.NoError(t, err)
	require.Equal(t, [][]string{{"review"}, {"review"}}, topics)
	some := outbox.Route(func(_ string, d eventstore.Draft) []string {
		if d.Type == "a" {
			return nil
		}
		return []string{"x", "y", "x"}
	})
	topics, err = provider.Topics(some, "review-1", ds)
	require.NoError(t, err)
	require.Equal(t, [][]string{nil, {"x", "y"}}, topics, "a topic named twice counts once")
	_, err = provider.Topics(func(string, eventstore.Draft) []string { return []string{""} }, "review-1", ds)
	require.ErrorIs(t, err, eventstore.ErrInvalid)
}

// An event that a store accepts is unchanged after its way through a broker.
func FuzzWireRoundTrip(f *testing.F) {
	f.Add("a-1", int64(1), "posted", 1, []byte(`{}`), "c", "x", "y")
	f.Add(`a-"';--`, int64(1)<<62, "größe", 32767, []byte(`"\ud83d\ude00"`), "", "\u202e", "")
	f.Fuzz(func(t *testing.T, stream string, version int64, typ string, schema int, data []byte, actor, key, value string) {
		d := eventstore.Draft{ID: "0190a0b0-c0d0-7000-8000-000000000001", Type: typ, Schema: schema, Data: data,
			Metadata: eventstore.Metadata{Actor: actor, CorrelationID: value, Extra: map[string]string{key: value}}}
		if version < 1 || provider.CheckAppend(stream, eventstore.Any, []eventstore.Draft{d}, 0) != nil {
			return
		}
		m := provider.FromEvent(stream, version, d, "t")
		_, err := m.Normalize(t.Context(), 0)
		require.NoError(t, err)
		e := outbox.Entry{OutboxMessage: m, CreatedAt: time.Unix(1, 1)}
		raw, err := outbox.ParseWatermill(outbox.ToWatermill(e))
		require.NoError(t, err)
		require.Equal(t, eventstore.Raw{ID: d.ID, Stream: stream, Version: version, Type: typ, Schema: schema, Data: data,
			Metadata: d.Metadata, RecordedAt: time.Unix(1, 1).UTC()}, raw)
	})
}
