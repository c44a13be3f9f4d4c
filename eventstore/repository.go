package eventstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/internal/pauses"
)

// RepositoryConfig configures a Repository. The zero value is the default.
type RepositoryConfig struct {
	Retries int // how often Update tries again after a conflict; zero means 3, negative means never

	// OnUpdate is called at the beginning of each Update and UpdateTx, in the goroutine of the
	// caller: it must be quick. The update continues with the context that it returns, so its events
	// get the Metadata of that context. The function that it returns, unless nil, is called at the
	// end with the result (Count 0: nothing was appended), the number of conflicts, and the error.
	// Nil costs nothing.
	OnUpdate func(ctx context.Context, category string) (context.Context, func(at Appended, conflicts int, err error))

	Snapshots Snapshots // for long streams; the zero value stores none
}

// Repository loads aggregates of one category, and appends new events to their streams.
type Repository[A Aggregate] struct {
	store    Store
	types    *Types
	category string
	fresh    func(id string) A
	retries  int
	streams  keyedMutex
	snaps    *snapshots // nil: none
	observe  func(ctx context.Context, category string) (context.Context, func(at Appended, conflicts int, err error))
}

// NewRepository returns a repository of the streams "category-id". fresh returns a new aggregate
// without events. A nil cfg means the default. The errors of types (Types.Err) are returned here.
func NewRepository[A Aggregate](
	store Store, types *Types, category string, fresh func(id string) A, cfg *RepositoryConfig,
) (*Repository[A], error) {
	if store == nil || fresh == nil {
		return nil, invalid("repository", "needs a store, and a function that returns a new aggregate")
	}
	if err := types.Err(); err != nil {
		return nil, fmt.Errorf("repository %s: %w", category, err)
	}
	if err := invalid("category", check.Name(category)); err != nil {
		return nil, err
	}
	if s, ok := store.(interface {
		AppendsTo(category string, types []string)
	}); ok {
		s.AppendsTo(category, types.Names()) // for the warnings of kinora.Start
	}
	if cfg == nil {
		cfg = &RepositoryConfig{}
	}
	snaps, err := newSnapshots(cfg.Snapshots, reflect.TypeFor[A](), store)
	if err != nil {
		return nil, fmt.Errorf("repository %s: %w", category, err)
	}
	return &Repository[A]{
		store: store, types: types, category: category, fresh: fresh, retries: max(cmp.Or(cfg.Retries, 3), 0),
		streams: keyedMutex{locks: map[string]*countedLock{}}, snaps: snaps, observe: cfg.OnUpdate,
	}, nil
}

// Load applies the events of a stream to a new aggregate, and returns the aggregate with the
// version of the stream. A stream without events has version 0. An event of an unregistered type
// is ErrUnregistered.
func (r *Repository[A]) Load(ctx context.Context, id string) (A, int64, error) {
	l, err := r.load(ctx, r.store, id)
	return l.aggregate, l.at.Version, err
}

// loaded is an aggregate with the events of its stream.
type loaded[A Aggregate] struct {
	aggregate A
	at        Appended // the place of the last event
	eventID   string   // its id
	applied   int64    // events that were read after the snapshot
	ended     bool
}

// load returns the aggregate of a stream. Its at has the stream also with an error.
func (r *Repository[A]) load(ctx context.Context, store Store, id string) (l loaded[A], err error) {
	l.at.Stream = StreamName(r.category, id)
	if err := invalid(check.Stream(l.at.Stream)); err != nil {
		return l, err
	}
	var used bool
	if r.snaps != nil {
		if used, err = r.loadSnapshot(ctx, store, id, &l); err != nil || used {
			return l, err
		}
	}
	l.aggregate = r.fresh(id)
	for raw, err := range store.ReadStream(ctx, l.at.Stream, 0) {
		if err == nil {
			err = r.apply(&l, raw)
		}
		if err != nil {
			return loaded[A]{at: Appended{Stream: l.at.Stream}}, fmt.Errorf("load %s: %w", l.at.Stream, err)
		}
	}
	return l, nil
}

