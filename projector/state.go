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
	// ReadStream yields the events of stream after afterVersion; see eventstore.Store.
	ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error]
	provider.Records
	provider.Progress
	provider.Log
}
