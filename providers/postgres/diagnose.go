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
	// Dead rows are kept by sessions with a snapshot (walsenders in any database), prepared transactions, and replication slots.
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
select slot_name::text, age(xmin)::text, 'select pg_drop_replication_slot(' || quote_literal(slot_name) || ');'
from pg_replication_slots where not active and xmin is not null and age(xmin) > 1000000 order by age(xmin) desc limit 10`

	// The database, whether the schema has tables of Kinora, and other schemas that have.
	placesSQL = `
with places as (
	select n.nspname::text as name from pg_namespace n
	where exists (select from pg_class c where c.relnamespace = n.oid and c.relname = 'low_water_marks')
		and exists (select from pg_class c where c.relnamespace = n.oid and c.relname = 'streams'))
select current_database()::text, exists (select from places where name = $1::text), array(select name from places order by name limit 5)`

	// Sessions whose state is hidden from this role. Of those without a database, only some keep dead rows.
	hiddenSQL = `
select current_user::text, count(a.pid), coalesce(string_agg(distinct a.usename::text, ', '), '')
from (select) one left join pg_stat_activity a
	on a.query = '<insufficient privilege>' and a.usesysid is not null and a.pid <> pg_backend_pid()
		and (a.datname = current_database() or a.datname is null and a.backend_xmin is not null)`

	deadRowsSQL = `
select 'dead rows in ' || relname, n_dead_tup::text from pg_stat_user_tables
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
func (db *Provider) Diagnose(ctx context.Context, l provider.DiagnosisLimits) (d provider.Diagnosis, err error) {
	l = l.WithDefaults()
	for _, check := range []func(context.Context, provider.DiagnosisLimits) ([]provider.Finding, error){
		db.findPooler, db.findUnreadable, db.findSchema, db.findSnapshots, db.findRights, db.findSequences,
	} {
		some, err := check(ctx, l)
		if err != nil {
			return d, classifyOwn(ctx, fmt.Errorf("diagnose: %w", explain(err)))
		}
		d.Findings = append(d.Findings, some...)
		if slices.ContainsFunc(some, func(f provider.Finding) bool { return f.Blocks && f.Check != provider.FindingSchema }) {
			return d, nil // the next checks would fail
		}
	}
	if d.Unchecked, err = db.hidden(ctx); err != nil {
		return d, classifyOwn(ctx, fmt.Errorf("diagnose: %w", explain(err)))
	}
	return d, nil
}

// hidden returns that this role may not see the sessions of others, if there are any.
func (db *Provider) hidden(ctx context.Context) (all []provider.Unchecked, err error) {
	var role, others string
	var sessions int
	if err := db.pool.QueryRow(ctx, hiddenSQL).Scan(&role, &sessions, &others); err != nil || sessions == 0 {
		return nil, err
	}
	return []provider.Unchecked{{
		What: "whether an open transaction keeps dead rows, or others waiting",
		Why: fmt.Sprintf("the role %s may not see what %d sessions of other roles do (%s): the begin of their transactions, their state and their waits",
			role, sessions, others),
		Remedy: []string{"grant pg_monitor to " + pgx.Identifier{role}.Sanitize() + ";"},
	}}, nil
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
	finding := func(title, meaning, remedy string, facts ...provider.Fact) ([]provider.Finding, error) {
		return []provider.Finding{{
			Check: provider.FindingSchema, Blocks: true, Title: title, Meaning: meaning, Remedy: []string{remedy},
			Facts: append([]provider.Fact{{Name: "schema", Value: db.cfg.Schema}}, facts...),
		}}, nil
	}
	var newer *NewerError
	switch {
	case errors.Is(fault, ErrNotMigrated):
		return db.findMissing(ctx)
	case errors.As(fault, &newer):
		return finding("A newer program has migrated the database", "Services of this version refuse to start. The other checks may be wrong.",
			"deploy the program that migrated the database, or a later one; use its version of kinora",
			provider.Fact{Name: "database", Value: itoa(newer.Database)}, provider.Fact{Name: "program", Value: itoa(newer.Program)})
	case errors.Is(fault, ErrEncoding):
		return finding("The database is not in UTF-8", "It refuses some text, or sorts it in another order.",
			"create database … encoding 'UTF8' template template0")
	case errors.Is(fault, ErrReadOnly):
		return finding("The database is read-only", "Services cannot run on it.",
			"connect to the primary: add target_session_attrs=read-write to the connection string")
	case errors.Is(fault, ErrSettings):
		return finding("A setting of the sessions changes the meaning of statements",
			"Services refuse to start, and appends are refused.", fault.Error())
	case errors.Is(fault, eventstore.ErrUnsafeLog):
		return finding("Row level security hides rows from services",
			"Services refuse to start: they would skip what they cannot see.", fault.Error())
	case errors.Is(fault, ErrIsolation):
		return finding("Sessions do not begin at read committed", "Services refuse to start.",
			"remove default_transaction_isolation from the role, the database and the connection string")
	}
	return nil, err // missing rights: see findRights
}

