package postgres

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/provider"
)

const (
	// The foreign keys of tables, whose names are in SQL, to each other.
	foreignKeysSQL = `
with t as (select n, to_regclass(n)::oid as id from unnest($1::text[]) n)
select quote_ident(c.conname), x.n, y.n, c.condeferrable, pg_has_role(k.relowner, 'usage'), c.confdeltype <> 'a'
from pg_constraint c join t x on x.id = c.conrelid join t y on y.id = c.confrelid join pg_class k on k.oid = c.conrelid
where c.contype = 'f' and c.conparentid = 0 order by x.n, c.conname`

	// Foreign keys that the tables $1 of a new generation do not allow. Their names without a number are those of the views.
	createdSQL = `
with t as (
	select c.oid, c.relnamespace, regexp_replace(c.relname, '_g[0-9]+$', '') as plain
	from unnest($1::text[]) n join pg_class c on c.oid = to_regclass(n)),
k as (
	select x.oid as child, y.oid as parent, x.oid in (select oid from t) as isnew, y.oid in (select oid from t) as tonew,
		(x.relnamespace, regexp_replace(x.relname, '_g[0-9]+$', '')) in (select relnamespace, plain from t) as isours,
		(y.relnamespace, regexp_replace(y.relname, '_g[0-9]+$', '')) in (select relnamespace, plain from t) as toours,
		(y.relnamespace, y.relname::text) in (select relnamespace, plain from t) as toplain
	from pg_constraint k join pg_class x on x.oid = coalesce(pg_partition_root(k.conrelid)::oid, k.conrelid) join pg_class y on y.oid = k.confrelid
	where k.contype = 'f' and k.conparentid = 0)
select child::regclass::text, parent::regclass::text, case
	when isnew then 'it is of another generation: use projector.Table'
	when tonew then 'add the first one to Options.Tables'
	else 'it is to be replaced by a view: remove the foreign key' end
from k where isnew and toours and not tonew or tonew and not isnew or toplain and not isours
limit 1`

	// Foreign keys of other tables to the tables $1.
	fromOthersSQL = `
with t as (select to_regclass(n)::oid as id from unnest($1::text[]) n)
select k.conrelid::regclass::text, k.confrelid::regclass::text, 'it is to be replaced by a view: remove the foreign key' from pg_constraint k
where k.contype = 'f' and k.conparentid = 0 and k.confrelid in (select id from t)
	and not exists (select from t where id = k.conrelid)
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
	renamed := mapSlice(w.Switch.Rename, func(p *provider.TablePair) string { return quoted(p.Table) })
	for _, check := range []struct {
		sql    string
		tables []string
	}{
		{createdSQL, mapSlice(w.Switch.Create, func(name *string) string { return quoted(*name) })},
		{fromOthersSQL, renamed},
	} {
		if len(check.tables) == 0 {
			continue
		}
		found, err := collect(ctx, tx, pgx.RowToStructByPos[struct{ From, To, Why string }], check.sql, planned, check.tables)
		if err != nil {
			return ofTables(ctx, wrap("look up foreign keys", err))
		}
		if len(found) > 0 {
			return &provider.Error{Class: provider.ClassPermanent, Code: provider.CodeReferenced,
				Err: fmt.Errorf("%w: table %s has a foreign key to %s: %s", provider.ErrInput, found[0].From, found[0].To, found[0].Why)}
		}
	}
	return nil
}

// referenced gives an error its code if a table cannot be emptied or dropped because of others.
func referenced(err error) error {
	if e := pgError(err); e != nil && e.Detail != "" && (e.Code == dependentObjects || e.Code == notSupported) {
		return &provider.Error{Class: provider.ClassPermanent, Code: provider.CodeReferenced, Err: fmt.Errorf("%w (%s)", err, e.Detail)}
	}
	return err
}
