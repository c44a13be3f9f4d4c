package decode

import (
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
)

// CQRS is a projector.Decoder for messages that the marshalers of Watermill's CQRS component
// (JSONMarshaler, ProtoMarshaler) have made: the type is the name of the struct in the header "name",
// such as "orders.OrderPlaced", and the id is the UUID of the message. There is no ordering key
// unless the producer sets the header kinora_key.
//
// The data of ProtoMarshaler is Protobuf, and requires an eventstore.TypeDef.Codec.
func CQRS(_ string, m *message.Message) (eventstore.Raw, error) {
	raw := eventstore.Raw{ID: m.UUID, Type: m.Metadata["name"], Data: m.Payload}
	raw.Metadata.CorrelationID = m.Metadata["correlation_id"]
	if raw.Type == "" {
		return raw, errors.New("header name is missing")
	}
	return raw, nil
}
