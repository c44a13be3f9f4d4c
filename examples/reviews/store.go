package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// store is the database, whichever it is: Kinora's contracts, and the ratings. Nothing outside the store_ files
// knows a provider.
type store interface {
	eventstore.Store
	provider.Outbox
	outbox.Inspector
	provider.Parking
	// ParkedCount counts the messages that are waiting or stuck, of all projectors if the name is empty.
	ParkedCount(ctx context.Context, projector string) (int64, error)

	// ratings lists the ratings in the table with this prefix, sorted by product.
	ratings(ctx context.Context, prefix string) ([]rating, error)
	Close() error
}

// serviceStore is a store with the read models of the service.
type serviceStore interface {
	store
	// runner makes the runner of the read models.
	runner(src projector.Source) (*projector.Runner, error)
	// applyParked applies parked messages that are due.
	applyParked(ctx context.Context) error
	// dryRun shows what a replay of parked messages would change.
	dryRun(ctx context.Context, f projector.ParkedFilter) (*projector.DryRun, error)
	// inTx runs fn in a transaction. fn may run again, with what it did undone.
	inTx(ctx context.Context, fn func(tx eventstore.TxStore) error) error
	// wait returns when the read models show what was appended.
	wait(ctx context.Context, at eventstore.Appended) error

	// products lists the ratings of products with reviews after this one, sorted by product, at most limit.
	products(ctx context.Context, after string, limit int) ([]rating, error)
	// product is one product's rating and its newest reviews, at most limit, both of the same moment. A product
	// without reviews has a zero rating.
	product(ctx context.Context, product string, limit int) (rating, []standing, error)
	// newest lists the newest reviews of all products, at most limit.
	newest(ctx context.Context, limit int) ([]standing, error)
}

// demoStore is a store with the read models of the demo.
type demoStore interface {
	store
	// demoRunner makes a runner of the demo's two projectors.
	demoRunner(src projector.Source, t *trace) (*projector.Runner, error)
}

// database says where the data is: the value of --db.
type database struct{ kind, path string }

// UnmarshalText reads "sqlite:PATH", "postgres://…" or "memory".
func (d *database) UnmarshalText(text []byte) error {
	kind, path, _ := strings.Cut(string(text), ":")
	switch {
	case kind == "memory" && path == "":
	case kind == "sqlite" && path != "":
	case (kind == "postgres" || kind == "postgresql") && strings.HasPrefix(path, "//"):
		kind, path = "postgres", string(text)
	default:
		return errors.New(`want "sqlite:PATH", "postgres://…" or "memory"`)
	}
	d.kind, d.path = kind, path
	return nil
}

// String is for people: it has no password.
func (d database) String() string {
	switch d.kind {
	case "sqlite":
		return "sqlite:" + d.path
	case "postgres":
		if u, err := url.Parse(d.path); err == nil { // a password may stand before the host, or among the parameters
			return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
		}
	}
	return d.kind
}

// flag is the value of --db again.
func (d database) flag() string {
	if d.kind == "postgres" {
		return d.path
	}
	return d.String()
}

// create opens the database, and makes or updates its tables.
func (d database) create(ctx context.Context) (serviceStore, error) {
	switch d.kind {
	case "sqlite":
		return createSQLite(ctx, d.path, sqliteModel{})
	case "postgres":
		return createPostgres(ctx, d.path, postgresModel{})
	}
	return nil, d.unsuited()
}

// open opens a database that is there, for reading.
func (d database) open(ctx context.Context) (serviceStore, error) {
	switch d.kind {
	case "sqlite":
		return openSQLite(ctx, d.path)
	case "postgres":
		return openPostgres(ctx, d.path)
	}
	return nil, d.unsuited()
}

func (d database) unsuited() error {
	return fmt.Errorf("--db %s: it ends with this process, so that nobody could read what was imported: use sqlite:PATH or postgres://…", d)
}

// createDemo opens the database for the demo, and makes its tables.
func (d database) createDemo(ctx context.Context) (demoStore, error) {
	switch d.kind {
	case "sqlite":
		return createSQLite(ctx, d.path, sqliteModel{exactPrefix}, sqliteModel{controlPrefix})
	case "postgres":
		return createPostgres(ctx, d.path, postgresModel{exactPrefix}, postgresModel{controlPrefix})
	}
	return newMemory()
}
