package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/kinora-go/kinora/outbox"
)

// database is the value of --db.
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
		return errors.New(`use "sqlite:PATH", "postgres://…" or "memory"`)
	}
	d.kind, d.path = kind, path
	return nil
}

// String returns the value of --db without a password, for messages.
func (d database) String() string {
	switch d.kind {
	case "sqlite":
		return "sqlite:" + d.path
	case "postgres":
		// The password may be before the host or in a parameter.
		if u, err := url.Parse(d.path); err == nil {
			return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
		}
	}
	return d.kind
}

// flag returns the complete value of --db.
func (d database) flag() string {
	if d.kind == "postgres" {
		return d.path
	}
	return d.String()
}

// create opens the database, and creates or updates its tables. broker is the value of --broker.
func (d database) create(ctx context.Context, broker string) (s serviceStore, err error) {
	switch route := routeFor(broker); d.kind {
	case "sqlite":
		s, err = createSQLite(ctx, d.path, route)
	case "postgres":
		s, err = createPostgres(ctx, d.path, route)
	default:
		err = d.errUnsupported()
	}
	if err != nil {
		return nil, err
	}
	if err := s.createReadModel(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// open opens an existing database. It creates no tables.
func (d database) open(ctx context.Context) (serviceStore, error) {
	switch d.kind {
	case "sqlite":
		return openSQLite(ctx, d.path)
	case "postgres":
		return openPostgres(ctx, d.path)
	}
	return nil, d.errUnsupported()
}

func (d database) errUnsupported() error {
	return fmt.Errorf("--db %s keeps data only in this process, so other commands cannot read it: use sqlite:PATH or postgres://…", d)
}

// createDemo opens the database for the demo, and creates or updates Kinora's tables.
func (d database) createDemo(ctx context.Context) (demoStore, error) {
	switch d.kind {
	case "sqlite":
		return createSQLite(ctx, d.path, outbox.ByCategory)
	case "postgres":
		return createPostgres(ctx, d.path, outbox.ByCategory)
	}
	return newMemory()
}
