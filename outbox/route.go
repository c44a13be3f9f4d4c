package outbox

import (
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// Route returns the topics of an event. The outbox gets one entry for each. A nil Route means no
// entries, for services that do not publish their events.
//
// kinora.Start also calls it, with an event of each registered type and the data {}, to warn of
// topics that no projector takes. Its result is not stored.
type Route func(stream string, d eventstore.Draft) []string

// ByCategory is a Route to the category of the stream: events of "review-42-ann" go to topic
// "review".
func ByCategory(stream string, _ eventstore.Draft) []string {
	return []string{provider.Category(stream)}
}
