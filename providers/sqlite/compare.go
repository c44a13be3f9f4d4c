package sqlite

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/provider"
)

// compared is a pair of tables, and the columns that both have.
type compared struct {
	right, other tableName
	key          []string // columns that identify a row
	isKey        bool     // key is a primary key; otherwise it is all columns that are compared
	values       []string // the other columns that are compared
	all          []string // the columns of Want and Got
	written      []string // those of all that are not generated
	found        []provider.Difference
}

// compare finds the differences and, with Repair, removes them.
func (u *unit) compare(ctx context.Context, c *provider.Comparison) error {
	var all []*compared
	var found []provider.Difference
	pairs := slices.SortedFunc(slices.Values(c.Pairs), func(a, b provider.TablePair) int { return strings.Compare(a.Other, b.Other) })
	for _, p := range pairs {
		is, err := u.columnsOf(ctx, p, c.Ignore)
		if err == nil {
			is.found, err = u.differences(ctx, p, is, c, c.Limit-len(found))
		}
		if err != nil {
			return wrap(fmt.Sprintf("compare %s with %s", p.Other, p.Table), err)
		}
		all, found = append(all, is), append(found, is.found...)
	}
	if c.Repair && len(found) > 0 {
		if err := u.repair(ctx, all); err != nil {
			return err
		}
	}
	c.Found(found)
	return nil
}

const listColumns = `select name, pk, hidden > 0 from pragma_table_xinfo(?1, ?2) where hidden <> 1 order by cid`

type columnInfo struct {
	name      string
	key       int // its place in the primary key, from 1; 0 if it is not in it
	generated bool
}

func (u *unit) columnInfos(ctx context.Context, t tableName) (all []columnInfo, err error) {
	all, err = rowsOf(ctx, u, func(c *columnInfo) []any { return []any{&c.name, &c.key, &c.generated} }, listColumns, t.name, t.schema)
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("%w: no table %s", provider.ErrInput, t)
	}
	return all, err
}

// columnsOf returns the columns that both tables of p have. Those of the primary key are never ignored.
func (u *unit) columnsOf(ctx context.Context, p provider.TablePair, ignore []string) (*compared, error) {
	is := &compared{right: tableOf(p.Table), other: tableOf(p.Other)}
	right, err := u.columnInfos(ctx, is.right)
	other, failed := u.columnInfos(ctx, is.other)
	if err = cmp.Or(err, failed); err != nil {
		return nil, err
	}
	is.key = keyIn(right, other)
	if len(is.key) == 0 {
		is.key = keyIn(other, right) // one of them may be a view, which has no key
	}
	is.isKey = len(is.key) > 0
	for _, c := range right {
		at := slices.IndexFunc(other, func(o columnInfo) bool { return o.name == c.name })
		if at < 0 {
			continue
		}
		if is.all = append(is.all, c.name); !other[at].generated {
			is.written = append(is.written, c.name)
		}
		switch isKey := slices.Contains(is.key, c.name); {
		case isKey || slices.Contains(ignore, c.name):
		case is.isKey:
			is.values = append(is.values, c.name)
		default:
			is.key = append(is.key, c.name)
		}
	}
	if len(is.key) == 0 {
		return nil, fmt.Errorf("%w: they have no columns in common to compare", provider.ErrInput)
	}
	return is, nil
}

// keyIn returns the primary key of a table, if the other table has its columns.
func keyIn(table, other []columnInfo) (key []string) {
	inOrder := slices.SortedFunc(slices.Values(table), func(a, b columnInfo) int { return cmp.Compare(a.key, b.key) })
	for _, c := range inOrder {
		if c.key == 0 {
			continue
		}
		if !slices.ContainsFunc(other, func(o columnInfo) bool { return o.name == c.name }) {
			return nil
		}
		key = append(key, c.name)
	}
	return key
}

