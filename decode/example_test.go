package decode_test

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/decode"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
)

// A topic has plain JSON of a shop. Another one has CloudEvents, whose key is the subject.
func ExampleNewJSON() {
	orders, err := decode.NewJSON(decode.JSONConfig{
		Type: decode.Place{Header: "type"},
		ID:   decode.Place{Field: "order.id"},
		Key:  decode.Place{Field: "order.customer"},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	decoder := func(topic string, m *message.Message) (eventstore.Raw, error) {
		if topic == "orders" {
			return orders(topic, m)
		}
		e, err := decode.CloudEvents(topic, m)
		e.Stream = e.Metadata.Extra["subject"]
		return e, err
	}
	p := projector.Define("stars", orderTypes, projector.Options{Markers: true},
		projector.On("count", func(_ context.Context, _ *memory.Model, e eventstore.Event[orderPlaced]) error {
			fmt.Println(e.ID, "of", e.Stream, "has", e.Data.Stars)
			return nil
		}))
	db, err := memory.New(nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	topic := make(subscription)
	r, err := projector.NewRunner(db, projector.Subscribe(topic, "orders"), projector.RunnerConfig{Decode: decoder}, p)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()

	m := message.NewMessage("", []byte(`{"order": {"id": 17, "customer": "ann"}, "Stars": 4}`))
	m.Metadata["type"] = "order.placed"
	topic <- m
	<-m.Acked()
	stop()
	fmt.Println(<-done)
	// Output:
	// 17 of ann has 4
	// <nil>
}

// A converter such as that of Debezium puts the JSON of a column into a string, although the type of the data is
// application/json. This decoder unwraps it.
func ExampleCloudEvents() {
	decoder := func(topic string, m *message.Message) (eventstore.Raw, error) {
		raw, err := decode.CloudEvents(topic, m)
		var text string
		if err == nil && json.Unmarshal(raw.Data, &text) == nil && json.Valid([]byte(text)) {
			raw.Data = []byte(text)
		}
		return raw, err
	}
	m := message.NewMessage("", []byte(`{"specversion": "1.0", "id": "17", "source": "/debezium/postgresql/shop", "type": "order.placed",
		"datacontenttype": "application/json", "data": "{\"Stars\": 4}"}`))
	m.Metadata["content-type"] = "application/cloudevents+json"
	raw, err := decoder("orders", m)
	fmt.Println(raw.ID, string(raw.Data), err)
	// Output: /debezium/postgresql/shop 17 {"Stars": 4} <nil>
}
