package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

const (
	// stateSQL reads only the catalog, so it succeeds before Migrate and for every role. A right on
	// one column is enough, because grants.sql gives appenders only some columns of the outbox.
	stateSQL = `
select current_user::text, current_setting('default_transaction_isolation'), current_setting('server_encoding'),
	pg_is_in_recovery() or current_setting('transaction_read_only') = 'on',
	exists (select from pg_class c where c.relnamespace = n.oid and c.relname = 'migrations'),
	coalesce(has_schema_privilege(n.oid, 'usage'), true),
	array(
		select r.o::int - 1 from unnest($2::text[], $3::text[]) with ordinality r(tbl, name, o)
			join pg_class c on c.relnamespace = n.oid and c.relname = r.tbl
		where not case r.name when 'delete' then has_table_privilege(c.oid, r.name) else has_any_column_privilege(c.oid, r.name) end),
	array(
		select c.relname::text from pg_class c
		where c.relnamespace = n.oid and c.relkind = 'r' and c.relname = any($2::text[]) and row_security_active(c.oid) order by 1)
from (select) one left join pg_namespace n on n.nspname = $1::text`

	versionSQL = `select coalesce(max(version_id), 0) from kinora.migrations where is_applied`
)

// ErrReadOnly: the server is a standby, or the session's transactions are read-only.
var ErrReadOnly = errors.New("the database is read-only: connect to the primary (target_session_attrs=read-write), without default_transaction_read_only")

// RightsError is the error of Ready if the role of the pool's sessions lacks rights that the service
// always needs.
type RightsError struct {
	Role    string
	Missing []string // "usage on schema kinora", "insert on kinora.events"
}

func (e *RightsError) Error() string {
	return fmt.Sprintf("role %q lacks rights: %s: grant them, as RolesSQL and GrantsSQL do for their roles", e.Role, strings.Join(e.Missing, ", "))
}

// Ready returns an error if no retry can make the database usable:
//   - ErrEncoding and ErrIsolation;
//   - ErrSettings if a setting of the sessions changes the meaning of statements;
//   - eventstore.ErrUnsafeLog if row level security may hide rows from the role;
//   - ErrReadOnly on a standby;
//   - ErrNotMigrated if the schema is older than this package needs, and a *NewerError if it is
//     newer;
//   - a *RightsError if the role does not have all rights of a service that appends, relays or runs
//     projectors.
//
// If the database is away, it returns nil.
func (db *DB) Ready(ctx context.Context) error { return db.ReadyFor(ctx, provider.AnyService) }

// ReadyFor implements provider.ReadyChecker. It is Ready with the rights of one service.
func (db *Provider) ReadyFor(ctx context.Context, service provider.Service) error {
	fault, _ := db.check(ctx, service) // an error means that the database is away, which may pass
	return fault
}

