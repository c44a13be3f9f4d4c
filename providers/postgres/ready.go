package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

const (
	// It reads only the catalog, so that it succeeds before Migrate and with any role. A right on one
	// column is sufficient, because grants.sql gives appenders only some columns of the outbox.
	stateSQL = `
select current_user::text, current_setting('default_transaction_isolation'), current_setting('server_encoding'),
	pg_is_in_recovery() or current_setting('transaction_read_only') = 'on',
	exists (select from pg_class c where c.relnamespace = n.oid and c.relname = 'migrations'),
	coalesce(has_schema_privilege(n.oid, 'usage'), true),
	array(
		select r.o::int - 1 from unnest($2::text[], $3::text[]) with ordinality r(tbl, name, o)
			join pg_class c on c.relnamespace = n.oid and c.relname = r.tbl
		where not case r.name when 'delete' then has_table_privilege(c.oid, r.name) else has_any_column_privilege(c.oid, r.name) end)
from (select) one left join pg_namespace n on n.nspname = $1::text`

	versionSQL = `select coalesce(max(version_id), 0) from kinora.migrations where is_applied`
)

// ErrReadOnly: the server is a standby, or the session's transactions are read-only.
var ErrReadOnly = errors.New("the database is read-only: connect to the primary (target_session_attrs=read-write), without default_transaction_read_only")

// RightsError is the error of Ready if the role of the pool's sessions lacks rights that the
// service needs.
type RightsError struct {
	Role    string
	Missing []string // "usage on schema kinora", "insert on kinora.events"
}

func (e *RightsError) Error() string {
	return fmt.Sprintf("role %q lacks rights: %s: grant them, as GrantsSQL does for its roles", e.Role, strings.Join(e.Missing, ", "))
}

// Ready implements outbox.ReadyChecker. It returns
//   - ErrEncoding and ErrIsolation;
//   - ErrReadOnly on a standby;
//   - ErrNotMigrated if the schema is older than this package needs, and a *NewerError if it is newer;
//   - a *RightsError for a role without the rights that the service needs: a relay or a runner when it
//     starts; if the application calls Ready, at least one of appending, relaying and running
//     projectors.
func (db *DB) Ready(ctx context.Context) error {
	fault, _ := db.check(ctx) // the error, if any, may be temporary
	return fault
}

// check returns a permanent fault of the database, or an error if the check itself fails.
func (db *DB) check(ctx context.Context) (fault, err error) {
	is, err := db.state(ctx, db.pool)
	switch {
	case err != nil:
		return nil, err
	case is.encoding != encodingUTF8:
		return is.wrongEncoding(), nil
	case is.readOnly:
		return ErrReadOnly, nil
	case is.hidden: // the role may not read the version, and lacks reports the missing right
	case is.version < known():
		return fmt.Errorf("schema %s: %w", db.cfg.Schema, ErrNotMigrated), nil
	case is.version > known():
		return fmt.Errorf("schema %s: %w", db.cfg.Schema, &NewerError{Database: is.version, Program: known()}), nil
	}
	lacks := db.lacks(ctx, is.missing)
	if !is.usage {
		lacks = append([]string{"usage on schema " + db.cfg.Schema}, lacks...)
	}
	switch {
	case len(lacks) > 0:
		return &RightsError{Role: is.role, Missing: lacks}, nil
	case is.isolation != "read committed":
		return ErrIsolation, nil
	}
	return nil, nil
}

// known is the newest version of the schema that this program knows.
func known() int64 { return int64(len(migrations)) }

// state describes a database, for the session's role.
type state struct {
	role, isolation, encoding string
	readOnly                  bool
	usage                     bool    // of the schema
	missing                   []right // of allRights
	version                   int64   // of the schema; 0 without a schema
	hidden                    bool    // the schema exists, but the role may not read its version
}

const encodingUTF8 = "UTF8" // as the server names it

func (s *state) wrongEncoding() error {
	return fmt.Errorf("the encoding is %s: %w", s.encoding, ErrEncoding)
}

func (db *DB) state(ctx context.Context, q querier) (is state, err error) {
	var exists bool
	var missing []int
	tables, names := make([]string, len(allRights)), make([]string, len(allRights))
	for i, r := range allRights {
		tables[i], names[i] = r.table, r.right
	}
	err = q.QueryRow(ctx, stateSQL, db.cfg.Schema, tables, names).Scan(
		&is.role, &is.isolation, &is.encoding, &is.readOnly, &exists, &is.usage, &missing)
	for _, i := range missing {
		is.missing = append(is.missing, allRights[i])
	}
	is.hidden = exists && (!is.usage || slices.Contains(is.missing, right{"select", "migrations"}))
	if err == nil && exists && !is.hidden {
		err = q.QueryRow(ctx, db.q(versionSQL)).Scan(&is.version)
	}
	return is, err
}