func (r *Repository[A]) apply(l *loaded[A], raw Raw) error {
	e, err := Decode[any](r.types, raw)
	if err != nil {
		return fmt.Errorf("version %d: %w", raw.Version, err)
	}
	l.aggregate.Apply(e.Data)
	l.at.Version, l.at.Position, l.eventID = raw.Version, raw.Position, raw.ID
	l.applied++
	l.ended = raw.Type == TypeEnded
	return nil
}

// Update loads the aggregate, calls decide, and appends the events that decide returns at the
// loaded version.
//   - After a conflict, Update loads the aggregate and calls decide again, at most
//     RepositoryConfig.Retries times. Then it returns the *ConflictError. So decide must have no
//     effect outside its return value.
//   - Retries of one stream through this Repository run one at a time. The second and later ones
//     first wait for a random time of up to 1ms, doubling to 200ms. Otherwise many updates would
//     keep conflicting.
//   - If ctx ends while Update waits for a retry, Update returns the *ConflictError, not the error
//     of ctx.
//   - If decide returns no events, nothing is written. The result has the version and position of
//     the stream, and Count 0.
//   - ErrAmbiguous: the events may be stored. Call Update again with the same CommandID. Without one it
//     decides again, and may append twice.
//   - An error of decide is returned unchanged.
//   - ErrStreamEnded: the stream has ended (Ended). decide is not called.
//   - With a CommandID, the ids of the events are derived from it. If the command has already appended
//     events to the stream, whenever that was, decide is not called, and the result is their place with
//     Replayed set. So a command may be sent again after any error. A command that has appended nothing is
//     decided again.
func (r *Repository[A]) Update(ctx context.Context, id string, decide func(A) ([]any, error), command ...CommandID) (at Appended, err error) {
	return r.run(ctx, r.store, r.retries, id, decide, command)
}

// UpdateTx does what Update does inside the caller's transaction, but without retries. A conflict
// is returned; the transaction stays usable. ErrEventIDReused with a CommandID: the command was committed
// meanwhile, and a new transaction finds its events.
func (r *Repository[A]) UpdateTx(
	ctx context.Context, tx TxStore, id string, decide func(A) ([]any, error), command ...CommandID,
) (at Appended, err error) {
	return r.run(ctx, tx, 0, id, decide, command)
}

// run is Update, with a number of retries.
func (r *Repository[A]) run(
	ctx context.Context, store Store, retries int, id string, decide func(A) ([]any, error), command []CommandID,
) (at Appended, err error) {
	conflicts := 0
	if r.observe != nil {
		var end func(at Appended, conflicts int, err error)
		if ctx, end = r.observe(ctx, r.category); end != nil {
			defer func() { end(at, conflicts, err) }()
		}
	}
	c, err := theCommand(command)
	if err != nil {
		return at, err
	}
	for {
		var stale bool
		if at, stale, err = r.update(ctx, store, id, decide, c); !stale {
			return at, err
		}
		conflicts++
		if conflicts > retries {
			return at, err
		}
		if conflicts == 1 {
			unlock, ok := r.streams.lock(ctx, id)
			if !ok {
				return at, err
			}
			defer unlock()
			continue
		}
		if pauses.Wait(ctx, rand.N(pauses.Doubled(time.Millisecond, conflicts-2, 200*time.Millisecond)), nil); ctx.Err() != nil {
			return at, err
		}
	}
}

