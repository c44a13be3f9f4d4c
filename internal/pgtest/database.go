package pgtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"hash/fnv"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
)

var (
	templatesMu sync.Mutex
	// Names of the templates that exist, as far as this process knows.
	templates = map[string]bool{}
)

// Create creates a database for t on server, and drops it when t ends. The database is a clone of a
// template that prepare fills once. key identifies the template's content, such as the migrations.
func Create(t testing.TB, server, key string, prepare func(ctx context.Context, dsn string) error) (dsn string) {
	t.Helper()
	ctx := context.Background()
	template, err := ensure(ctx, server, key, prepare)
	if err != nil {
		t.Fatalf("make a template database: %v", err)
	}
	name := "kinora_" + strings.ToLower(rand.Text())
	if err := run(ctx, server, "create database "+name+" template "+template); err != nil {
		t.Fatalf("clone the template database: %v", err)
	}
	t.Cleanup(func() {
		if err := run(ctx, server, "drop database "+name+" with (force)"); err != nil {
			t.Errorf("drop the test's database: %v", err)
		}
	})
	return with(server, name)
}

func ensure(ctx context.Context, server, key string, prepare func(ctx context.Context, dsn string) error) (string, error) {
	h := fnv.New64a()
	_, _ = h.Write([]byte(key))
	name := fmt.Sprintf("kinora_template_%x", h.Sum64())
	templatesMu.Lock()
	defer templatesMu.Unlock()
	if templates[server+name] {
		return name, nil
	}
	conn, err := pgx.Connect(ctx, server)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(ctx) }()
	// Other test processes may use the same server: only one of them makes the template.
	if _, err := conn.Exec(ctx, `select pg_advisory_lock($1)`, int64(h.Sum64())); err != nil {
		return "", err
	}
	var ready bool
	err = conn.QueryRow(ctx, `select exists (select from pg_database where datname = $1 and datistemplate)`, name).Scan(&ready)
	if err != nil || ready {
		templates[server+name] = ready
		return name, err
	}
	if _, err := conn.Exec(ctx, "drop database if exists "+name+" with (force)"); err != nil {
		return "", err
	}
	if _, err := conn.Exec(ctx, "create database "+name); err != nil {
		return "", err
	}
	if err := prepare(ctx, with(server, name)); err != nil {
		return "", err
	}
	if _, err := conn.Exec(ctx, "alter database "+name+" is_template true"); err != nil {
		return "", err
	}
	templates[server+name] = true
	return name, nil
}

// with returns server's connection string for another of its databases.
func with(server, database string) string {
	u, err := url.Parse(server)
	if err != nil || u.Scheme == "" {
		return server + " dbname=" + database
	}
	u.Path = "/" + database
	return u.String()
}

func run(ctx context.Context, dsn, statement string) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	_, err = conn.Exec(ctx, statement)
	return err
}
