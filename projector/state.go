package projector

import (
	"context"
	"iter"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// State reads events, and what projectors did with them. Every provider with an event store
// implements it. See Projector.Wait and Projector.Lag.
type State interface {
	provider.Records
	provider.Progress
	provider.Builds
	eventLog
}

// StateOf returns the State of read models whose events are in another database: what projectors
// did is read from model, and events from events.
// The model is a provider, such as provider.Combine returns.
func StateOf(model modelState, events State) State {
	return struct {
		provider.Records
		provider.Progress
		provider.Builds
		eventLog
	}{model, model, model, events}
}

// modelState is the part of a State that reads what projectors did.
type modelState interface {
	provider.Records
	provider.Progress
	provider.Builds
}

// eventLog is the part of a State that reads events.
type eventLog interface {
	ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error]
	provider.Log
}
