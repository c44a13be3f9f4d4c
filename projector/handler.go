package projector

import (
	"context"
	"fmt"
	"slices"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// Handler is one handler of a projector. On, OnEmit and OnBatch return it.
type Handler[Tx any] struct {
	name  string
	was   []string
	match func(*eventstore.Types) []string
	run   func(ctx context.Context, tx Tx, t *eventstore.Types, m *model.Message) ([]outbox.Message, error)
	batch func(ctx context.Context, tx Tx, events []any) error     // of OnBatch, instead of run
	take  func(t *eventstore.Types, m *model.Message) (any, error) // returns an event for batch
	emits bool
	setup bool // OnCreate or OnReset: it takes no events
}

// Was declares earlier names of the handler: of the same projector ("created"), or of another
// ("old-ratings/created"). A marker with an earlier name counts, and new markers are written with
// all names. So old and new versions of a program can run at the same time during a deployment. Messages are parked under the last
// of the names, which is therefore the oldest one that is in use.
//
// A name of another projector helps only if markers decide, as with Options.BrokerOnly. The checkpoint belongs to the name of
// the projector: one with a new name that reads the log begins at Options.From, and applies again what the other has applied.
func (h Handler[Tx]) Was(names ...string) Handler[Tx] {
	h.was = append(slices.Clip(h.was), names...)
	return h
}

// On returns a handler that calls fn for each event of type E or, if E is an interface, of each
// registered type that implements E.
//
// name identifies the handler, not the event. With the name of the projector
// ("product-ratings/posted") it is part of each marker: to rename a handler, see Was. It must
// match ^[a-z][a-z0-9_-]{0,40}$.
//
// fn must write only through its transaction. It may run again for the same event, after its
// earlier writes were rolled back; its other effects may then happen twice. An error rolls the
// transaction back; Class says what follows.
//
// To call another system, return a message (OnEmit), or add a task in the transaction
// (TasksIn(tx).Enqueue of the database): it takes place if the transaction commits. Never call it in
// fn: a call in a transaction that is rolled back has happened all the same, and happens again with
// the next try; a rebuild calls it for every event of the past; and while it takes long, a connection
// and the later messages wait.
//
// What fn appends (UpdateTx with InTx(tx) of the database), adds as a task, or publishes with its ctx
// inherits from the event: its id as the causation id, and its correlation id and traceparent.
// eventstore.WithMetadata in fn replaces these.
func On[Tx, E any](name string, fn func(context.Context, Tx, eventstore.Event[E]) error) Handler[Tx] {
	if fn == nil {
		return Handler[Tx]{name: name} // NewRunner reports it
	}
	h := OnEmit(name, func(ctx context.Context, tx Tx, e eventstore.Event[E]) ([]outbox.Message, error) {
		return nil, fn(ctx, tx, e)
	})
	h.emits = false
	return h
}

// OnEmit returns a handler with output: the messages that fn returns are added to the outbox in
// the same transaction.
//   - The ID of a message without one is derived from the handler, the event and the index of the
//     message.
//   - The Key of a message without one is the stream of the event.
//   - Each message has the id of the event as its causation id, and the event's correlation id and
//     traceparent, unless its Headers have these already.
func OnEmit[Tx, E any](
	name string, fn func(context.Context, Tx, eventstore.Event[E]) ([]outbox.Message, error),
) Handler[Tx] {
	if fn == nil {
		return Handler[Tx]{name: name} // NewRunner reports it
	}
	return Handler[Tx]{
		name: name, match: eventstore.Matching[E], emits: true,
		run: func(ctx context.Context, tx Tx, t *eventstore.Types, m *model.Message) ([]outbox.Message, error) {
			e, err := model.Decoded[E](t, m)
			if err != nil {
				return nil, model.Undecodable(err)
			}
			return fn(ctx, tx, e)
		},
	}
}

// OnBatch returns a handler that calls fn for several events at once, for statements that apply many
// rows. It is like On otherwise.
//   - events are those of a unit, at least one and at most RunnerConfig.Batch, in the order of the unit.
//     So a stream is in order. No other handler of the projector runs for a later event of a stream
//     before fn has run for the earlier ones. Between events of different streams, fn may run before or
//     after other handlers.
//   - If fn returns an error, the unit is rolled back, and fn runs again for fewer events, until only
//     the one that fails is left. That one is parked.
//   - RunnerConfig.Timeout is for one call of fn.
//   - The ctx of fn has no metadata of the events, which may have different causes.
//   - The store must undo a unit as a whole: NewRunner refuses Redis.
func OnBatch[Tx, E any](name string, fn func(ctx context.Context, tx Tx, events []eventstore.Event[E]) error) Handler[Tx] {
	if fn == nil {
		return Handler[Tx]{name: name} // NewRunner reports it
	}
	return Handler[Tx]{
		name: name, match: eventstore.Matching[E],
		take: func(t *eventstore.Types, m *model.Message) (any, error) {
			e, err := model.Decoded[E](t, m)
			return e, model.Undecodable(err)
		},
		batch: func(ctx context.Context, tx Tx, events []any) error {
			all := make([]eventstore.Event[E], len(events))
			for i, e := range events {
				all[i] = e.(eventstore.Event[E])
			}
			return fn(ctx, tx, all)
		},
	}
}

// Table returns the name of a table of the read model in the generation that a handler writes:
// "ratings" becomes "ratings_g2" in the second one. Handlers of a projector with OnCreate must use it
// for each of Options.Tables, also in foreign keys, and for the names of indexes. Readers use the view with the plain
// name. Table returns name outside of such handlers, and in the first generation of a projector that
// had its tables before it had OnCreate.
//
// OnCreate fails if name has more than 55 bytes, without its schema: the suffix may become "_g999999", and PostgreSQL
// cuts names at 63 bytes.
func Table(ctx context.Context, name string) string {
	s := model.ScopeOf(ctx)
	if s.Long != nil && model.CheckSuffixed(name) != nil {
		s.Long.Store(&name)
	}
	return name + s.Suffix
}

// Replaying reports whether a handler is called by a rebuild, for an event that the generation that
// is or was live has applied. The handler must not call other services then, and must not add tasks.
// The messages that it returns are dropped.
func Replaying(ctx context.Context) bool { return model.ScopeOf(ctx).Replayed }

// OnCreate returns a handler that creates the tables of a new generation: Options.Tables, each
// under the name that Table returns. It is called before the first event, in a transaction.
// BlueGreen and Verify require it.
//
// The runner creates a view for each of Options.Tables, with the plain name, which shows the live
// generation. If the projector had a table of that name before it had OnCreate, the first blue/green
// rebuild renames the table to "ratings_g1", and no program writes it from then on.
func OnCreate[Tx any](fn func(context.Context, Tx) error) Handler[Tx] {
	return setup(model.Created, fn)
}

// OnReset returns a handler that empties the read model before a rebuild in place. Without it, all
// rows of Options.Tables are deleted.
func OnReset[Tx any](fn func(context.Context, Tx) error) Handler[Tx] { return setup(model.Reset, fn) }

func setup[Tx any](name string, fn func(context.Context, Tx) error) Handler[Tx] {
	h := Handler[Tx]{name: name, setup: true}
	if fn != nil {
		h.run = func(ctx context.Context, tx Tx, _ *eventstore.Types, _ *model.Message) ([]outbox.Message, error) {
			return nil, fn(ctx, tx)
		}
	}
	return h
}

// Create creates the tables and the views of a projector with OnCreate, unless it has applied events
// already. Its first runner would do the same. Call Create in a deployment, so that readers find the
// views before a runner has started. A nil cfg means the default.
//   - ErrInput: p has no OnCreate.
//   - The error of OnCreate, or of the store: for example, a table has the name of a view.
func (p *Projector[Tx]) Create(ctx context.Context, db provider.Units[Tx], cfg *RunnerConfig) (err error) {
	defer check.Wrap(&err, "create the tables of %s", p.name)
	r, err := newRunner(db, Source{}, orZero(cfg), p)
	if err == nil && !p.hasSetup(model.Created) {
		err = fmt.Errorf("%w: it has no OnCreate", ErrInput)
	}
	for tries := 1; err == nil; tries++ {
		if err = r.all.Feeders[0].CreateNew(ctx); provider.ClassOf(err) != ClassTransient || ctx.Err() != nil {
			break
		}
		delay, _ := r.host.Retry.Delay(tries)
		model.Wait(ctx, delay)
		err = ctx.Err()
	}
	return err
}
