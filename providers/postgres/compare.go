package postgres

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/provider"
)

// The columns that both tables have, in the order of the second one, as commonColumn has them:
// AInKey and BInKey are the places of a column in the primary keys, and AKey and BKey the numbers of
// columns of these.
const commonColumnsSQL = `
with t as (select to_regclass($1::text)::oid as a, to_regclass($2::text)::oid as b),
k as (
	select i.indrelid, u.attnum, u.o from t, pg_index i, unnest(i.indkey::smallint[]) with ordinality u(attnum, o)
	where i.indisprimary and i.indrelid in (t.a, t.b) and u.o <= i.indnkeyatts)
select y.attname::text, format_type(y.atttypid, y.atttypmod),
	coalesce((select o from k where indrelid = t.a and attnum = x.attnum), 0), (select count(*) from k where indrelid = t.a),
	coalesce((select o from k where indrelid = t.b and attnum = y.attnum), 0), (select count(*) from k where indrelid = t.b),
	(x.atttypid, x.attcollation) = (y.atttypid, y.attcollation),
	x.atttypid = y.atttypid and (select n.typtype = 'e' or exists (
		select from pg_opclass o join pg_am m on m.oid = o.opcmethod
		where m.amname = 'btree' and o.opcdefault and o.opcintype = n.oid) from pg_type n where n.oid = y.atttypid),
	x.attcollation <> 0 and y.attcollation <> 0, x.atttypid = 'json'::regtype and y.atttypid = 'json'::regtype,
	y.attgenerated <> '', y.attidentity = 'a'
from t join pg_attribute x on x.attrelid = t.a join pg_attribute y on y.attrelid = t.b and y.attname = x.attname
where x.attnum > 0 and y.attnum > 0 and not x.attisdropped and not y.attisdropped
order by y.attnum`

// commonColumn is a column that both tables have.
type commonColumn struct {
	Name, Type                 string // Type is that of Other, in SQL
	AInKey, AKey, BInKey, BKey int
	Same                       bool // the types and the collations are the same
	Equal                      bool // the types are the same, and have an equality
	Text                       bool // both have a collation
	JSON                       bool // both are of type json, which has no equality
	Generated, Always          bool // in Other; Always: its identity cannot be updated
}

func (c *commonColumn) of(row string) string { return row + "." + pgx.Identifier{c.Name}.Sanitize() }

// differs returns a condition: the values differ. Texts are compared by their bytes.
func (c *commonColumn) differs(a, b string) string {
	a, b = c.of(a), c.of(b)
	switch {
	case c.Text:
		a, b = a+`::text collate "C"`, b+`::text collate "C"`
	case c.JSON:
		a, b = a+`::text`, b+`::text`
	case !c.Equal:
		a, b = `to_jsonb(`+a+`)`, `to_jsonb(`+b+`)`
	}
	return a + ` is distinct from ` + b
}

// equals returns a condition on a column of a key, which an index can evaluate.
func (c *commonColumn) equals(a, b string) string {
	if a, b = c.of(a), c.of(b); !c.Same {
		a, b = `to_jsonb(`+a+`)`, `to_jsonb(`+b+`)`
	}
	return a + ` = ` + b
}

// comparedTables are two tables to compare.
type comparedTables struct {
	provider.TablePair
	a, b    string         // in SQL; a is right
	all     []commonColumn // also those that are not compared
	columns []commonColumn // that are compared, and those of the key
	key     []commonColumn // none: rows are compared as a whole
	only    *string        // keys as JSON; nil means all rows
	found   []provider.Difference
}

