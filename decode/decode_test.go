package decode_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/decode"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

type orderPlaced struct{ Stars int }

func foreign(uuid, payload string, headers ...string) *message.Message {
	m := message.NewMessage(uuid, []byte(payload))
	for i := 0; i < len(headers); i += 2 {
		m.Metadata[headers[i]] = headers[i+1]
	}
	return m
}

// Promise: G10.1
func TestJSON(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 3, 1, 11, 0, 0, 5, time.UTC)
	fields := decode.JSONConfig{
		Type: decode.Place{Field: "meta.type"}, ID: decode.Place{Field: "meta.id"}, Key: decode.Place{Field: "meta.customer"},
		Time: decode.Place{Field: "meta.at"}, Data: decode.Place{Field: "body"},
	}
	headers := decode.JSONConfig{Type: decode.Place{Header: "type"}, Key: decode.Place{Header: "customer"}, Time: decode.Place{Header: "at"}}
	for name, c := range map[string]struct {
		config decode.JSONConfig
		m      *message.Message
		want   eventstore.Raw
		err    string
	}{
		"fields": {
			fields, foreign("u", ` {"meta": {"id": 17, "type": "a", "customer": "c\u00fc", "at": "2026-03-01T12:00:00.000000005+01:00"}, "body": {"Stars": 4} } `),
			eventstore.Raw{ID: "17", Type: "a", Stream: "cü", RecordedAt: at, Data: []byte(`{"Stars": 4}`)}, "",
		},
		"headers": {
			headers, foreign("u", `[1]`, "type", "a", "customer", "c", "at", "2026-03-01T11:00:00.000000005Z"),
			eventstore.Raw{ID: "u", Type: "a", Stream: "c", RecordedAt: at, Data: []byte(`[1]`)}, "",
		},
		"what is optional": {headers, foreign("u", `1`, "type", "a"), eventstore.Raw{ID: "u", Type: "a", Data: []byte(`1`)}, ""},
		"one type": {
			decode.JSONConfig{Type: decode.Place{Text: "a"}, ID: decode.Place{Header: "id"}}, foreign("u", `{}`, "id", "i"),
			eventstore.Raw{ID: "i", Type: "a", Data: []byte(`{}`)}, "",
		},
		"a large number": {
			decode.JSONConfig{Type: decode.Place{Text: "a"}, ID: decode.Place{Field: "id"}}, foreign("u", `{"id":12345678901234567890}`),
			eventstore.Raw{ID: "12345678901234567890", Type: "a", Data: []byte(`{"id":12345678901234567890}`)}, "",
		},
		"an id that is missing is not replaced": {
			decode.JSONConfig{Type: decode.Place{Text: "a"}, ID: decode.Place{Field: "id"}}, foreign("u", `{"id":null}`),
			eventstore.Raw{ID: "", Type: "a", Data: []byte(`{"id":null}`)}, "",
		},
		"no JSON":      {headers, foreign("u", `{`, "type", "a"), eventstore.Raw{}, "the payload is not JSON"},
		"no data":      {fields, foreign("u", `{"meta":{"id":1,"type":"a"}}`), eventstore.Raw{}, "data: the payload has no field body"},
		"type object":  {fields, foreign("u", `{"meta":{"id":1,"type":{}}}`), eventstore.Raw{}, "type: field meta.type is not a string or a number"},
		"wrong time":   {headers, foreign("u", `1`, "type", "a", "at", "yesterday"), eventstore.Raw{}, "time: not an RFC 3339 time of the years 1 to 9999"},
		"key is false": {fields, foreign("u", `{"meta":{"id":1,"customer":false}}`), eventstore.Raw{}, "key: field meta.customer is not a string or a number"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, err := decode.NewJSON(c.config)
			require.NoError(t, err)
			got, err := d("orders", c.m)
			if c.err != "" {
				require.EqualError(t, err, c.err)
				return
			}
			require.NoError(t, err)
			require.Equal(t, c.want, got)
		})
	}
}

func TestJSONConfigIsChecked(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]decode.JSONConfig{
		"JSONConfig.Type is empty": {},
		"JSONConfig.Key: set one":  {Type: decode.Place{Text: "a"}, Key: decode.Place{Header: "a", Field: "b"}},
		"JSONConfig.ID: set one":   {Type: decode.Place{Text: "a"}, ID: decode.Place{Text: "b"}},
		"JSONConfig.Data: set one": {Type: decode.Place{Text: "a"}, Data: decode.Place{Header: "b"}},
		"has an empty name":        {Type: decode.Place{Field: "a..b"}},
	} {
		_, err := decode.NewJSON(c)
		require.ErrorContains(t, err, want)
	}
}

