package postgres

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

const (
	// What keeps the server from removing dead rows: sessions with a snapshot, in any database for
	// walsenders, prepared transactions, and replication slots.
	snapshotsSQL = `
select 'pid ' || pid, application_name, coalesce(usename::text, ''), coalesce(state, ''), query, xact_start, 'select pg_terminate_backend(' || pid || ');'
from pg_stat_activity
where (datname = current_database() or datname is null) and pid <> pg_backend_pid() and backend_type in ('client backend', 'walsender', 'background worker', 'parallel worker')
	and (backend_xmin is not null or backend_xid is not null) and xact_start < clock_timestamp() - $1::bigint * interval '1 microsecond'
union all
select 'prepared transaction ' || gid, '', owner::text, 'prepared', '', prepared, 'rollback prepared ' || quote_literal(gid) || ';'
from pg_prepared_xacts where database = current_database() and prepared < clock_timestamp() - $1::bigint * interval '1 microsecond'
order by 6 limit 10`

	// Slots have no time: an inactive one keeps rows until it is used or dropped.
	slotsSQL = `
select slot_name::text, coalesce(age(xmin), age(catalog_xmin), 0)::bigint from pg_replication_slots
where not active and xmin is not null and age(xmin) > 1000000 order by 2 desc limit 10`

	deadRowsSQL = `
select relname::text, n_dead_tup from pg_stat_user_tables
where schemaname = $1::text and n_dead_tup > 0 order by n_dead_tup desc limit 5`

	sequencesSQL = `
select c.relname::text, a.attname::text, s.seqcache, s.seqincrement, s.seqcycle
from pg_sequence s
	join pg_depend d on d.objid = s.seqrelid and d.classid = 'pg_class'::regclass and d.refclassid = 'pg_class'::regclass and d.deptype in ('a', 'i')
	join pg_class c on c.oid = d.refobjid join pg_namespace n on n.oid = c.relnamespace
	join pg_attribute a on a.attrelid = c.oid and a.attnum = d.refobjsubid
where n.nspname = $1::text and c.relname in ('events', 'outbox', 'parked', 'task_trail', 'acts')
	and (s.seqcache <> 1 or s.seqincrement <> 1 or s.seqcycle) order by 1`

	// What this session may not read. A schema that is missing has no rows.
	unreadableSQL = `
select current_user::text, case when has_schema_privilege(n.oid, 'usage') then array(
		select c.relname::text from pg_class c where c.relnamespace = n.oid and c.relkind in ('r', 'p') and not has_any_column_privilege(c.oid, 'select') order by 1 limit 10)
	else array['every table'] end
from pg_namespace n where n.nspname = $1::text`

	// The rights of roles other than the owner. Rights on columns count.
	grantsSQL = `
select distinct case when x.grantee = 0 then 'public' else pg_get_userbyid(x.grantee)::text end, c.relname::text, lower(x.privilege_type)
from pg_class c join pg_namespace n on n.oid = c.relnamespace, lateral (
	select * from aclexplode(c.relacl) union all select x.* from pg_attribute t, aclexplode(t.attacl) x where t.attrelid = c.oid) x
where n.nspname = $1::text and c.relkind in ('r', 'p') and x.grantee <> c.relowner
order by 1, 2, 3`
)

// Diagnose implements provider.Diagnoser.
func (db *Provider) Diagnose(ctx context.Context, l provider.DiagnosisLimits) (found []provider.Finding, err error) {
	l = l.WithDefaults()
	for _, check := range []func(context.Context, provider.DiagnosisLimits) ([]provider.Finding, error){
		db.findPooler, db.findUnreadable, db.findSchema, db.findSnapshots, db.findRights, db.findSequences,
	} {
		some, err := check(ctx, l)
		if err != nil {
			return nil, classifyOwn(ctx, fmt.Errorf("diagnose: %w", explain(err)))
		}
		found = append(found, some...)
		if slices.ContainsFunc(some, func(f provider.Finding) bool { return f.Blocks && f.Check != provider.FindingSchema }) {
			break // the next checks would fail
		}
	}
	return found, nil
}

func (db *Provider) findUnreadable(ctx context.Context, _ provider.DiagnosisLimits) ([]provider.Finding, error) {
	var role string
	var tables []string
	err := db.pool.QueryRow(ctx, unreadableSQL, db.cfg.Schema).Scan(&role, &tables)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && len(tables) == 0 {
		return nil, nil // findSchema reports a schema that is missing
	}
	return []provider.Finding{{
		Check: provider.FindingRights, Blocks: true, Title: "This session may not read the tables: it is " + role,
		Meaning: "The other checks need them.",
		Facts:   []provider.Fact{{Name: "not readable", Value: strings.Join(tables, ", ")}},
		Remedy:  []string{"grant kinora_reader to " + pgx.Identifier{role}.Sanitize() + "; or kinora_operator, to repair as well; or use the database of another role"},
	}}, err
}