// differences returns at most limit rows that differ, in the order of their keys, or that of Only.
func (u *unit) differences(ctx context.Context, p provider.TablePair, is *compared, c *provider.Comparison, limit int) (found []provider.Difference, err error) {
	if c.Only == nil {
		return u.differ(ctx, p, is.query("true", limit))
	}
	seen := map[string]bool{}
	for _, o := range c.Only {
		key := string(check.ComparableJSON(o.Key))
		where, args, ok := is.where(o.Key)
		if o.Table != p.Other || !ok || seen[key] || len(found) == limit {
			continue
		}
		seen[key] = true
		more, err := u.differ(ctx, p, is.query(where, 1), args...)
		if err != nil {
			return nil, err
		}
		found = append(found, more...)
	}
	return found, nil
}

func (u *unit) differ(ctx context.Context, p provider.TablePair, query string, args ...any) (found []provider.Difference, err error) {
	return rowsOf(ctx, u, func(d *provider.Difference) []any {
		d.Table = p.Other
		return []any{(*[]byte)(&d.Key), (*[]byte)(&d.Want), (*[]byte)(&d.Got)}
	}, query, args...)
}

// query selects the key and both rows of at most limit rows that differ and match a condition.
func (is *compared) query(where string, limit int) string {
	right, other, names := is.right.sql(), is.other.sql(), join(is.key, nameSQL, ", ")
	if !is.isKey { // rows may be there several times
		return fmt.Sprintf(`
with kinora_both as (
	select %[1]s, 1 as kinora_right, 0 as kinora_other from %[2]s where %[4]s
	union all select %[1]s, 0, 1 from %[3]s where %[4]s),
kinora_counts as (
	select %[1]s, sum(kinora_right) - sum(kinora_other) as kinora_more from kinora_both
	group by %[1]s having sum(kinora_right) <> sum(kinora_other))
select %[5]s, iif(kinora_more > 0, %[5]s, null), iif(kinora_more < 0, %[5]s, null) from kinora_counts
order by %[1]s limit %[6]d`, names, right, other, where, objectSQL("", is.key), limit)
	}
	in := func(alias string) func(string) string {
		return func(name string) string { return alias + nameSQL(name) }
	}
	same := join(is.key, func(name string) string { return "r." + nameSQL(name) + " is o." + nameSQL(name) }, " and ")
	differs := join(is.values, func(name string) string { return "r." + nameSQL(name) + " is not o." + nameSQL(name) }, " or ")
	return fmt.Sprintf(`
with kinora_found (kinora_key, kinora_right, kinora_other, %[1]s) as (
	select %[8]s, %[10]s, null, %[6]s from %[2]s r where %[4]s and not exists (select 1 from %[3]s o where %[12]s)
	union all
	select %[8]s, %[10]s, %[11]s, %[6]s from (select * from %[2]s where %[4]s) r join %[3]s o on %[12]s where %[13]s
	union all
	select %[9]s, null, %[11]s, %[7]s from %[3]s o where %[4]s and not exists (select 1 from %[2]s r where %[12]s))
select kinora_key, kinora_right, kinora_other from kinora_found order by %[1]s limit %[5]d`,
		names, right, other, where, limit, join(is.key, in("r."), ", "), join(is.key, in("o."), ", "),
		objectSQL("r.", is.key), objectSQL("o.", is.key), objectSQL("r.", is.all), objectSQL("o.", is.all), same, cmp.Or(differs, "false"))
}

