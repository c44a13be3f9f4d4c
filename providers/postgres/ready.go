package postgres

import (
	"context"
	"fmt"
)

const (
	// It looks into the catalog alone, so that it succeeds before Migrate, and with any role.
	stateSQL = `
select current_setting('default_transaction_isolation'), current_setting('server_encoding'), exists (
	select from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = $1::text and c.relname = 'migrations')`

	versionSQL = `select coalesce(max(version_id), 0) from kinora.migrations where is_applied`
)

// Ready implements provider.ReadyChecker. It returns ErrNotMigrated if the schema is older than this package needs, a
// *NewerError if the schema is newer, ErrEncoding and ErrIsolation.
func (db *DB) Ready(ctx context.Context) error {
	fault, _ := db.check(ctx) // an error is that the database is away, which may pass
	return fault
}

// check returns what is wrong with the database for good, or an error if it cannot find out.
func (db *Provider) check(ctx context.Context) (fault, err error) {
	is, err := db.state(ctx, db.pool)
	switch {
	case err != nil:
		return nil, err
	case is.encoding != encodingUTF8:
		return is.wrongEncoding(), nil
	case is.version < known():
		fault = ErrNotMigrated
	case is.version > known():
		fault = &NewerError{Database: is.version, Program: known()}
	case is.isolation != "read committed":
		return ErrIsolation, nil
	default:
		return nil, nil
	}
	return fmt.Errorf("schema %s: %w", db.cfg.Schema, fault), nil
}

// known is the version of the schema that this program knows.
func known() int64 { return int64(len(migrations)) }

// state is what a database is like.
type state struct {
	isolation string
	encoding  string
	version   int64 // of the schema; 0 if it is not there
}

const encodingUTF8 = "UTF8" // as the server names it

func (s *state) wrongEncoding() error {
	return fmt.Errorf("the encoding is %s: %w", s.encoding, ErrEncoding)
}

func (db *Provider) state(ctx context.Context, q querier) (is state, err error) {
	var there bool
	err = q.QueryRow(ctx, stateSQL, db.cfg.Schema).Scan(&is.isolation, &is.encoding, &there)
	if err == nil && there {
		err = q.QueryRow(ctx, db.q(versionSQL)).Scan(&is.version)
	}
	return is, err
}