// The marshalers of Watermill's CQRS component make the messages.
// Promise: G10.1
func TestCQRS(t *testing.T) {
	t.Parallel()
	m, err := cqrs.JSONMarshaler{}.Marshal(orderPlaced{4})
	require.NoError(t, err)
	m.Metadata.Set("correlation_id", "c-1")
	got, err := decode.CQRS("orders", m)
	require.NoError(t, err)
	require.Equal(t, eventstore.Raw{
		ID: m.UUID, Type: "decode_test.orderPlaced", Data: []byte(`{"Stars":4}`), Metadata: eventstore.Metadata{CorrelationID: "c-1"},
	}, got)
	types := eventstore.NewTypes(eventstore.Type[orderPlaced]("order.placed").Was("decode_test.orderPlaced"))
	e, err := eventstore.Decode[orderPlaced](types, got)
	require.NoError(t, err)
	require.Equal(t, orderPlaced{4}, e.Data)
	require.Equal(t, "order.placed", e.Type)

	_, err = decode.CQRS("orders", foreign("u", "{}"))
	require.EqualError(t, err, "header name is missing")
}

// Protobuf is decoded by the codec of the type.
// Promise: G10.1
func TestCQRSWithProtobuf(t *testing.T) {
	t.Parallel()
	placed, err := structpb.NewStruct(map[string]any{"stars": 4})
	require.NoError(t, err)
	m, err := cqrs.ProtoMarshaler{}.Marshal(placed)
	require.NoError(t, err)
	got, err := decode.CQRS("orders", m)
	require.NoError(t, err)
	types := eventstore.NewTypes(eventstore.Type[orderPlaced]("order.placed").Was("structpb.Struct").Codec(
		json.Marshal,
		func(data []byte) (any, error) {
			var s structpb.Struct
			err := proto.Unmarshal(data, &s)
			return orderPlaced{int(s.GetFields()["stars"].GetNumberValue())}, err
		}))
	e, err := eventstore.Decode[orderPlaced](types, got)
	require.NoError(t, err)
	require.Equal(t, orderPlaced{4}, e.Data)
	got.Data = []byte{1, 2, 3}
	_, err = eventstore.Decode[orderPlaced](types, got)
	require.Error(t, err)
}

// golden is a message that version 2.16.2 of github.com/cloudevents/sdk-go/v2 wrote: in structured
// mode with json.Marshal, in binary mode with protocol/http.WriteRequest.
func golden(t testing.TB, name string) *message.Message {
	t.Helper()
	var g struct {
		Headers map[string]string
		Payload []byte
	}
	text, err := os.ReadFile(filepath.Join("testdata", "cloudevents", name+".json"))
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &g))
	m := message.NewMessage("", g.Payload)
	m.Metadata = g.Headers
	return m
}

// Promise: G10.1
func TestCloudEventsOfTheSDK(t *testing.T) {
	t.Parallel()
	extra := func(pairs ...string) map[string]string {
		all := map[string]string{"source": "/shops/7"}
		for i := 0; i < len(pairs); i += 2 {
			all[pairs[i]] = pairs[i+1]
		}
		return all
	}
	for name, want := range map[string]eventstore.Raw{
		"plain": {ID: "/shops/7 17", Data: []byte(`{"Stars":4}`), Metadata: eventstore.Metadata{Extra: extra("datacontenttype", "application/json")}},
		"full": {
			ID: "https://example.com/shops/7?x=1#y a b/ü", Data: []byte(`{"Stars":5}`), Stream: "customer-42",
			RecordedAt: time.Date(2026, 3, 1, 12, 30, 0, 123456789, time.UTC),
			Metadata: eventstore.Metadata{
				Traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
				Extra: extra("source", "https://example.com/shops/7?x=1#y", "subject", "customer-42", "count", "7", "flag", "true",
					"dataschema", "https://example.com/s.json", "datacontenttype", "application/vnd.order+json"),
			},
		},
		"text":  {ID: "/shops/7 18", Data: []byte(`four "stars"`), Metadata: eventstore.Metadata{Extra: extra("datacontenttype", "text/plain")}},
		"bytes": {ID: "/shops/7 19", Data: []byte{0, 1, 255, 10}, Metadata: eventstore.Metadata{Extra: extra("datacontenttype", "application/protobuf")}},
		"none":  {ID: "/shops/7 20", Data: []byte("null"), Metadata: eventstore.Metadata{Extra: extra()}},
	} {
		want.Type = "order.placed"
		for _, mode := range []string{".binary", ".structured"} {
			m := golden(t, name+mode)
			got, err := decode.CloudEvents("orders", m)
			require.NoError(t, err, name+mode)
			require.Equal(t, want, got, name+mode)
			if mode == ".binary" { // as on Kafka
				for k, v := range m.Metadata {
					if rest, ok := strings.CutPrefix(k, "ce-"); ok {
						delete(m.Metadata, k)
						m.Metadata["ce_"+rest] = v
					}
				}
				got, err = decode.CloudEvents("orders", m)
				require.NoError(t, err, name)
				require.Equal(t, want, got, name)
			}
		}
	}
}

