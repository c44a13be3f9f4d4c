package outbox

import "github.com/kinora-go/kinora/eventstore"

// Route returns the topics of an event. It gets one entry for each. A nil Route makes no entries, so a service that only
// reads its log grows no outbox.
type Route func(stream string, d eventstore.Draft) []string

// ByCategory routes an event of stream "review-42-ann" to topic "review".
func ByCategory(stream string, _ eventstore.Draft) []string {
	return []string{eventstore.Category(stream)}
}
