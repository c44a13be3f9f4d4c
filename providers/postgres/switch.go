package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// These are the steps of a unit with Switch that other units do not have.

const (
	lockTimeoutSQL = `select set_config('lock_timeout', $1::text, true)`
	fenceTimeout   = "1s"
	// Less than deadlock_timeout, by default 1s: a reader that has locked another view or table of the
	// switch before must not get the error.
	tableTimeout = "300ms"

	relationSQL = `
select c.oid::bigint, c.relkind::text,
	case when c.relkind = 'v' then coalesce(' with (' || array_to_string(c.reloptions, ', ') || ')', '') else '' end,
	case when c.relkind = 'v' and c.relowner <> (select oid from pg_roles where rolname = current_user) then quote_ident(pg_get_userbyid(c.relowner)) else '' end
from pg_class c where c.oid = to_regclass($1::text)`

	// The statements that give the view $2 the grants of a view, or the rights to read a table.
	relationGrantsSQL = `
select g.attname, format('grant %s%s on %s to %s%s', g.privilege_type, ' (' || quote_ident(g.attname) || ')', $2::text,
	case g.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(g.grantee)) end, case when g.is_grantable then ' with grant option' end)
from (
	select a.privilege_type, a.grantee, a.is_grantable, null::text as attname, c.relkind from pg_class c, aclexplode(c.relacl) a where c.oid = $1::bigint
	union all
	select a.privilege_type, a.grantee, a.is_grantable, t.attname, c.relkind
	from pg_class c join pg_attribute t on t.attrelid = c.oid, aclexplode(t.attacl) a where c.oid = $1::bigint and not t.attisdropped) g
where g.relkind = 'v' or g.privilege_type = 'SELECT'`

	columnNamesSQL = `
select attname::text from pg_attribute where attrelid = to_regclass($1::text) and attnum > 0 and not attisdropped`

	// Whether a view can be replaced: the columns of the table begin with its columns.
	fitsSQL = `
select not exists (
	select row_number() over (order by attnum), attname, atttypid, atttypmod, attcollation
	from pg_attribute where attrelid = to_regclass($1::text) and attnum > 0 and not attisdropped
	except
	select row_number() over (order by attnum), attname, atttypid, atttypmod, attcollation
	from pg_attribute where attrelid = to_regclass($2::text) and attnum > 0 and not attisdropped)`
)

func (w *unit) isSnapshot() bool { return w.Switch != nil && w.Switch.Snapshot }

func invalidUnit(err error) error {
	return &provider.Error{Class: provider.ClassPermanent, Code: "invalid", Err: err}
}

var errFenced = &provider.Error{Class: provider.ClassTransient, Code: provider.CodeFenced, Err: provider.ErrFenced}

// busy gives an error of a lock that was not free within a second its code.
func busy(err error) error {
	if e := pgError(err); e != nil && e.Code == lockNotAvailable {
		return &provider.Error{Class: provider.ClassTransient, Code: provider.CodeBusy, Err: err}
	}
	return err
}

// beginSwitch begins the transaction and gets the messages of the unit. The transaction is not nil
// if it has begun, also with an error. Its first statement that reads takes the snapshot.
func (w *unit) beginSwitch(ctx context.Context, conn *pgx.Conn) (pgx.Tx, error) {
	level, sql := pgx.ReadCommitted, lockGenerationsSQL
	if w.isSnapshot() {
		level, sql = pgx.RepeatableRead, generationsSQL
	}
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	if err != nil {
		return nil, classifyOwn(ctx, wrap("begin the unit", err))
	}
	if !w.isSnapshot() {
		if _, err = tx.Exec(ctx, lockTimeoutSQL, fenceTimeout); err == nil {
			_, err = tx.Exec(ctx, exclusiveSQL, lockClassFence, w.db.fence(w.Projector))
		}
		if err != nil {
			return tx, ofSwitch(ctx, wrap("wait for the open units of the projector", err))
		}
	}
	all, err := collect(ctx, tx, into(generationColumns), w.db.q(sql), planned, w.Projector)
	if err != nil {
		return tx, ofSwitch(ctx, wrap("read the generations", err))
	}
	if err = w.OpenSwitch(ctx, all, func(ctx context.Context, b provider.Build) (live provider.Live, err error) {
		live.Unapplied = func(ctx context.Context, messages []provider.Message) ([]bool, error) {
			return w.db.unapplied(ctx, tx, b, messages)
		}
		live.Checkpoint, err = w.db.checkpoint(ctx, tx, b)
		return live, err
	}); err != nil {
		return tx, class(ofHandler(err))
	}
	w.Messages = withMarkerIDs(w.Messages)
	return tx, nil
}

// ofSwitch classes an error of a statement on the library's tables in a unit with Switch.
func ofSwitch(ctx context.Context, err error) error { return classifyOwn(ctx, busy(err)) }

// ofTables classes an error of a statement on tables of the read model.
func ofTables(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, provider.ErrInput):
		return invalidUnit(err)
	case ctx.Err() != nil && pgError(err) == nil:
		return classifyOwn(ctx, err)
	}
	return class(busy(err))
}

