package provider

import (
	"context"

	"github.com/kinora-go/kinora/eventstore"
)

// EventFinder is an eventstore.Store that finds events by their ids. Commands with a
// CommandID require it, also of the TxStore.
type EventFinder interface {
	// FindEvent returns the place of the event with this id, with Count 1, or a zero Appended.
	FindEvent(ctx context.Context, id string) (eventstore.Appended, error)
}
