package projector

import (
	"context"
	"fmt"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

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
func (p *Projector[Tx]) Create(ctx context.Context, db provider.Units[Tx], cfg *RunnerConfig) error {
	r, err := newRunner(db, Source{}, orZero(cfg), p)
	if err == nil && p.setupOf(model.Created) == nil {
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
	if err != nil {
		return fmt.Errorf("create the tables of %s: %w", p.name, err)
	}
	return nil
}