// reset empties tables.
func (w *unit) reset(ctx context.Context, tx pgx.Tx) error {
	if w.Switch == nil || len(w.Switch.Reset) == 0 {
		return nil
	}
	if err := w.lockTablesBriefly(ctx, tx); err != nil {
		return err
	}
	return referenced(w.exec(ctx, tx, `truncate table `+quoted(w.Switch.Reset...)))
}

// lockTablesBriefly limits how long the next statements wait for locks.
func (w *unit) lockTablesBriefly(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, lockTimeoutSQL, tableTimeout)
	return ofSwitch(ctx, wrap("set the lock timeout", err))
}

// exec runs statements that concern tables of the read model, one after another.
func (w *unit) exec(ctx context.Context, tx pgx.Tx, statements ...string) error {
	for _, sql := range statements {
		if err := w.execWith(ctx, tx, sql); err != nil {
			return err
		}
	}
	return nil
}

func (w *unit) execWith(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	crash.Point("switch unit: before")
	_, err := tx.Exec(ctx, sql, args...)
	crash.Point("switch unit: after")
	return ofTables(ctx, wrap(fmt.Sprintf("%.100s", sql), err))
}

// endSwitch does what follows the handlers. They must not have parked messages.
func (w *unit) endSwitch(ctx context.Context, tx pgx.Tx) error {
	if err := w.checkReferences(ctx, tx); err != nil {
		return err
	}
	if len(w.Switch.Rename)+len(w.Switch.Show) > 0 {
		if err := w.lockTablesBriefly(ctx, tx); err != nil {
			return err
		}
	}
	was := map[string]relation{} // the relations that have the names of views
	for _, p := range w.Switch.Show {
		var err error
		if was[p.Other], err = readRelation(ctx, tx, p.Other); err != nil {
			return err
		}
	}
	return w.Switch.Finish(provider.SwitchSteps{
		Rename:  func(p provider.TablePair) error { return w.rename(ctx, tx, p) },
		Show:    func(p provider.TablePair) error { return w.show(ctx, tx, p, was[p.Other]) },
		Compare: func(c *provider.Comparison) error { return w.compare(ctx, tx, c) },
		Set:     func(all []provider.Generation) error { return w.setGenerations(ctx, tx, all) },
	})
}

func (w *unit) setGenerations(ctx context.Context, tx pgx.Tx, all []provider.Generation) error {
	b := &pgx.Batch{}
	set := w.db.queueGenerations(b, all)
	crash.Point("switch unit: before")
	err := tx.SendBatch(ctx, b).Close()
	crash.Point("switch unit: after")
	if isSecond(err) || err == nil && slices.Contains(set, false) {
		return errFenced
	}
	return ofSwitch(ctx, wrap("set the generations", err))
}

// relation is a table or a view. The zero relation does not exist.
type relation struct {
	ID      int64
	Kind    string // of pg_class.relkind
	Options string // of a view, in SQL
	Owner   string // of a view, in SQL; empty if it is the current user
	grants  []grant
}

// grant is a statement that grants a right on a view, or on one of its columns.
type grant struct {
	Column *string
	SQL    string
}

// readRelation reads the relation with this name, and its grants.
func readRelation(ctx context.Context, tx pgx.Tx, name string) (r relation, err error) {
	columns := func(r *relation) []any { return []any{&r.ID, &r.Kind, &r.Options, &r.Owner} }
	found, err := collect(ctx, tx, into(columns), relationSQL, planned, quoted(name))
	if err == nil && len(found) > 0 {
		r = found[0]
		r.grants, err = collect(ctx, tx, pgx.RowToStructByPos[grant], relationGrantsSQL, planned, r.ID, quoted(name))
	}
	return r, ofTables(ctx, wrap("look up "+name, err))
}

func (w *unit) rename(ctx context.Context, tx pgx.Tx, p provider.TablePair) error {
	from, to := identifier(p.Table), identifier(p.Other)
	if len(to) > 1 && !slices.Equal(from[:len(from)-1], to[:1]) {
		return invalidUnit(fmt.Errorf("%w: switch.Rename: %q has another schema than %q: a table keeps its schema", provider.ErrInput, p.Other, p.Table))
	}
	is, err := readRelation(ctx, tx, p.Table)
	if err != nil || is.ID == 0 || is.Kind == "v" {
		return err
	}
	return w.exec(ctx, tx, `alter table `+quoted(p.Table)+` rename to `+to[len(to)-1:].Sanitize())
}