func (w *unit) compare(ctx context.Context, tx pgx.Tx, c *provider.Comparison) error {
	all := make([]*comparedTables, len(c.Pairs))
	for i, p := range c.Pairs {
		var err error
		if all[i], err = readTables(ctx, tx, p, c); err != nil {
			return ofTables(ctx, wrap("compare "+p.Other+" with "+p.Table, err))
		}
	}
	ordered := slices.SortedStableFunc(slices.Values(all), func(a, b *comparedTables) int { return cmp.Compare(a.Other, b.Other) })
	var found []provider.Difference
	for _, t := range ordered {
		if len(found) == c.Limit {
			break
		}
		var err error
		if t.found, err = t.differences(ctx, tx, c.Limit-len(found)); err != nil {
			return ofTables(ctx, wrap("compare "+t.Other+" with "+t.Table, err))
		}
		found = append(found, t.found...)
	}
	if c.Repair && len(found) > 0 {
		if err := w.repair(ctx, tx, all); err != nil {
			return ofTables(ctx, err)
		}
	}
	c.Found(found)
	return nil
}

func readTables(ctx context.Context, tx pgx.Tx, p provider.TablePair, c *provider.Comparison) (*comparedTables, error) {
	t := &comparedTables{TablePair: p, a: quoted(p.Table), b: quoted(p.Other)}
	var err error
	t.all, err = collect(ctx, tx, pgx.RowToStructByPos[commonColumn], commonColumnsSQL, planned, t.a, t.b)
	if err != nil {
		return nil, err
	}
	t.key = keyOf(t.all, func(c *commonColumn) (place, of int) { return c.BInKey, c.BKey })
	if t.key == nil {
		t.key = keyOf(t.all, func(c *commonColumn) (place, of int) { return c.AInKey, c.AKey })
	}
	for _, column := range t.all {
		if !slices.Contains(c.Ignore, column.Name) || t.isKey(column) {
			t.columns = append(t.columns, column)
		}
	}
	if len(t.columns) == 0 {
		return nil, fmt.Errorf("%w: both tables must exist, and have a column in common that is compared", provider.ErrInput)
	}
	if c.Only != nil {
		keys := []json.RawMessage{}
		for _, d := range c.Only {
			if d.Table == p.Other {
				keys = append(keys, d.Key)
			}
		}
		t.only, err = jsonText(keys)
	}
	return t, err
}

func (t *comparedTables) isKey(c commonColumn) bool {
	return slices.ContainsFunc(t.key, func(k commonColumn) bool { return k.Name == c.Name })
}

// keyOf returns the columns of a primary key, or nil unless the tables have all of them in common.
func keyOf(columns []commonColumn, place func(*commonColumn) (place, of int)) (key []commonColumn) {
	of := 0
	for i := range columns {
		if at, n := place(&columns[i]); at > 0 {
			key, of = append(key, columns[i]), n
		}
	}
	if len(key) < of {
		return nil
	}
	slices.SortFunc(key, func(a, b commonColumn) int {
		x, _ := place(&a)
		y, _ := place(&b)
		return cmp.Compare(x, y)
	})
	return key
}

func jsonText(v any) (*string, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("%w: a key must be a JSON object: %w", provider.ErrInput, err)
	}
	s := string(text)
	return &s, nil
}

// object returns an SQL expression of type json: an object of columns of a row.
func object(columns []commonColumn, row string) string {
	return `(select row_to_json(o) from (select ` + list(columns, ", ", func(c *commonColumn) string { return c.of(row) }) + `) o)`
}

func list(columns []commonColumn, separator string, of func(*commonColumn) string) string {
	return strings.Join(mapSlice(columns, of), separator)
}

// matches returns a condition: the rows have the same key.
func (t *comparedTables) matches(a, b string) string {
	return list(t.key, " and ", func(c *commonColumn) string { return c.equals(a, b) })
}

// keys returns an SQL relation of the keys in a parameter.
func (t *comparedTables) keys(parameter string) string {
	return `json_to_recordset(` + parameter + `::text::json) as k(` +
		list(t.key, ", ", func(c *commonColumn) string { return pgx.Identifier{c.Name}.Sanitize() + " " + c.Type }) + `)`
}