// Different identities have different ids of at most 255 bytes.
// Promise: G10.1
func TestCloudEventsIdentity(t *testing.T) {
	t.Parallel()
	long, seen := strings.Repeat("x", 300), map[string]string{}
	for _, pair := range [][2]string{
		{"/a", "b"}, {"/a", "b c"}, {"/a b", "c"}, {"/a ", "b"}, {"/a", " b"}, {"/" + long, "1"}, {"/" + long, "2"}, {"/1", long}, {"/1 ", long}, {"/a\n", "b"}, {"/a", "\nb"},
	} {
		got, err := decode.CloudEvents("", foreign("", "{}", "ce_specversion", "1.0", "ce_type", "t", "ce_source", pair[0], "ce_id", pair[1]))
		require.NoError(t, err)
		require.LessOrEqual(t, len(got.ID), 255)
		require.NotContains(t, seen, got.ID, pair)
		seen[got.ID] = pair[0]
		again, err := decode.CloudEvents("", foreign("other", "[]", "Ce-Specversion", "1.1", "Ce-Type", "t", "Ce-Source", pair[0], "Ce-Id", pair[1]))
		require.NoError(t, err)
		require.Equal(t, got.ID, again.ID, "it depends on nothing else")
	}
}

// Promise: G10.2
func TestCloudEventsThatAreMalformed(t *testing.T) {
	t.Parallel()
	structured := func(payload string) *message.Message {
		return foreign("u", payload, "Content-Type", "application/cloudevents+json; charset=utf-8")
	}
	for want, m := range map[string]*message.Message{
		`specversion is "": only 1.x`:             foreign("u", "{}"),
		`specversion is "0.3": only 1.x`:          foreign("u", "{}", "ce_specversion", "0.3", "ce_id", "1", "ce_source", "/a", "ce_type", "t"),
		"one of the attributes id, source and":    structured(`{"specversion":"1.0","id":"1","type":"t"}`),
		"the attribute time is not":               structured(`{"specversion":"1.0","id":"1","source":"/a","type":"t","time":"x"}`),
		"has a NUL":                               structured(`{"specversion":"1.0","id":"a\u0000b","source":"/a","type":"t"}`),
		"the payload is not the JSON of one":      structured(`[{}]`),
		`attribute "x": is not a string`:          structured(`{"specversion":"1.0","x":{}}`),
		"both data and data_base64":               structured(`{"specversion":"1.0","id":"1","source":"/a","type":"t","data":1,"data_base64":""}`),
		"data_base64 is not base64":               structured(`{"specversion":"1.0","id":"1","source":"/a","type":"t","data_base64":"?"}`),
		"data_base64 is not a string":             structured(`{"specversion":"1.0","id":"1","source":"/a","type":"t","data_base64":1}`),
		"two headers have different values":       foreign("u", "{}", "ce_id", "1", "ce-id", "2"),
		"only JSON of one event is decoded":       foreign("u", "[]", "content-type", "application/cloudevents-batch+json"),
		"application/cloudevents+avro: only JSON": foreign("u", "", "content-type", "application/cloudevents+avro"),
	} {
		_, err := decode.CloudEvents("orders", m)
		require.ErrorContains(t, err, want)
	}
}