// show makes a view that shows a table. was is the relation that had the view's name before.
func (w *unit) show(ctx context.Context, tx pgx.Tx, p provider.TablePair, was relation) error {
	view, table, fits := quoted(p.Other), quoted(p.Table), false
	var statements []string
	if was.Kind == "v" {
		if err := tx.QueryRow(ctx, fitsSQL, planned, view, table).Scan(&fits); err != nil {
			return ofTables(ctx, wrap("look up "+p.Other, err))
		}
		if !fits {
			statements = append(statements, `drop view `+view)
		}
	}
	err := w.exec(ctx, tx, append(statements,
		`create or replace view `+view+was.Options+` as select * from `+table,
		`drop trigger if exists kinora_refuse_write on `+view,
		`create trigger kinora_refuse_write instead of insert or update or delete on `+view+
			` for each row execute function `+w.db.q(`kinora.refuse_write()`))...)
	if err != nil || fits { // a view that is replaced keeps its owner and its grants
		return err
	}
	columns, err := collect(ctx, tx, pgx.RowTo[string], columnNamesSQL, planned, view)
	if err != nil {
		return ofTables(ctx, err)
	}
	statements = nil
	for _, g := range was.grants {
		if g.Column == nil || slices.Contains(columns, *g.Column) {
			statements = append(statements, g.SQL)
		}
	}
	if was.Owner != "" {
		statements = append(statements, `alter view `+view+` owner to `+was.Owner)
	}
	return w.exec(ctx, tx, statements...)
}

// identifier splits the name of a table.
func identifier(name string) pgx.Identifier { return strings.Split(name, ".") }

// quoted returns names of tables in SQL.
func quoted(names ...string) string {
	return strings.Join(mapSlice(names, func(name *string) string { return identifier(*name).Sanitize() }), ", ")
}

const (
	// The foreign keys of tables, whose names are in SQL, to each other.
	foreignKeysSQL = `
with t as (select n, to_regclass(n)::oid as id from unnest($1::text[]) n)
select quote_ident(c.conname), x.n, y.n, c.condeferrable, pg_has_role(k.relowner, 'usage'), c.confdeltype <> 'a'
from pg_constraint c join t x on x.id = c.conrelid join t y on y.id = c.confrelid join pg_class k on k.oid = c.conrelid
where c.contype = 'f' and c.conparentid = 0 order by x.n, c.conname`

	// Foreign keys that the tables $1 of a new generation do not allow, and those of other tables to the tables $2. The names of
	// $1 without a number are those of the views.
	referencesSQL = `
with t as (select to_regclass(n)::oid as id from unnest($2::text[]) n),
g as (
	select c.oid, c.relnamespace, regexp_replace(c.relname, '_g[0-9]+$', '') as plain
	from unnest($1::text[]) n join pg_class c on c.oid = to_regclass(n)),
k as (
	select x.oid as child, y.oid as parent, x.oid in (select oid from g) as isnew, y.oid in (select oid from g) as tonew,
		(x.relnamespace, regexp_replace(x.relname, '_g[0-9]+$', '')) in (select relnamespace, plain from g) as isours,
		(y.relnamespace, regexp_replace(y.relname, '_g[0-9]+$', '')) in (select relnamespace, plain from g) as toours,
		(y.relnamespace, y.relname::text) in (select relnamespace, plain from g) as toplain,
		k.confrelid in (select id from t) and not exists (select from t where id = k.conrelid) as torenamed
	from pg_constraint k join pg_class x on x.oid = coalesce(pg_partition_root(k.conrelid)::oid, k.conrelid) join pg_class y on y.oid = k.confrelid
	where k.contype = 'f' and k.conparentid = 0)
select child::regclass::text, parent::regclass::text, case
	when isnew and toours and not tonew then 'it is of another generation: use projector.Table'
	when tonew and not isnew then 'add the first one to Options.Tables'
	else 'it is to be replaced by a view: remove the foreign key' end
from k where isnew and toours and not tonew or tonew and not isnew or toplain and not isours or torenamed
limit 1`
)

// foreignKey is a foreign key between two of the tables that are repaired. Names are in SQL.
type foreignKey struct {
	Name, Table, To   string
	Deferrable, Owned bool // Owned: the role may alter it
	Acts              bool // a delete of a row changes or deletes rows that refer to it, or fails at once
}

// checkReferences returns an error if foreign keys do not allow the tables to create and to rename.
func (w *unit) checkReferences(ctx context.Context, tx pgx.Tx) error {
	created := mapSlice(w.Switch.Create, func(name *string) string { return quoted(*name) })
	renamed := mapSlice(w.Switch.Rename, func(p *provider.TablePair) string { return quoted(p.Table) })
	if len(created)+len(renamed) == 0 {
		return nil
	}
	found, err := collect(ctx, tx, pgx.RowToStructByPos[struct{ From, To, Why string }], referencesSQL, planned, created, renamed)
	if err == nil && len(found) > 0 {
		return &provider.Error{Class: provider.ClassPermanent, Code: provider.CodeReferenced,
			Err: fmt.Errorf("%w: table %s has a foreign key to %s: %s", provider.ErrInput, found[0].From, found[0].To, found[0].Why)}
	}
	return ofTables(ctx, wrap("look up foreign keys", err))
}

// referenced gives an error its code if a table cannot be emptied or dropped because of others.
func referenced(err error) error {
	if e := pgError(err); e != nil && e.Detail != "" && (e.Code == dependentObjects || e.Code == notSupported) {
		return &provider.Error{Class: provider.ClassPermanent, Code: provider.CodeReferenced, Err: fmt.Errorf("%w (%s)", err, e.Detail)}
	}
	return err
}