func (db *Provider) findSchema(ctx context.Context, _ provider.DiagnosisLimits) ([]provider.Finding, error) {
	fault, err := db.check(ctx, provider.AnyService)
	f := provider.Finding{Check: provider.FindingSchema, Blocks: true, Facts: []provider.Fact{{Name: "schema", Value: db.cfg.Schema}}}
	var newer *NewerError
	switch {
	case err != nil:
		return nil, err
	case errors.Is(fault, ErrNotMigrated):
		f.Title = "The tables are missing, or older than this program requires"
		f.Meaning = "Services of this version refuse to start."
		f.Remedy = []string{"kinora migrate up"}
	case errors.As(fault, &newer):
		f.Title = "A newer program has migrated the database"
		f.Meaning = "Services of this version refuse to start. The other checks may be wrong."
		f.Facts = append(f.Facts, provider.Fact{Name: "database", Value: itoa(newer.Database)}, provider.Fact{Name: "program", Value: itoa(newer.Program)})
		f.Remedy = []string{"deploy the program that migrated the database, or a later one; use its version of kinora"}
	case errors.Is(fault, ErrEncoding):
		f.Title, f.Meaning = "The database is not in UTF-8", "It refuses some text, or sorts it in another order."
		f.Remedy = []string{"create database … encoding 'UTF8' template template0"}
	case errors.Is(fault, ErrReadOnly):
		f.Title, f.Meaning = "The database is read-only", "Services cannot run on it."
		f.Remedy = []string{"connect to the primary: add target_session_attrs=read-write to the connection string"}
	case errors.Is(fault, ErrSettings):
		f.Title, f.Meaning = "A setting of the sessions changes the meaning of statements", "Services refuse to start, and appends are refused."
		f.Remedy = []string{fault.Error()}
	case errors.Is(fault, eventstore.ErrUnsafeLog):
		f.Title, f.Meaning = "Row level security hides rows from services", "Services refuse to start: they would skip what they cannot see."
		f.Remedy = []string{fault.Error()}
	case errors.Is(fault, ErrIsolation):
		f.Title, f.Meaning = "Sessions do not begin at read committed", "Services refuse to start."
		f.Remedy = []string{"remove default_transaction_isolation from the role, the database and the connection string"}
	default:
		return nil, nil // missing rights: see findRights
	}
	return []provider.Finding{f}, nil
}

func (db *Provider) findSnapshots(ctx context.Context, l provider.DiagnosisLimits) (found []provider.Finding, err error) {
	type snapshot struct {
		name, application, user, state, query, end string
		since                                      time.Time
	}
	type named struct {
		name string
		n    int64
	}
	var snapshots []snapshot
	var slots, dead []named
	scanNamed := into(func(d *named) []any { return []any{&d.name, &d.n} })
	b := &pgx.Batch{}
	queueAll(b, &snapshots, into(func(s *snapshot) []any {
		return []any{&s.name, &s.application, &s.user, &s.state, &s.query, &s.since, &s.end}
	}), snapshotsSQL, l.Snapshot.Microseconds())
	queueAll(b, &slots, scanNamed, slotsSQL)
	queueAll(b, &dead, scanNamed, deadRowsSQL, db.cfg.Schema)
	if err := db.pool.SendBatch(ctx, b).Close(); err != nil {
		return nil, err
	}
	const meaning = "PostgreSQL cannot remove rows that it might still see. Published entries and done tasks stay as dead rows, and scans past them become slow."
	var rows []provider.Fact
	for _, d := range dead {
		rows = append(rows, provider.Fact{Name: "dead rows in " + d.name, Value: itoa(d.n)})
	}
	for _, s := range snapshots {
		f := provider.Finding{
			Check: provider.FindingSnapshot, Title: "An old transaction keeps dead rows: " + s.name, Meaning: meaning, Remedy: []string{s.end},
			Facts: append([]provider.Fact{
				{Name: "application", Value: s.application}, {Name: "user", Value: s.user}, {Name: "state", Value: s.state},
				{Name: "since", Value: s.since.UTC().Format(time.RFC3339)},
			}, rows...),
		}
		if s.query != "" {
			f.Private = []provider.Fact{{Name: "query", Value: s.query}}
		}
		found = append(found, f)
	}
	for _, s := range slots {
		found = append(found, provider.Finding{
			Check: provider.FindingSnapshot, Title: "A replication slot that nobody uses keeps dead rows: " + s.name, Meaning: meaning,
			Facts:  append([]provider.Fact{{Name: "transactions since", Value: itoa(s.n)}}, rows...),
			Remedy: []string{"select pg_drop_replication_slot('" + strings.ReplaceAll(s.name, "'", "''") + "');"},
		})
	}
	return found, nil
}