// differences returns the first differences in order of the key.
func (t *comparedTables) differences(ctx context.Context, tx pgx.Tx, limit int) ([]provider.Difference, error) {
	sql := t.keyedSQL()
	if t.key == nil {
		sql = t.keylessSQL()
	}
	return collect(ctx, tx, into(func(d *provider.Difference) []any {
		d.Table = t.Other
		return []any{(*[]byte)(&d.Key), (*[]byte)(&d.Want), (*[]byte)(&d.Got)}
	}), sql, planned, limit, t.only)
}

func (t *comparedTables) keyedSQL() string {
	rows := func(table string) string {
		return `(select true as " row", r.* from ` + table + ` r where $2::text is null)`
	}
	if t.only != nil {
		rows = func(table string) string {
			return `(select true as " row", r.* from ` + table + ` r where exists (select from ` + t.keys("$2") + ` where ` + t.matches("k", "r") + `))`
		}
	}
	either := func(c *commonColumn) string { return c.of("a") + `, ` + c.of("b") }
	return `
select (select row_to_json(o) from (select ` + list(t.key, ", ", func(c *commonColumn) string {
		return `coalesce(` + either(c) + `) as ` + pgx.Identifier{c.Name}.Sanitize()
	}) + `) o), case when a." row" then ` + object(t.all, "a") + ` end, case when b." row" then ` + object(t.all, "b") + ` end
from ` + rows(t.a) + ` a full join ` + rows(t.b) + ` b on ` + t.matches("a", "b") + `
where a." row" is null or b." row" is null or ` + list(t.columns, " or ", func(c *commonColumn) string { return c.differs("a", "b") }) + `
order by ` + list(t.key, ", ", func(c *commonColumn) string {
		if c.Text {
			return `coalesce(` + c.of("a") + `::text, ` + c.of("b") + `::text) collate "C"`
		}
		return `coalesce(` + either(c) + `)`
	}) + ` limit $1::bigint`
}

// keylessSQL returns one row for each row that is in only one of the tables, as often as it is.
func (t *comparedTables) keylessSQL() string {
	counted := func(table string) string {
		return `(select o::jsonb as o, count(*) as n from (select ` + object(t.columns, "r") + ` as o from ` + table + ` r) r
	where $2::text is null or o::jsonb in (select jsonb_array_elements($2::text::jsonb)) group by 1)`
	}
	return `
select o, case when n > 0 then o end, case when n < 0 then o end
from (select o, coalesce(a.n, 0) - coalesce(b.n, 0) as n from ` + counted(t.a) + ` a full join ` + counted(t.b) + ` b using (o)) d, generate_series(1, abs(n))
where n <> 0 order by o limit $1::bigint`
}

// repair changes the differing rows. Foreign keys are checked at its end. Rows are deleted first: they may have unique values
// of rows to insert. If a delete would change or delete rows that refer to the deleted ones, or fail because of them, it comes
// last: then only rows that are deleted too refer to them.
func (w *unit) repair(ctx context.Context, tx pgx.Tx, all []*comparedTables) error {
	keys, err := collect(ctx, tx, pgx.RowToStructByPos[foreignKey], foreignKeysSQL, planned, mapSlice(all, func(t **comparedTables) string { return (*t).b }))
	if err != nil {
		return wrap("look up foreign keys", err)
	}
	all = check.ParentsFirst(all, func(child, parent *comparedTables) bool {
		return slices.ContainsFunc(keys, func(k foreignKey) bool { return k.Table == child.b && k.To == parent.b })
	})
	if err := w.exec(ctx, tx, append(alterConstraints(keys, "deferrable"), `set constraints all deferred`)...); err != nil {
		return err
	}
	remove := func(isLast bool) error {
		for _, t := range slices.Backward(all) {
			if isLast == slices.ContainsFunc(keys, func(k foreignKey) bool { return k.To == t.b && (k.Acts || !k.Deferrable && !k.Owned) }) {
				if err := w.change(ctx, tx, t, t.deleteSQL(), func(d *provider.Difference) bool { return d.Want == nil }); err != nil {
					return err
				}
			}
		}
		return nil
	}
	if err := remove(false); err != nil {
		return err
	}
	for _, t := range all {
		err := w.change(ctx, tx, t, t.updateSQL(), func(d *provider.Difference) bool { return d.Want != nil && d.Got != nil })
		if err == nil {
			err = w.change(ctx, tx, t, t.insertSQL(), func(d *provider.Difference) bool { return d.Got == nil })
		}
		if err != nil {
			return err
		}
	}
	if err := remove(true); err != nil {
		return err
	}
	return w.exec(ctx, tx, append([]string{`set constraints all immediate`}, alterConstraints(keys, "not deferrable")...)...)
}

