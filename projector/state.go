package projector

import (
	"context"
	"iter"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// State reads the events of a stream, and what projectors did with them. Every provider with an
// event store implements it. See Projector.Wait.
type State interface {
	// ReadStream yields the events of stream after afterVersion; see eventstore.Store.
	ReadStream(ctx context.Context, stream string, afterVersion int64) iter.Seq2[eventstore.Raw, error]
	// Outcomes returns what each handler did with a message; see provider.Records.
	Outcomes(ctx context.Context, questions []provider.Question) ([]provider.Outcome, error)
}