func (db *Provider) findSequences(ctx context.Context, _ provider.DiagnosisLimits) (found []provider.Finding, err error) {
	return collect(ctx, db.pool, func(row pgx.CollectableRow) (f provider.Finding, err error) {
		var table, column string
		var cache, increment int64
		var cycle bool
		err = row.Scan(&table, &column, &cache, &increment, &cycle)
		f = provider.Finding{
			Check: provider.FindingSequence, Title: "The sequence of " + db.cfg.Schema + "." + table + " draws numbers out of order",
			Meaning: "Sessions take numbers in advance and use them later, so a later row may get a smaller number. Readers of the log refuse such a table, and entries and parked messages lose their order.",
			Facts:   []provider.Fact{{Name: "cache", Value: itoa(cache)}, {Name: "increment", Value: itoa(increment)}, {Name: "cycle", Value: fmt.Sprint(cycle)}},
			Remedy: []string{
				fmt.Sprintf("alter table %s.%s alter %s set cache 1 set increment 1 set no cycle;", db.cfg.Schema, table, column),
				"then restart the services, because sessions keep the numbers that they have taken",
			},
		}
		return f, err
	}, sequencesSQL, db.cfg.Schema)
}

// roleNeeds are the rights that the roles of RolesSQL cannot do without.
var roleNeeds = map[string][]right{
	"kinora_appender": slices.Concat(appenderNeeds, routeNeeds), "kinora_relay": relayNeeds,
	"kinora_projector": runnerNeeds, "kinora_worker": workerNeeds,
}

// forbidden are rights that no role but the owner needs: they would change events or versions.
var forbidden = rights("events: update delete truncate", "streams: delete truncate", "migrations: insert update delete truncate",
	"outbox: truncate", "markers: update truncate", "checkpoints: delete truncate", "parked: truncate", "tasks: truncate", "task_trail: update truncate")

func (db *Provider) findRights(ctx context.Context, _ provider.DiagnosisLimits) (found []provider.Finding, err error) {
	has := map[string][]right{}
	var role string
	var r right
	rows, _ := db.pool.Query(ctx, grantsSQL, db.cfg.Schema) // the rows return its error too
	if err := eachRow(rows, []any{&role, &r.table, &r.right}, func() { has[role] = append(has[role], r) }); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(has)) {
		var many, few []string
		for _, r := range has[name] {
			if slices.Contains(forbidden, r) && !isArchiving(name, r) || name == "public" && r.right != "select" {
				many = append(many, r.right+" on "+db.cfg.Schema+"."+r.table)
			}
		}
		for _, need := range roleNeeds[name] {
			if !slices.Contains(has[name], need) {
				few = append(few, need.right+" on "+db.cfg.Schema+"."+need.table)
			}
		}
		found = appendRights(found, name, many, "may do too much", "It can change what was recorded, or skip the rules of the tables.", "revoke", "from")
		found = appendRights(found, name, few, "lacks rights", "Services that log in with it refuse to start, or fail.", "grant", "to")
	}
	fault, err := db.check(ctx, provider.AnyService)
	if e := (*RightsError)(nil); err == nil && errors.As(fault, &e) && !isOperator(has, e.Role) {
		found = appendRights(found, e.Role, e.Missing, "lacks rights", "A service that connects as this role refuses to start.", "grant", "to")
	}
	return found, err
}

// isArchiving reports whether a right is what the role of Archive is for.
func isArchiving(role string, r right) bool {
	return role == "kinora_archiver" && r == right{"delete", "events"}
}

// isOperator reports whether a role is that of a person: it reads, and runs no service.
func isOperator(has map[string][]right, role string) bool {
	return role == "kinora_operator" || role == "kinora_archiver" || role == "kinora_reader" || len(has[role]) == 0
}

// appendRights adds a finding about these rights of a role, if there are any.
func appendRights(found []provider.Finding, role string, rights []string, what, meaning, verb, to string) []provider.Finding {
	if len(rights) == 0 {
		return found
	}
	name := role
	if name != "public" {
		name = pgx.Identifier{role}.Sanitize()
	}
	return append(found, provider.Finding{
		Check: provider.FindingRights, Title: "The role " + role + " " + what, Meaning: meaning,
		Facts:  []provider.Fact{{Name: "rights", Value: strings.Join(rights, ", ")}},
		Remedy: mapSlice(rights, func(r *string) string { return fmt.Sprintf("%s %s %s %s;", verb, *r, to, name) }),
	})
}

