package projector

import (
	"context"
	"iter"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/follow"
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
func StateOf(model modelState, events State) State { return twoStores{model, events} }

type twoStores struct {
	modelState
	eventLog
}

// CountLog implements provider.LogCounter.
func (s twoStores) CountLog(ctx context.Context, types []string, after, to int64) (int64, error) {
	if c, ok := s.eventLog.(provider.LogCounter); ok {
		return c.CountLog(ctx, types, after, to)
	}
	return follow.CountPages(ctx, s.eventLog, types, after, to)
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
