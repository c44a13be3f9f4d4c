package outbox_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden files of the wire form")

// wire is a golden file: a message as it is published, and the event in it.
type wire struct {
	ID      string            `json:"id"`
	Topic   string            `json:"topic"`
	Headers map[string]string `json:"headers"`
	Payload []byte            `json:"payload_base64"`
	Event   *wireEvent        `json:"event"` // null: it is not an event
}

type wireEvent struct {
	ID         string              `json:"id"`
	Stream     string              `json:"stream"`
	Version    int64               `json:"version"`
	Position   int64               `json:"position"`
	Type       string              `json:"type"`
	Schema     int                 `json:"schema"`
	Data       string              `json:"data"`
	Metadata   eventstore.Metadata `json:"metadata"`
	RecordedAt time.Time           `json:"recorded_at"`
}

const wireID = "0198c1f0-0000-7000-8000-00000000000"

func wireEvents() map[string]wireEvent {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678_901_000, time.UTC)
	long, many := strings.Repeat("é", 512), map[string]string{}
	for i := range 48 {
		many["key "+string(rune('A'+i/10))+string(rune('0'+i%10))] = "v"
	}
	delete(many, "key A0")
	many[strings.Repeat("k", 240)] = long
	return map[string]wireEvent{
		"event-that-ends-its-stream": {
			ID: wireID + "4", Stream: "review-42-ann", Version: 3, Position: 19, Type: eventstore.TypeEnded, Schema: 1, Data: `{}`, RecordedAt: at,
		},
		"event": {
			ID: wireID + "1", Stream: "review-42-ann", Version: 1, Position: 17, Type: "review.posted", Schema: 1,
			Data: `{"stars": 5}`, RecordedAt: at,
		},
		"event-with-metadata": {
			ID: wireID + "2", Stream: "review-42-ann", Version: 2, Position: 18, Type: "review.posted", Schema: 3, Data: `{}`,
			Metadata: eventstore.Metadata{
				CorrelationID: "order 7", CausationID: "charge-7", Actor: "ann@example.com",
				Traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
				Extra:       map[string]string{"tenant": "7", "empty": "", "kinora_type": "not the type"},
			}, RecordedAt: at.Truncate(time.Second),
		},
		"event-with-unusual-values": {
			ID: wireID + "3", Stream: "a-" + strings.Repeat("日", 83) + "~-", Version: 1<<63 - 1, Position: 1<<63 - 1,
			Type: `größe, "x"; \ %20=`, Schema: 32767, Data: "[1E5, -0, \"\\u00e9 \U0001F600\",\n null]",
			Metadata: eventstore.Metadata{CorrelationID: " ", Actor: "a=b&c", Extra: many}, RecordedAt: at.Truncate(time.Millisecond),
		},
	}
}

func wireMessages() map[string]outbox.Message {
	return map[string]outbox.Message{
		"plain": {ID: "charge-7", Topic: "mails", Key: "ann", Payload: []byte("Hello\n"), Headers: map[string]string{"lang": "en", "empty": ""}},
		"plain-with-unusual-values": {
			ID: strings.Repeat("i", 255), Topic: "größe/x y", Key: strings.Repeat("日", 85), Payload: []byte{0, 255, 10},
			Headers: map[string]string{strings.Repeat("h", 255): strings.Repeat("v", 1024), "KINORA_TYPE": "not the type", "kinora_key": "replaced by the key"},
		},
		"plain-and-empty": {ID: "1", Topic: "t", Key: "1"},
	}
}

// The golden files are the specification docs/wire-format.md in examples. Programs in other languages
// read and write them, so a change breaks these programs.
// Promise: G11.1
func TestWireFormIsThatOfTheGoldenFiles(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 678_901_000, time.UTC)
	const log = "0198c1f0-0000-7000-8000-0000000000aa/16384.1"
	want := map[string]wire{}
	for name, e := range wireEvents() {
		m := provider.FromEvent(e.Stream, e.Version, eventstore.Draft{ID: e.ID, Type: e.Type, Schema: e.Schema, Data: []byte(e.Data), Metadata: e.Metadata}, "review")
		m.SetPlace(e.Position, log)
		want[name] = published(t, m, e.RecordedAt, &e)
	}
	for name, m := range wireMessages() {
		want[name] = published(t, m, at, nil)
	}
	files, err := filepath.Glob("testdata/wire/*.json")
	require.NoError(t, err)
	if !*update {
		require.Len(t, files, len(want))
	}
	for name, w := range want {
		path := filepath.Join("testdata", "wire", name+".json")
		var text bytes.Buffer
		enc := json.NewEncoder(&text)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		require.NoError(t, enc.Encode(w))
		if *update {
			require.NoError(t, os.WriteFile(path, text.Bytes(), 0o644))
		}
		stored, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, string(stored), text.String(), "%s: the wire form has changed", name)
		readsAs(t, name, stored)
	}
}

// published returns a message as a relay publishes it.
func published(t *testing.T, m outbox.Message, at time.Time, e *wireEvent) wire {
	t.Helper()
	m, err := m.Normalize(t.Context(), 0)
	require.NoError(t, err)
	p := outbox.ToWatermill(outbox.Entry{OutboxMessage: m, CreatedAt: at})
	return wire{p.UUID, m.Topic, p.Metadata, p.Payload, e}
}

// readsAs fails if the message of a golden file is not read as its event, also with other headers.
func readsAs(t *testing.T, name string, stored []byte) {
	t.Helper()
	var w wire
	require.NoError(t, json.Unmarshal(stored, &w))
	m := message.NewMessage(w.ID, w.Payload)
	m.Metadata = maps.Clone(w.Headers)
	m.Metadata["_a_header_of_the_broker"] = "x"
	got, err := outbox.ParseWatermill(m)
	if w.Event == nil {
		require.ErrorIs(t, err, outbox.ErrMalformed, name)
		return
	}
	e := w.Event
	require.NoError(t, err, name)
	require.Equal(t, eventstore.Raw{
		ID: e.ID, Stream: e.Stream, Version: e.Version, Position: e.Position, Type: e.Type, Schema: e.Schema, Data: []byte(e.Data),
		Metadata: e.Metadata, RecordedAt: e.RecordedAt,
	}, got, name)
}
