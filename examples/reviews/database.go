package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/kinora-go/kinora/outbox"
)

// database is the value of --db, and the place of the read model.
type database struct {
	kind, path string
	redis      redisKeys // the read model is there, unless this is zero
}

// projectionFlags are the place of the read model.
type projectionFlags struct {
	Projection string `enum:"sql,redis" default:"sql" env:"REVIEWS_PROJECTION" help:"Where the read model is: sql, in the database, or redis."`
	Redis      string `default:"redis://127.0.0.1:6379/0" env:"KINORA_REDIS" placeholder:"redis://…" help:"The Redis server of --projection redis. Each database must have a Redis database of its own."`
}

// of returns a database with its read model in the place of the flags.
func (f projectionFlags) of(d database) database {
	if f.Projection == "redis" {
		d.redis = redisKeys{f.Redis, "reviews"}
	}
	return d
}

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

// String returns the value of --db, and that of --redis if it is used, without passwords, for messages.
func (d database) String() string {
	text := d.kind
	switch d.kind {
	case "sqlite":
		text = "sqlite:" + d.path
	case "postgres":
		text = withoutPassword(d.path, d.kind)
	}
	if d.redis.url != "" {
		text += " and " + d.redis.String()
	}
	return text
}

// withoutPassword returns a URL without the user, and without parameters, which may have a password too.
// It returns instead if it is no URL.
func withoutPassword(text, instead string) string {
	u, err := url.Parse(text)
	if err != nil {
		return instead
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

// flag returns the complete value of --db.
func (d database) flag() string {
	switch d.kind {
	case "sqlite":
		return "sqlite:" + d.path
	case "postgres":
		return d.path
	}
	return d.kind
}

// create opens the database, and creates or updates its tables. broker is the value of --broker.
func (d database) create(ctx context.Context, broker string) (s serviceStore, err error) {
	switch route := routeFor(broker); d.kind {
	case "sqlite":
		s, err = createSQLite(ctx, d, route)
	case "postgres":
		s, err = createPostgres(ctx, d, route)
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

// open opens an existing database with a read model. It creates no tables.
func (d database) open(ctx context.Context) (s serviceStore, err error) {
	switch d.kind {
	case "sqlite":
		s, err = openSQLite(ctx, d)
	case "postgres":
		s, err = openPostgres(ctx, d)
	default:
		err = d.errUnsupported()
	}
	if err != nil {
		return nil, err
	}
	if all, err := s.state().Generations(ctx, s.name()); err != nil || len(all) == 0 {
		return nil, errors.Join(fmt.Errorf("%s has no read model of reviews: import a file first", d), err, s.Close())
	}
	return s, nil
}

func (d database) errUnsupported() error {
	return fmt.Errorf("--db %s keeps data only in this process, so other commands cannot read it: use sqlite:PATH or postgres://…", d)
}

// createDemo opens the database for the demo, and creates or updates Kinora's tables.
func (d database) createDemo(ctx context.Context) (demoStore, error) {
	switch d.kind {
	case "sqlite":
		return createSQLite(ctx, d, outbox.ByCategory)
	case "postgres":
		return createPostgres(ctx, d, outbox.ByCategory)
	}
	return newMemory()
}
