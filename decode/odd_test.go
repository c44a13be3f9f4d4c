package decode_test

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/decode"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// Times, a byte order mark and other forms that the specifications allow are read. A message without
// data is parked, and no event of zeros.
// Promise: G10.2
func TestOddMessagesAreReadOrParked(t *testing.T) {
	t.Parallel()
	plain, err := decode.NewJSON(decode.JSONConfig{
		Type: decode.Place{Text: "order.placed"}, ID: decode.Place{Field: "id"}, Time: decode.Place{Field: "at"}, Data: decode.Place{Field: "data"},
	})
	require.NoError(t, err)
	decoder := func(topic string, m *message.Message) (eventstore.Raw, error) {
		switch {
		case m.Metadata["plain"] != "":
			return plain(topic, m)
		case m.Metadata["name"] != "":
			return decode.CQRS(topic, m)
		}
		return decode.CloudEvents(topic, m)
	}
	structured := func(id, rest string) *message.Message {
		return foreign("", `{"specversion":"1.0","id":"`+id+`","source":"/a","type":"order.placed"`+rest+`}`, "content-type", "application/cloudevents+json")
	}
	binary := func(id, payload string, headers ...string) *message.Message {
		return foreign("", payload, append(headers, "ce_specversion", "1.0", "ce_id", id, "ce_source", "/a", "ce_type", "order.placed")...)
	}
	mark := func(m *message.Message) *message.Message {
		m.Payload = append([]byte("\ufeff"), m.Payload...)
		return m
	}
	newYear := time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)
	read := map[string]*message.Message{
		"/a lower":       structured("lower", `,"time":"2024-01-01t00:00:00z","data":{"Stars":4}`),
		"/a leap":        structured("leap", `,"time":"2023-12-31T23:59:60Z","data":{"Stars":4}`),
		"/a leap binary": binary("leap binary", `{"Stars":4}`, "ce_time", "2023-12-31t22:59:60-01:00"),
		"/a mark":        mark(structured("mark", `,"time":"2024-01-01T00:00:00Z","data":{"Stars":4}`)),
		"/a mark binary": mark(binary("mark binary", `{"Stars":4}`, "ce_time", "2024-01-01T00:00:00Z")),
		"plain":          mark(foreign("", `{"id":"plain","at":"2024-01-01t00:00:00z","data":{"Stars":4}}`, "plain", "1")),
		"cqrs":           mark(foreign("cqrs", `{"Stars":4}`, "name", "order.placed", "kinora_recorded_at", "2024-01-01t00:00:00z")),
	}
	refused := map[string]*message.Message{
		"/a none":        structured("none", ``),
		"/a null":        structured("null", `,"data":null`),
		"/a none binary": binary("none binary", ``),
		"/a null binary": binary("null binary", `null`),
		"plain null":     foreign("", `{"id":"plain null","data":null}`, "plain", "1"),
		"cqrs null":      foreign("cqrs null", `null`, "name", "order.placed"),
		"/a text":        structured("text", `,"data":"{\"Stars\":4}"`), // see ExampleCloudEvents
	}
	db, err := memory.New(nil)
	require.NoError(t, err)
	got := map[string][]any{}
	p := projector.Define("p", orderTypes, projector.Options{Markers: true, BrokerOnly: true},
		projector.On("a", func(_ context.Context, _ *memory.Model, e eventstore.Event[orderPlaced]) error {
			got[e.ID] = append(got[e.ID], e.Data.Stars, e.RecordedAt)
			return nil
		}))
	f := make(subscription)
	r, err := projector.NewRunner(db, projector.Subscribe(f, "orders"), projector.RunnerConfig{Decode: decoder, Concurrency: 1}, p)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	for _, m := range read {
		f.deliver(t, m)
	}
	for _, m := range refused {
		f.deliver(t, m)
	}
	cancel()
	require.NoError(t, <-done)
	list, err := db.Parked(t.Context(), projector.ParkedFilter{})
	require.NoError(t, err)
	for _, row := range list {
		require.Contains(t, refused, row.MessageID, "%s: %s", row.Code, row.Error)
		require.Equal(t, []any{projector.StateStuck, projector.ClassPermanent, "undecodable"}, []any{row.State, row.Class, row.Code}, row.MessageID)
	}
	require.Len(t, list, len(refused))
	require.Len(t, got, len(read))
	for id, event := range got {
		require.Equal(t, []any{4, newYear}, event, id)
	}
}
