package eventstore

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kinora-go/kinora/internal/check"
)

// Aggregate is state folded from a stream. Apply gets each event's data as a registered value; it cannot
// fail, and must not look at a clock or at anything else outside its receiver and its argument.
type Aggregate interface{ Apply(event any) }

// RepositoryConfig tells how a Repository works; the zero value is the default.
type RepositoryConfig struct {
	Retries int // how often Update decides again after a conflict; zero means 3, negative never

	// Observer is told of each Update and UpdateTx that has ended: where it stands (Count 0: nothing was appended),
	// how many conflicts it met, and how long all of it took. It is called by whoever called Update: it must be
	// quick. Nil: nobody is told, at no cost.
	Observer func(at Appended, conflicts int, took time.Duration, err error)
	Clock    func() time.Time // measures that, and nothing else; nil: time.Now
}

// Repository loads aggregates of one category and appends what they decide.
type Repository[A Aggregate] struct {
	store    Store
	types    *Types
	category string
	fresh    func(id string) A
	retries  int
	queue    queue
	observe  func(at Appended, conflicts int, took time.Duration, err error)
	clock    func() time.Time
}

// NewRepository makes a repository over the streams "category-id". fresh returns an aggregate without a past.
func NewRepository[A Aggregate](store Store, types *Types, category string, fresh func(id string) A, cfg *RepositoryConfig) (*Repository[A], error) {
	if store == nil || fresh == nil {
		return nil, invalid("repository", "give it a store and a function that returns a new aggregate")
	}
	if err := types.Err(); err != nil {
		return nil, fmt.Errorf("repository %s: %w", category, err)
	}
	if err := invalid("category", check.Name(category)); err != nil {
		return nil, err
	}
	r := &Repository[A]{store: store, types: types, category: category, fresh: fresh, retries: 3}
	if cfg != nil && cfg.Retries != 0 {
		r.retries = max(cfg.Retries, 0)
	}
	if cfg != nil && cfg.Observer != nil {
		r.observe, r.clock = cfg.Observer, cfg.Clock
		if r.clock == nil {
			r.clock = time.Now //nolint:forbidigo // a duration, as this process sees it
		}
	}
	return r, nil
}

// Load folds the stream. A stream that is not there gives a fresh aggregate at version 0.
// An event of an unregistered type is ErrUnregistered.
func (r *Repository[A]) Load(ctx context.Context, id string) (A, int64, error) {
	a, at, err := r.load(ctx, r.store, id)
	return a, at.Version, err
}

func (r *Repository[A]) load(ctx context.Context, store Store, id string) (A, Appended, error) {
	at := Appended{Stream: StreamName(r.category, id)}
	var none A
	if err := invalid(check.Stream(at.Stream)); err != nil {
		return none, at, err
	}
	a := r.fresh(id)
	for raw, err := range store.ReadStream(ctx, at.Stream, 0) {
		if err != nil {
			return none, at, fmt.Errorf("load %s: %w", at.Stream, err)
		}
		e, err := Decode[any](r.types, raw)
		if err != nil {
			return none, at, fmt.Errorf("load %s at version %d: %w", at.Stream, raw.Version, err)
		}
		a.Apply(e.Data)
		at.Version, at.Position = raw.Version, raw.Position
	}
	return a, at, nil
}

// Update loads the aggregate, asks decide for events, and appends them at the loaded version.
//   - On a conflict it loads and decides again, RepositoryConfig.Retries times, then returns the
//     *ConflictError. So decide must have no effect outside its return value.
//   - Those that met a conflict on a stream go on one after another, in this process, and with a short random pause
//     from the second time on (up to 1ms, doubling to 200ms): many on one stream would keep one another from
//     getting anywhere.
//   - Where ctx ends while it waits for another try, it returns the *ConflictError, not ctx's error.
//   - No events: nothing is written; Appended says where the stream stands, with Count 0.
//   - decide's error is returned as it is.
func (r *Repository[A]) Update(ctx context.Context, id string, decide func(A) ([]any, error)) (at Appended, err error) {
	conflicts := 0
	defer r.tell(&at, &conflicts, &err)()
	at, stale, err := r.update(ctx, r.store, id, decide)
	if !stale {
		return at, err
	}
	conflicts++
	if r.retries == 0 {
		return at, err
	}
	leave, ok := r.queue.enter(ctx, id)
	if !ok {
		return at, err
	}
	defer leave()
	for try := 1; ; try++ {
		at, stale, err = r.update(ctx, r.store, id, decide)
		if !stale {
			return at, err
		}
		conflicts++
		if try >= r.retries {
			return at, err
		}
		pause := time.NewTimer(rand.N(min(time.Millisecond<<min(try-1, 10), 200*time.Millisecond)))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return at, err
		}
	}
}

// UpdateTx is Update inside the caller's transaction, once: a conflict is returned, the transaction still usable.
func (r *Repository[A]) UpdateTx(ctx context.Context, tx TxStore, id string, decide func(A) ([]any, error)) (at Appended, err error) {
	conflicts := 0
	defer r.tell(&at, &conflicts, &err)()
	at, stale, err := r.update(ctx, tx, id, decide)
	if stale {
		conflicts++
	}
	return at, err
}

// tell tells the observer, if there is one, when the function that it returns is called.
func (r *Repository[A]) tell(at *Appended, conflicts *int, err *error) func() {
	if r.observe == nil {
		return func() {}
	}
	begin := r.clock()
	return func() { r.observe(*at, *conflicts, r.clock().Sub(begin), *err) }
}

// update is one try. stale: the append met a conflict, so that another try may do.
func (r *Repository[A]) update(ctx context.Context, store Store, id string, decide func(A) ([]any, error)) (at Appended, stale bool, err error) {
	a, at, err := r.load(ctx, store, id)
	if err != nil {
		return Appended{}, false, err
	}
	events, err := decide(a)
	if err != nil {
		return Appended{}, false, err
	}
	if len(events) == 0 {
		return at, false, nil
	}
	drafts, err := r.types.Encode(ctx, events...)
	if err != nil {
		return Appended{}, false, fmt.Errorf("update %s: %w", at.Stream, err)
	}
	at, err = store.Append(ctx, at.Stream, Expected(at.Version), drafts)
	return at, errors.Is(err, ErrConflict), err
}