// check returns what is wrong with the database for good, or an error if it cannot find out.
func (db *Provider) check(ctx context.Context, service provider.Service) (fault, err error) {
	conn, err := db.acquire(ctx)
	if errors.Is(err, ErrSettings) || errors.Is(err, ErrEncoding) {
		return err, nil
	} else if err != nil {
		return nil, err
	}
	defer conn.Release()
	is, err := db.state(ctx, conn)
	switch {
	case err != nil:
		if e := pgError(err); e != nil && strings.HasPrefix(e.Code, "42") { // another program's table
			return fmt.Errorf("schema %s: %w: %w", db.cfg.Schema, ErrNotMigrated, err), nil
		}
		return nil, err
	case is.readOnly:
		return ErrReadOnly, nil
	case len(is.secured) > 0:
		return db.hides(is.secured), nil
	case is.hidden: // the version cannot be read; the missing right is reported below
	case is.version < known():
		return fmt.Errorf("schema %s: %w", db.cfg.Schema, ErrNotMigrated), nil
	case is.version > known():
		return fmt.Errorf("schema %s: %w", db.cfg.Schema, &NewerError{Database: is.version, Program: known()}), nil
	}
	lacks := db.lacks(service, is.missing)
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

// known is the version of the schema that this program knows.
func known() int64 { return int64(len(migrations)) }

// state is what a database is like, for the session's role.
type state struct {
	role, isolation, encoding string
	readOnly                  bool
	usage                     bool     // of the schema
	missing                   []right  // of asked
	version                   int64    // of the schema; 0 if it is not there
	hidden                    bool     // it is there, and the role may not read its version
	secured                   []string // tables whose rows row level security may hide
}

const encodingUTF8 = "UTF8" // as the server names it

func wrongEncoding(is string) error {
	return fmt.Errorf("the encoding is %s: %w", is, ErrEncoding)
}

func (db *Provider) state(ctx context.Context, q querier) (is state, err error) {
	var there bool
	var missing []int
	tables := mapSlice(asked, func(r *right) string { return r.table })
	names := mapSlice(asked, func(r *right) string { return r.right })
	err = q.QueryRow(ctx, stateSQL, db.cfg.Schema, tables, names).Scan(
		&is.role, &is.isolation, &is.encoding, &is.readOnly, &there, &is.usage, &missing, &is.secured)
	for _, i := range missing {
		is.missing = append(is.missing, asked[i])
	}
	is.hidden = there && (!is.usage || slices.Contains(is.missing, right{"select", "migrations"}))
	if err == nil && there && !is.hidden {
		err = q.QueryRow(ctx, db.q(versionSQL)).Scan(&is.version)
	}
	return is, err
}

// The rights that each service must have, by table. Rights that only some services use are not
// required: inserts into the outbox by handlers that emit. An appender must have the rights to insert
// into the outbox and to identify the log if the DB has a route.
var (
	relayNeeds = rights("migrations: select", "outbox: select update delete", "leases: select insert update delete",
		"services: select insert update delete", "pauses: select")
	runnerNeeds = rights("migrations: select", "generations: select insert update", "markers: select insert delete", "low_water_marks: select insert update",
		"parked: select insert update delete", "holds: select insert update delete", "runners: select insert update delete",
		"in_flight: select insert update delete", "checkpoints: select insert update", "leases: select insert update delete",
		"services: select insert update delete", "pauses: select", "acts: select update")
	appenderNeeds = rights("migrations: select", "streams: select insert update", "events: select insert", "snapshots: select insert update delete")
	workerNeeds   = rights("migrations: select", "tasks: select insert update delete", "task_groups: select insert update delete",
		"task_trail: select insert delete", "leases: select insert update delete",
		"services: select insert update delete")
	routeNeeds = rights("outbox: insert", "incarnation: select")

	serviceNeeds = map[provider.Service][]right{provider.RelayService: relayNeeds, provider.RunnerService: runnerNeeds, provider.WorkerService: workerNeeds}
)

// right is a right on a table.
type right struct{ right, table string }

func rights(lines ...string) (all []right) {
	for _, line := range lines {
		table, names, _ := strings.Cut(line, ": ")
		for name := range strings.FieldsSeq(names) {
			all = append(all, right{name, table})
		}
	}
	return all
}

// asked are all rights, each once, which stateSQL looks at.
var asked = func() (all []right) {
	for _, r := range slices.Concat(relayNeeds, runnerNeeds, workerNeeds, appenderNeeds, routeNeeds) {
		if !slices.Contains(all, r) {
			all = append(all, r)
		}
	}
	return all
}()

// lacks returns the missing rights that the service needs. For provider.AnyService these are the rights of the service that lacks the
// fewest.
func (db *Provider) lacks(service provider.Service, missing []right) []string {
	appender := appenderNeeds
	if db.cfg.Route != nil {
		appender = slices.Concat(appenderNeeds, routeNeeds)
	}
	services := [][]right{appender, runnerNeeds, relayNeeds, workerNeeds}
	if needs := serviceNeeds[service]; needs != nil {
		services = [][]right{needs}
	}
	var fewest []string
	for i, needs := range services {
		var lacks []string
		for _, need := range needs {
			if slices.Contains(missing, need) {
				lacks = append(lacks, need.right+" on "+db.cfg.Schema+"."+need.table)
			}
		}
		if i == 0 || len(lacks) < len(fewest) {
			fewest = lacks
		}
	}
	return fewest
}
