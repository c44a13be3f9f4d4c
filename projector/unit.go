package projector

import (
	"context"
	"time"

	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
)

// UnitOfWork is a transaction that also records that it happened. Providers implement it.
type UnitOfWork[Tx any] interface {
	// Do records w, runs apply, and puts what apply returns into the outbox: all of it commits, or nothing.
	//   - apply gets the indexes into w.Marks whose message is new to its handler, in order. Where w.Marks is not
	//     empty and none of them is new, it does not run, or has run with its effects undone; Do returns nil.
	//   - w.Park is recorded with the marks that are new, and also where none is.
	//   - With no marks, apply always runs, with a nil fresh. A nil apply only records w.
	//   - A concurrent unit that holds the same mark is waited for: where it commits, the mark is not new.
	//   - apply may run again within one Do, its earlier effects undone.
	//   - apply must not end tx; a unit whose transaction it ended fails with a permanent *Error.
	//   - If apply panics or calls runtime.Goexit, nothing is recorded.
	//   - Errors are *Error: apply's own too, where it has no class yet. The end of ctx is never permanent.
	Do(ctx context.Context, w Work, apply func(ctx context.Context, tx Tx, fresh []int) ([]outbox.Message, error)) error

	// Records says what of Work this provider commits together with apply's writes. A wrapper passes it on.
	Records() Records
}

// Work is what one unit records beside the handlers' writes.
type Work struct {
	Projector string       // whose read model this is
	Marks     []marker.Key // distinct; none where the projector keeps no markers
	// Park is messages to set aside; Seq and At are for the provider to fill in. A message is set aside once for a
	// projector and handler: where it has an id and is there already, the first stays.
	Park []Parked
	// Fresh, where it is not nil, is told once all is committed, or where nothing was new, how many marks were new.
	Fresh func(marks int)
}

// Told tells Fresh.
func (w Work) Told(marks int) {
	if w.Fresh != nil {
		w.Fresh(marks)
	}
}

// Records declares which parts of a unit's work are atomic with its effects.
type Records struct{ Marks, Park, Outbox bool }

// Parked is a message set aside, with all that is needed to look into it and to handle it later.
type Parked struct {
	Seq       int64 // the order of parking
	Projector string
	Handler   string // "product-ratings/posted"; empty where the message did not get as far as a handler
	MessageID string // empty where the message had none
	Topic     string // where it came from
	Key       string // its ordering key, where it had one
	Payload   []byte
	Headers   map[string]string
	Class     Class
	Code      string // SQLSTATE, or a word: "malformed", "unregistered", "undecodable", "panic", …
	Attempts  int    // of the handler, in this delivery
	At        time.Time
}

// ParkedInspector is a capability of a provider: looking at what is parked.
type ParkedInspector interface {
	// ParkedMessages lists at most limit (zero means 100) parked messages of projector, of all projectors
	// where it is empty, whose Seq is greater than after, in order.
	ParkedMessages(ctx context.Context, projector string, after int64, limit int) ([]Parked, error)
	// ParkedCount counts the parked messages of projector, of all projectors where it is empty.
	ParkedCount(ctx context.Context, projector string) (int64, error)
}
