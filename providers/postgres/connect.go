package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// connect opens a connection outside the pool, configured like those of the pool.
func connect(ctx context.Context, pool *pgxpool.Config) (*pgx.Conn, error) {
	config, err := connConfig(ctx, pool)
	if err != nil {
		return nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err == nil && pool.AfterConnect != nil {
		if err = pool.AfterConnect(ctx, conn); err != nil {
			closeConn(ctx, conn)
		}
	}
	return conn, err
}

// connConfig returns the configuration of the pool's connections for one outside the pool.
func connConfig(ctx context.Context, pool *pgxpool.Config) (*pgx.ConnConfig, error) {
	c := pool.ConnConfig.Copy()
	if c.ConnectTimeout <= 0 {
		c.ConnectTimeout = 2 * time.Minute // as pgxpool does
	}
	if pool.BeforeConnect != nil {
		if err := pool.BeforeConnect(ctx, c); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// closeConn closes a connection. It waits at most five seconds for the server.
func closeConn(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// ErrSettings: a setting of the role, the database or the connection changes the meaning of what this package sends or
// reads. client_encoding must be UTF8. DateStyle must be ISO if the pool sends and reads text
// (pgx.QueryExecModeExec or QueryExecModeSimpleProtocol).
var ErrSettings = errors.New("a setting of the session changes the meaning of statements")

// checkSettings returns ErrEncoding, or ErrSettings for a session whose values this package would misread, or that would misread its
// values. The server reports these settings by itself, and again whenever they change.
func (db *Provider) checkSettings(conn *pgx.Conn) error {
	is := conn.PgConn().ParameterStatus
	if encoding := is("server_encoding"); encoding != "" && encoding != encodingUTF8 {
		return wrongEncoding(encoding)
	}
	if encoding := is("client_encoding"); encoding != "" && encoding != encodingUTF8 {
		return fmt.Errorf("%w: client_encoding is %s: remove it from the role, the database and the connection string", ErrSettings, encoding)
	}
	if style := is("DateStyle"); db.describe && style != "" && !strings.HasPrefix(style, "ISO") {
		return fmt.Errorf("%w: DateStyle is %s: remove it from the role, the database and the connection string, or use another query exec mode", ErrSettings, style)
	}
	return nil
}

// acquire returns a connection of the pool, if its settings are right.
func (db *Provider) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	conn, err := db.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	if err := db.checkSettings(conn.Conn()); err != nil {
		conn.Release()
		return nil, err
	}
	return conn, nil
}

// reserved are the words that PostgreSQL does not accept as a schema name without quotes.
// pg_get_keywords lists them in the categories R and T. This is the list of version 15, plus
// system_user, which is reserved since version 16.
var reserved = strings.Fields(`
all analyse analyze and any array as asc asymmetric authorization binary both case cast check collate collation column concurrently
constraint create cross current_catalog current_date current_role current_schema current_time current_timestamp current_user default
deferrable desc distinct do else end except false fetch for foreign freeze from full grant group having ilike in initially inner
intersect into is isnull join lateral leading left like limit localtime localtimestamp natural not notnull null offset on only or
order outer overlaps placing primary references returning right select session_user similar some symmetric system_user table
tablesample then to trailing true union unique user using variadic verbose when where window with`)

// checkSchema returns an *eventstore.InvalidError for a name that SQL does not accept without quotes,
// and for a name of PostgreSQL's own schemas.
func checkSchema(name string) error {
	if err := provider.CheckName("schema", name); err != nil {
		return err
	}
	if strings.HasPrefix(name, "pg_") || name == "information_schema" {
		return &eventstore.InvalidError{Field: "schema", Reason: "the name belongs to PostgreSQL itself: choose another one"}
	}
	if slices.Contains(reserved, name) {
		return &eventstore.InvalidError{Field: "schema", Reason: "the name is a reserved word of PostgreSQL: choose another one"}
	}
	return nil
}
