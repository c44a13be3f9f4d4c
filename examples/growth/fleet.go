package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
)

// lease is how long the work of a program that was killed waits for another one. It is shorter than
// the defaults, so that the example is over soon.
const lease = 2 * time.Second

// fleet runs the relays and runners of all stores. Any number of programs may run one: for each
// projector one of them reads at a time.
type fleet struct {
	directory *directory
	models    []*model
	publisher message.Publisher
	logger    *slog.Logger

	running chan struct{}
	mu      sync.Mutex
	stores  map[string]*store
}

// store is an event store, and the services that read it.
type store struct {
	db       *postgres.DB
	services *kinora.Group
	// of each read model. Wait uses the values that the runners have.
	projectors map[*model]*projector.Projector[pgx.Tx]
}

func newFleet(d *directory, logger *slog.Logger, models ...*model) *fleet {
	return &fleet{directory: d, models: models, logger: logger, running: make(chan struct{}), stores: map[string]*store{}}
}

// Running implements kinora.Service.
func (f *fleet) Running() <-chan struct{} { return f.running }

// Run starts the services of each store, also of those that are added meanwhile.
func (f *fleet) Run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, f.stop()) }()
	for started := false; ; {
		err := f.follow(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, projector.ErrLogChanged):
			return err
		case err != nil: // for example, the directory is away
			f.logger.Error("stores that are new are not read yet", "error", err)
		case !started:
			started = true
			close(f.running)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(100 * time.Millisecond): // of a real service: some seconds
		}
		if err := f.ended(); err != nil {
			return err
		}
	}
}

// follow starts the services of the stores that are new in the directory.
func (f *fleet) follow(ctx context.Context) error {
	all, err := f.directory.stores(ctx)
	if err != nil {
		return err
	}
	for name, dsn := range all {
		if f.store(name) != nil {
			continue
		}
		s, err := f.start(ctx, name, dsn)
		if err != nil {
			return fmt.Errorf("store %s: %w", name, err)
		}
		f.mu.Lock()
		f.stores[name] = s
		f.mu.Unlock()
	}
	return nil
}

// start starts a relay for a store, and a runner for each read model.
func (f *fleet) start(ctx context.Context, name, dsn string) (_ *store, err error) {
	db, err := postgres.Open(ctx, dsn, &postgres.Config{Route: outbox.ByCategory})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			db.Close()
		}
	}()
	var services []kinora.Service
	projectors := map[*model]*projector.Projector[pgx.Tx]{}
	for _, m := range f.models {
		// The read model and the checkpoint are in the database of the model, and the events in that
		// of the store.
		projectors[m] = m.of(name)
		r, err := projector.NewRunner(m.db, projector.FromLog(db), projector.RunnerConfig{Lease: lease, Logger: f.logger}, projectors[m])
		if err != nil {
			return nil, err
		}
		services = append(services, r)
	}
	relay, err := outbox.NewRelay(db, f.publisher, &outbox.RelayConfig{
		Lease: lease, Poll: 100 * time.Millisecond, OrderedPublisher: true, Logger: f.logger,
		Backoff: claim.Backoff{Base: 250 * time.Millisecond, Max: time.Minute, Attempts: 20},
	})
	if err != nil {
		return nil, err
	}
	group, err := kinora.Start(ctx, append(services, relay)...)
	if err != nil {
		return nil, err
	}
	return &store{db, group, projectors}, nil
}

func (f *fleet) store(name string) *store {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stores[name]
}

// ended returns an error if the services of a store have ended.
func (f *fleet) ended() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, s := range f.stores {
		select {
		case <-s.services.Ended():
			return fmt.Errorf("the services of store %s have ended", name) // stop returns why
		default:
		}
	}
	return nil
}

func (f *fleet) stop() (err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, s := range f.stores {
		err = errors.Join(err, s.services.Stop())
		s.db.Close()
	}
	return err
}

// of returns the event store of a tenant.
func (f *fleet) of(ctx context.Context, tenant string) (*store, error) {
	name, err := f.directory.storeOf(ctx, tenant)
	if err != nil {
		return nil, err
	}
	if s := f.store(name); s != nil {
		return s, nil
	}
	return nil, fmt.Errorf("store %s is not open yet: try again", name)
}

// wait waits until a read model shows an append of a tenant. shown is the database in which it is
// then read: that of the model, or a standby of it. The checkpoint is in the same transaction as the
// rows, so a standby that shows the one shows the others.
func (f *fleet) wait(ctx context.Context, m *model, shown *postgres.DB, tenant string, at eventstore.Appended) error {
	s, err := f.of(ctx, tenant)
	if err != nil {
		return err
	}
	return patiently(ctx, func() error { return s.projectors[m].Wait(ctx, projector.StateOf(shown, s.db), at) })
}

// patiently calls fn again after an error, until ctx ends: a database that is away comes back.
func patiently(ctx context.Context, fn func() error) error {
	for {
		if err := fn(); err == nil || !pause(ctx) {
			return err
		}
	}
}