const (
	poolerTries = 5
	poolerLimit = 2 * time.Second // for one statement of a probe
)

// findPooler checks with connections of its own whether prepared statements and LISTEN survive the end
// of a transaction, as they do on a direct connection.
func (db *Provider) findPooler(ctx context.Context, _ provider.DiagnosisLimits) (found []provider.Finding, err error) {
	conn, err := connect(ctx, db.pool.Config())
	if err != nil {
		return nil, err
	}
	defer closeConn(ctx, conn)
	other, err := connect(ctx, db.pool.Config())
	if err != nil {
		return nil, err
	}
	defer closeConn(ctx, other)
	loses, err := losesStatements(ctx, conn, other)
	if err != nil {
		return nil, err
	}
	if !loses {
		return nil, nil
	}
	mode := db.pool.Config().ConnConfig.DefaultQueryExecMode
	if mode == pgx.QueryExecModeCacheStatement || mode == pgx.QueryExecModeDescribeExec {
		found = append(found, provider.Finding{
			Blocks: true, // they would fail at random too
			Check:  provider.FindingPooler, Title: "A pooler on the way loses prepared statements",
			Meaning: "The pooler is in transaction mode and does not support prepared statements. Statements fail at random, or another client's statement runs.",
			Facts:   []provider.Fact{{Name: "default_query_exec_mode", Value: mode.String()}},
			Remedy:  []string{"add default_query_exec_mode=cache_describe to the connection string", "or use pgbouncer 1.21 or later with max_prepared_statements, or connect to the server"},
		})
	}
	heard, err := hearsItself(ctx, conn, other)
	if err == nil && !heard {
		found = append(found, provider.Finding{
			Check: provider.FindingPooler, Title: "A pooler on the way loses notifications",
			Meaning: "LISTEN has no effect through a pooler in transaction mode. Services that run a postgres.Listener on this address are woken by polling only, about once a second.",
			Remedy:  []string{"set postgres.ListenerConfig.DSN to the address of the server itself; if that is done, run kinora doctor with that address"},
		})
	}
	return found, err
}

// losesStatements prepares a statement on conn, and runs it while other holds the session that it was
// prepared in. Behind a pooler in transaction mode another session gets it then.
func losesStatements(ctx context.Context, conn, other *pgx.Conn) (bool, error) {
	for range poolerTries {
		name := "kinora_" + strings.ToLower(rand.Text())
		limited, cancel := context.WithTimeout(ctx, poolerLimit)
		lost, err := func() (lost bool, err error) {
			if _, err := conn.PgConn().Prepare(limited, name, "select 1", nil); err != nil {
				return false, err
			}
			tx, err := other.Begin(limited)
			if err != nil {
				return false, err
			}
			defer func() { _ = tx.Rollback(limited) }()
			if _, err := tx.Exec(limited, "select 1", pgx.QueryExecModeSimpleProtocol); err != nil {
				return false, err
			}
			_, err = conn.PgConn().ExecPrepared(limited, name, nil, nil, nil).Close()
			if e := pgError(err); e != nil && e.Code == "26000" { // it does not exist in this session
				return true, nil
			}
			return false, err
		}()
		cancel()
		if lost || err != nil {
			// A pool of one session cannot serve both: nothing is known then.
			if ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
				return false, nil
			}
			return lost, err
		}
		if _, err := conn.Exec(ctx, "deallocate "+name, pgx.QueryExecModeSimpleProtocol); err != nil {
			return pgError(err) != nil && pgError(err).Code == "26000", nil
		}
	}
	return false, nil
}

// hearsItself reports whether conn gets a notification that other sends.
func hearsItself(ctx context.Context, conn, other *pgx.Conn) (bool, error) {
	channel := "kinora_probe_" + strings.ToLower(rand.Text())
	if _, err := conn.Exec(ctx, "listen "+channel, pgx.QueryExecModeSimpleProtocol); err != nil {
		return false, err
	}
	if _, err := other.Exec(ctx, "notify "+channel, pgx.QueryExecModeSimpleProtocol); err != nil {
		return false, err
	}
	limited, cancel := context.WithTimeout(ctx, poolerLimit)
	defer cancel()
	if _, err := conn.WaitForNotification(limited); err != nil {
		if ctx.Err() == nil && limited.Err() != nil {
			return false, nil
		}
		return false, err
	}
	_, _ = conn.Exec(ctx, "unlisten "+channel, pgx.QueryExecModeSimpleProtocol)
	return true, nil
}