// findMissing finds that there are no tables of Kinora, perhaps because the schema or the database is another one, or that they
// are too old.
func (db *Provider) findMissing(ctx context.Context) ([]provider.Finding, error) {
	var database string
	var exists bool
	var schemas []string
	if err := db.pool.QueryRow(ctx, placesSQL, db.cfg.Schema).Scan(&database, &exists, &schemas); err != nil {
		return nil, err
	}
	f := provider.Finding{
		Check: provider.FindingSchema, Blocks: true, Title: "The tables are older than this program requires", Meaning: "Services of this version refuse to start.",
		Facts: []provider.Fact{{Name: "database", Value: database}, {Name: "schema", Value: db.cfg.Schema}}, Remedy: []string{"kinora migrate up"},
	}
	switch {
	case exists:
	case len(schemas) > 0:
		f.Title = fmt.Sprintf("The schema %s of the database %s has no tables of Kinora, but another schema has", db.cfg.Schema, database)
		f.Facts = append(f.Facts, provider.Fact{Name: "schemas with tables of Kinora", Value: strings.Join(schemas, ", ")})
		f.Meaning = "If each service has a schema of its own, and this is a new service, create its tables. Otherwise --schema is wrong."
		f.Remedy = []string{"use --schema " + schemas[0] + ", or KINORA_SCHEMA", "for a new service: kinora migrate up"}
	default:
		f.Title = fmt.Sprintf("The database %s has no tables of Kinora", database)
		f.Meaning = "If this is the database of a new service, create them. Otherwise --db is that of another database."
	}
	return []provider.Finding{f}, nil
}

func (db *Provider) findSnapshots(ctx context.Context, l provider.DiagnosisLimits) (found []provider.Finding, err error) {
	const meaning = "PostgreSQL cannot remove rows that it might still see. Published entries and done tasks stay as dead rows, and scans past them become slow."
	var slots []provider.Finding
	var dead []provider.Fact
	b := &pgx.Batch{}
	queueAll(b, &found, func(row pgx.CollectableRow) (provider.Finding, error) {
		var s provider.Backend
		err := row.Scan(&s.Name, &s.Application, &s.User, &s.State, &s.Query, &s.Since, &s.End)
		f := provider.Finding{
			Check: provider.FindingSnapshot, Title: "An old transaction keeps dead rows: " + s.Name, Meaning: meaning, Remedy: []string{s.End}, Cause: s.Name,
			Facts: []provider.Fact{
				{Name: "application", Value: s.Application}, {Name: "user", Value: s.User}, {Name: "state", Value: s.State},
				{Name: "since", Value: s.Since.UTC().Format(time.RFC3339)},
			},
		}
		if s.Query != "" {
			f.Private = []provider.Fact{{Name: "query", Value: s.Query}}
		}
		return f, err
	}, snapshotsSQL, l.Snapshot.Microseconds())
	queueAll(b, &slots, func(row pgx.CollectableRow) (provider.Finding, error) {
		var name, age, end string
		err := row.Scan(&name, &age, &end)
		return provider.Finding{
			Check: provider.FindingSnapshot, Title: "A replication slot that nobody uses keeps dead rows: " + name, Meaning: meaning,
			Remedy: []string{end}, Facts: []provider.Fact{{Name: "transactions since", Value: age}},
		}, err
	}, slotsSQL)
	queueAll(b, &dead, pgx.RowToStructByPos[provider.Fact], deadRowsSQL, db.cfg.Schema)
	err = db.pool.SendBatch(ctx, b).Close()
	found = append(found, slots...)
	for i := range found {
		found[i].Facts = append(found[i].Facts, dead...)
	}
	return found, err
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
			if slices.Contains(forbidden, r) && (name != "kinora_archiver" || r != right{"delete", "events"}) || name == "public" && r.right != "select" {
				many = append(many, r.right+" on "+db.cfg.Schema+"."+r.table)
			}
		}
		for _, need := range roleNeeds[name] {
			if !slices.Contains(has[name], need) {
				few = append(few, need.right+" on "+db.cfg.Schema+"."+need.table)
			}
		}
		found = appendRights(found, name, many, "may do too much",
			"It can change what was recorded, or skip the rules of the tables.", "revoke", "from")
		found = appendRights(found, name, few, "lacks rights", "Services that log in with it refuse to start, or fail.", "grant", "to")
	}
	fault, err := db.check(ctx, provider.AnyService)
	people := []string{"kinora_operator", "kinora_archiver", "kinora_reader"} // they run no service
	if e, ok := errors.AsType[*RightsError](fault); ok && !slices.Contains(people, e.Role) && len(has[e.Role]) > 0 {
		found = appendRights(found, e.Role, e.Missing, "lacks rights", "A service that connects as this role refuses to start.", "grant", "to")
	}
	return found, err
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

const poolerLimit = 2 * time.Second // for one statement of a probe

// findPooler checks with its own connections whether prepared statements and LISTEN survive the end of a transaction.
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
	if err != nil || !loses {
		return nil, err
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
	for range 5 {
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
