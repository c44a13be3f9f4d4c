package projector

import (
	"context"
	"iter"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// State answers what became of the events of a stream. Every provider with an event store is one.
type State interface {
	ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error]
	Outcomes(ctx context.Context, questions []provider.Question) ([]provider.Outcome, error)
}