// where returns a condition for the row with a key. ok is false if the key lacks a column.
func (is *compared) where(key json.RawMessage) (where string, args []any, ok bool) {
	var values map[string]any
	decoder := json.NewDecoder(bytes.NewReader(key))
	decoder.UseNumber()
	if decoder.Decode(&values) != nil {
		return "", nil, false
	}
	conditions := make([]string, len(is.key))
	for i, name := range is.key {
		v, has := values[name]
		if !has {
			return "", nil, false
		}
		conditions[i] = fmt.Sprintf("%s is ?%d", nameSQL(name), i+1)
		switch v := v.(type) {
		case json.Number:
			if n, err := v.Int64(); err == nil {
				args = append(args, n)
			} else {
				f, _ := v.Float64()
				args = append(args, f)
			}
		case string:
			if strings.HasPrefix(v, `\x`) { // it may be a blob
				conditions[i] = fmt.Sprintf("(%[1]s is ?%[2]d or %[1]s = unhex(substr(?%[2]d, 3)))", nameSQL(name), i+1)
			}
			args = append(args, v)
		default:
			args = append(args, v)
		}
	}
	return strings.Join(conditions, " and "), args, true
}

// repair makes rows of the other tables equal to those of the right ones. Rows are deleted first: they may have unique values
// of rows to insert. If a delete would change or delete rows that refer to the deleted ones, or fail because of them, it comes
// last: then only rows that are deleted too refer to them.
func (u *unit) repair(ctx context.Context, all []*compared) error {
	references, err := u.references(ctx)
	if err != nil {
		return err
	}
	if _, err := u.tx.ExecContext(ctx, deferForeignKeys); err != nil {
		return err
	}
	all = parentsFirst(references, all, func(is *compared) tableName { return is.other })
	last := map[*compared]bool{}
	for _, is := range all {
		i := slices.IndexFunc(references, func(r reference) bool { return r.acts && r.to.is(is.other) })
		if last[is] = i >= 0; last[is] && !is.isKey && len(is.found) > 0 {
			return referenced(references[i], "without a primary key, its rows cannot be repaired next to this foreign key: use NO ACTION")
		}
	}
	remove := func(isLast bool) (err error) {
		for _, is := range slices.Backward(all) {
			if err == nil && last[is] == isLast {
				err = u.repairRows(ctx, is, `delete from %[2]s where %[3]s`, func(d provider.Difference) bool { return !is.isKey || d.Want == nil })
			}
		}
		return err
	}
	err = remove(false)
	for _, is := range all {
		if err == nil {
			err = u.repairRows(ctx, is, `update %[2]s set (%[5]s) = (select %[5]s from %[1]s where %[3]s) where %[3]s`, func(d provider.Difference) bool {
				return is.isKey && d.Want != nil && d.Got != nil && len(is.changed()) > 0
			})
		}
		if err == nil {
			err = u.repairRows(ctx, is, `insert into %[2]s (%[4]s) select %[4]s from %[1]s where %[3]s`, func(d provider.Difference) bool { return !is.isKey || d.Got == nil })
		}
	}
	if err == nil {
		err = remove(true)
	}
	return err
}

// changed returns the columns that an update sets.
func (is *compared) changed() []string {
	return slices.DeleteFunc(slices.Clone(is.values), func(name string) bool { return !slices.Contains(is.written, name) })
}

// repairRows runs a statement for each of these differences.
func (u *unit) repairRows(ctx context.Context, is *compared, query string, isFor func(provider.Difference) bool) error {
	for _, d := range is.found {
		if !isFor(d) {
			continue
		}
		where, args, _ := is.where(d.Key)
		query := fmt.Sprintf(query, is.right.sql(), is.other.sql(), where, join(is.written, nameSQL, ", "), join(is.changed(), nameSQL, ", "))
		if _, err := u.tx.ExecContext(ctx, query, args...); err != nil {
			return fmt.Errorf("repair %s %s: %w", is.other.name, d.Key, err)
		}
	}
	return nil
}

// join joins the names of columns, each as fn writes it.
func join(names []string, fn func(string) string, separator string) string {
	return strings.Join(mapSlice(names, fn), separator)
}

// objectSQL is an expression for a JSON object of columns.
func objectSQL(alias string, names []string) string {
	return "json_object(" + join(names, func(name string) string {
		return textSQL(name) + ", " + valueSQL(alias+nameSQL(name))
	}, ", ") + ")"
}