// update is one attempt. stale reports a conflict, after which another attempt may succeed.
func (r *Repository[A]) update(
	ctx context.Context, store Store, id string, decide func(A) ([]any, error), command CommandID,
) (at Appended, stale bool, err error) {
	if command != "" {
		stream := StreamName(r.category, id)
		if err := invalid(check.Stream(stream)); err != nil {
			return Appended{}, false, err
		}
		at, err := command.outcome(ctx, store, stream)
		if err != nil {
			return Appended{}, false, fmt.Errorf("update %s: find the command: %w", stream, err)
		}
		if at.Count > 0 {
			return at, false, nil
		}
	}
	l, err := r.load(ctx, store, id)
	if err != nil {
		return Appended{}, false, err
	}
	if l.ended {
		return l.at, false, fmt.Errorf("update %s: %w", l.at.Stream, ErrStreamEnded)
	}
	due := r.snapshot(id, &l) // before decide, which may change the aggregate
	events, err := decide(l.aggregate)
	if err != nil {
		return Appended{}, false, err
	}
	if ends(events) {
		due = Snapshot{}
	}
	if at = l.at; len(events) > 0 {
		drafts, err := r.types.Encode(ctx, events...)
		if err != nil {
			return Appended{}, false, fmt.Errorf("update %s: %w", at.Stream, err)
		}
		for i := range drafts {
			if command != "" {
				drafts[i].ID = command.eventID(at.Stream, i)
			}
		}
		if at, err = store.Append(ctx, at.Stream, Expected(at.Version), drafts); err != nil {
			committed := command != "" && errors.Is(err, ErrEventIDReused) // meanwhile, by the same command
			return at, errors.Is(err, ErrConflict) || committed, err
		}
	}
	return at, false, r.saveSnapshot(ctx, store, at, due)
}

// CommandID identifies a command, so that it may be sent again, at once or much later: see
// Repository.Update. It has 1 to 255 bytes: what the sender of the command chose for it, for example the
// Idempotency-Key of an HTTP request, and before that the operation and the client, because senders use one key for
// several operations. The same id may be used for several streams.
type CommandID string

// commands is the UUID namespace of the ids of events that commands with a CommandID append.
var commands = uuid.MustParse("2f1d6a0e-7c0b-5f2e-9b1a-6d1c3e5a7b90")

func (c CommandID) eventID(stream string, i int) string {
	return uuid.NewSHA1(commands, []byte(stream+"\x00"+string(c)+"\x00"+strconv.Itoa(i))).String()
}

// theCommand returns the CommandID of an Update; empty: there is none.
func theCommand(given []CommandID) (CommandID, error) {
	switch {
	case len(given) == 0:
		return "", nil
	case len(given) > 1:
		return "", invalid("command id", "give at most one")
	}
	return given[0], invalid("command id", check.Text(string(given[0]), check.MaxID))
}

// outcome returns the events that a command has appended to a stream. Count is 0 if there are none.
func (c CommandID) outcome(ctx context.Context, store Store, stream string) (Appended, error) {
	finder, ok := store.(interface {
		FindEvent(ctx context.Context, id string) (Appended, error)
	})
	if !ok {
		return Appended{}, invalid("command id", "the store does not find events by their ids: it must implement provider.EventFinder")
	}
	at, err := finder.FindEvent(ctx, c.eventID(stream, 0))
	if err != nil || at.Version == 0 {
		return Appended{}, err
	}
	at.Count, at.Replayed = 0, true
	for raw, err := range store.ReadStream(ctx, stream, at.Version-1) {
		if err != nil {
			return Appended{}, err
		}
		if raw.ID != c.eventID(stream, at.Count) {
			break
		}
		at.Version, at.Position, at.Count = raw.Version, raw.Position, at.Count+1
	}
	if at.Count == 0 {
		return Appended{}, fmt.Errorf("%w: an event of the command is not in stream %s", ErrEventIDReused, stream)
	}
	return at, nil
}

// keyedMutex has one mutex per name in use.
type keyedMutex struct {
	mu    sync.Mutex
	locks map[string]*countedLock
}

// countedLock is locked while its channel, of size 1, is full.
type countedLock struct {
	locked chan struct{}
	users  int // goroutines that hold it or wait for it
}

// lock locks name. It reports false if ctx ends first.
func (m *keyedMutex) lock(ctx context.Context, name string) (unlock func(), ok bool) {
	m.mu.Lock()
	l := m.locks[name]
	if l == nil {
		l = &countedLock{locked: make(chan struct{}, 1)}
		m.locks[name] = l
	}
	l.users++
	m.mu.Unlock()
	select {
	case l.locked <- struct{}{}:
		return func() { <-l.locked; m.forget(name, l) }, true
	case <-ctx.Done():
		m.forget(name, l)
		return nil, false
	}
}

func (m *keyedMutex) forget(name string, l *countedLock) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(m.locks, name)
	}
}