// alterConstraints returns statements that make foreign keys deferrable that are not, or these not deferrable again. They lock
// out other writers, and no readers.
func alterConstraints(keys []foreignKey, to string) (statements []string) {
	for _, k := range keys {
		if !k.Deferrable && k.Owned {
			statements = append(statements, `alter table `+k.Table+` alter constraint `+k.Name+` `+to)
		}
	}
	return statements
}

// change runs a statement, unless it is empty, with the keys of these differences. Without a primary key it runs it for each
// of them, because a row may be missing or extra several times.
func (w *unit) change(ctx context.Context, tx pgx.Tx, t *comparedTables, sql string, is func(*provider.Difference) bool) error {
	if sql == "" {
		return nil
	}
	var keys []json.RawMessage
	for i := range t.found {
		if is(&t.found[i]) {
			keys = append(keys, t.found[i].Key)
		}
	}
	size := max(len(keys), 1)
	if t.key == nil {
		size = 1
	}
	for part := range slices.Chunk(keys, size) {
		text, err := jsonText(part)
		if err == nil {
			err = w.execWith(ctx, tx, sql, planned, text)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// isRow returns a condition: a row as a whole is the one of the keys.
func (t *comparedTables) isRow() string {
	return object(t.columns, "r") + `::jsonb = $1::text::jsonb -> 0`
}

func (t *comparedTables) deleteSQL() string {
	if t.key == nil {
		return `delete from ` + t.b + ` where (tableoid, ctid) = (select tableoid, ctid from ` + t.b + ` r where ` + t.isRow() + ` limit 1)`
	}
	return `delete from ` + t.b + ` b using ` + t.keys("$1") + ` where ` + t.matches("k", "b")
}

// insertSQL sets all common columns, also those that are not compared.
func (t *comparedTables) insertSQL() string {
	columns := slices.DeleteFunc(slices.Clone(t.all), func(c commonColumn) bool { return c.Generated })
	from := `, ` + t.keys("$1") + ` where ` + t.matches("k", "r")
	if t.key == nil {
		from = ` where ` + t.isRow() + ` limit 1`
	}
	return `insert into ` + t.b + ` (` + list(columns, ", ", func(c *commonColumn) string { return pgx.Identifier{c.Name}.Sanitize() }) +
		`) overriding system value select ` + list(columns, ", ", func(c *commonColumn) string { return c.of("r") }) + ` from ` + t.a + ` r` + from
}

// updateSQL returns the empty string if there is no column to set.
func (t *comparedTables) updateSQL() string {
	columns := slices.DeleteFunc(slices.Clone(t.columns), func(c commonColumn) bool {
		return c.Generated || c.Always || t.isKey(c)
	})
	if len(columns) == 0 {
		return ""
	}
	return `update ` + t.b + ` b set ` + list(columns, ", ", func(c *commonColumn) string { return pgx.Identifier{c.Name}.Sanitize() + ` = ` + c.of("r") }) +
		` from ` + t.a + ` r, ` + t.keys("$1") + ` where ` + t.matches("k", "r") + ` and ` + t.matches("k", "b")
}
