package postgres

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/projector"
)

const (
	keyColumnsSQL = `
select coalesce(array_agg(quote_ident(a.attname) order by k.o), '{}')
from pg_index i, unnest(i.indkey::smallint[]) with ordinality k(attnum, o), pg_attribute a
where i.indrelid = $1::bigint::oid and i.indisprimary and a.attrelid = i.indrelid and a.attnum = k.attnum and k.o <= i.indnkeyatts`

	rowSecuritySQL = `select row_security_active($1::bigint::oid)`

	isThereSQL = `select exists (select from pg_class where oid = $1::bigint::oid)`

	// Tables that nobody else can look into. One of the handler's own making is among them.
	lockedTablesSQL = `
select c.oid::bigint, c.oid::regclass::text from pg_locks l join pg_class c on c.oid = l.relation
where l.pid = pg_backend_pid() and l.locktype = 'relation' and l.mode = 'AccessExclusiveLock' and c.relkind in ('r', 'p') and c.relpersistence <> 't'`
)

// rehearsal looks at a transaction from inside and from outside.
type rehearsal struct {
	tx, outside pgx.Tx
	xid         string
}

// version is a version of a row. Its key is a JSON array, empty where the table has none.
type version struct{ at, key, row string }

func (v *version) json() json.RawMessage {
	if v == nil {
		return nil
	}
	return json.RawMessage(v.row)
}

// views is a table as statements have it.
type views struct {
	changed
	key []string
}

func (v views) columns(of string) string { return of + "." + strings.Join(v.key, ", "+of+".") }

// rows reads versions. Those of tables that inherit are their own.
func (v views) rows() string {
	key := "''"
	if len(v.key) > 0 {
		key = "jsonb_build_array(" + v.columns("t") + ")"
	}
	return "select t.ctid::text, " + key + "::text, to_jsonb(t)::text from only " + v.name + " t"
}

// places reads where versions are.
func (v views) places() string { return "select t.ctid::text from only " + v.name + " t" }

// with are those that have the keys of these rows.
func (v views) with() string {
	return v.rows() + ", jsonb_populate_recordset(null::" + v.name + ", $1::jsonb) k where (" + v.columns("t") + ") = (" + v.columns("k") + ")"
}

const at = " where t.ctid = any($1::text[]::tid[])"

// What a transaction that is under way has written has its id ($1), or that of one of its savepoints: those are no older than it, and
// under way as well. A row's other id, of who deleted it, may stand for several lockers, and then says nothing: so where the rows
// found are not as many as the server counted, all rows are looked at.
const (
	writtenByUs = ` where case when age(t.xmin) <= ` + ageOfOurs + ` then ` + status + `age(t.xmin))::text::xid8) = 'in progress' else false end`
	deletedByUs = ` where case when t.xmax <> '0'::xid and age(t.xmax) > 0 and age(t.xmax) <= ` + ageOfOurs + `
		then ` + status + `age(t.xmax))::text::xid8) = 'in progress' else false end`
	ageOfOurs = `age($1::text::xid8::xid)`
	status    = `pg_xact_status(($1::text::bigint + ` + ageOfOurs + ` - `
)

// table is what changed in one.
func (r *rehearsal) table(ctx context.Context, c changed) ([]projector.Change, error) {
	for _, q := range []querier{r.tx, r.outside} {
		var active bool
		if err := q.QueryRow(ctx, rowSecuritySQL, c.relid).Scan(&active); err != nil {
			return nil, err
		}
		if active {
			return nil, refused("row_security", fmt.Errorf("row security is active on %s: what changed may be hidden", c.told))
		}
	}
	t := views{changed: c}
	if err := r.tx.QueryRow(ctx, keyColumnsSQL, c.relid).Scan(&t.key); err != nil {
		return nil, err
	}
	now, err := versions(ctx, r.tx, t.rows()+writtenByUs, r.xid)
	if err != nil {
		return nil, err
	}
	there, err := r.look(ctx, c.relid)
	if err != nil {
		return nil, err
	}
	if !there { // the handler made the table
		return told(t, nil, now), nil
	}
	was, err := r.gone(ctx, t, t.places()+deletedByUs, r.xid)
	if err != nil {
		return nil, err
	}
	if was, err = r.before(ctx, t, was, now); err != nil {
		return nil, err
	}
	if !adds(t, was, now) {
		if was, err = r.gone(ctx, t, t.places()); err != nil {
			return nil, err
		}
	}
	return told(t, was, now), nil
}

// look tells whether others see the table.
func (r *rehearsal) look(ctx context.Context, relid int64) (there bool, err error) {
	err = r.outside.QueryRow(ctx, isThereSQL, relid).Scan(&there)
	return there, err
}

// unlocked refuses what others cannot look into: a table that the handler has truncated, or altered.
func (r *rehearsal) unlocked(ctx context.Context) error {
	var relid int64
	var name string
	tables := map[int64]string{}
	rows, err := r.tx.Query(ctx, lockedTablesSQL)
	if err == nil {
		_, err = pgx.ForEachRow(rows, []any{&relid, &name}, func() error { tables[relid] = name; return nil })
	}
	if err != nil {
		return fmt.Errorf("look for locks: %w", err)
	}
	for relid, name := range tables {
		switch there, err := r.look(ctx, relid); {
		case err != nil:
			return err
		case there:
			return refused("locked", fmt.Errorf("the handler has locked %s as a whole, as by truncate: what was in it cannot be seen", name))
		}
	}
	return nil
}

// gone is what others see, of what find finds, and the transaction does not: it was there before, and is there after.
func (r *rehearsal) gone(ctx context.Context, t views, find string, args ...any) ([]version, error) {
	found, err := ctids(ctx, r.outside, find, args...)
	if err != nil || len(found) == 0 {
		return nil, err
	}
	seen, err := ctids(ctx, r.tx, t.places()+at, found)
	if err != nil {
		return nil, err
	}
	is := make(map[string]bool, len(seen))
	for _, at := range seen {
		is[at] = true
	}
	found = slices.DeleteFunc(found, func(at string) bool { return is[at] })
	if len(found) == 0 {
		return nil, nil
	}
	return versions(ctx, r.outside, t.rows()+at, found)
}

// before adds to was the old versions of rows that are there now, where it has none of them.
func (r *rehearsal) before(ctx context.Context, t views, was, now []version) ([]version, error) {
	if len(t.key) == 0 {
		return was, nil
	}
	keys := map[string]bool{}
	for _, v := range was {
		keys[v.key] = true
	}
	var rows []string
	for _, v := range now {
		if !keys[v.key] {
			rows = append(rows, v.row)
		}
	}
	if len(rows) == 0 {
		return was, nil
	}
	more, err := versions(ctx, r.outside, t.with(), "["+strings.Join(rows, ",")+"]")
	return append(was, more...), err
}

// adds tells whether what was found is as many as was counted. Where rows were changed twice, given other keys, or undone, it is not.
func adds(t views, was, now []version) bool {
	if len(t.key) == 0 {
		return int64(len(now)) == t.ins+t.upd && int64(len(was)) == t.del+t.upd
	}
	old := map[string]bool{}
	for _, v := range was {
		old[v.key] = true
	}
	changed := int64(0)
	for _, v := range now {
		if old[v.key] {
			changed++
		}
	}
	return int64(len(now))-changed == t.ins && int64(len(was))-changed == t.del
}

// told pairs versions of the same key. What is as it was is no change.
func told(t views, was, now []version) []projector.Change {
	type pair struct{ was, now *version }
	var pairs []*pair
	before := map[string][]*pair{}
	for i := range was {
		p := &pair{was: &was[i]}
		id := p.was.key
		if len(t.key) == 0 {
			id = p.was.row // only the very same is told to be the same
		}
		pairs, before[id] = append(pairs, p), append(before[id], p)
	}
	for i := range now {
		id := now[i].key
		if len(t.key) == 0 {
			id = now[i].row
		}
		if olds := before[id]; len(olds) > 0 {
			olds[0].now, before[id] = &now[i], olds[1:]
			continue
		}
		pairs = append(pairs, &pair{now: &now[i]})
	}
	pairs = slices.DeleteFunc(pairs, func(p *pair) bool { return p.was != nil && p.now != nil && p.was.row == p.now.row })
	place := func(p *pair) *version { return cmp.Or(p.now, p.was) }
	slices.SortStableFunc(pairs, func(a, b *pair) int {
		return cmp.Or(byKey(place(a).key, place(b).key), cmp.Compare(place(a).row, place(b).row))
	})
	var changes []projector.Change
	for _, p := range pairs {
		changes = append(changes, projector.Change{Table: t.told, Before: p.was.json(), After: p.now.json()})
	}
	return changes
}

// byKey compares JSON arrays, numbers as such and all else as text.
func byKey(a, b string) int {
	x, y := parts(a), parts(b)
	for i := range min(len(x), len(y)) {
		n, numberX := x[i].(json.Number)
		m, numberY := y[i].(json.Number)
		c := cmp.Compare(fmt.Sprint(x[i]), fmt.Sprint(y[i]))
		if numberX && numberY {
			f, _ := strconv.ParseFloat(n.String(), 64)
			g, _ := strconv.ParseFloat(m.String(), 64)
			c = cmp.Or(cmp.Compare(f, g), c)
		}
		if c != 0 {
			return c
		}
	}
	return 0
}

func parts(key string) (all []any) {
	d := json.NewDecoder(bytes.NewReader([]byte(key)))
	d.UseNumber()
	_ = d.Decode(&all)
	return all
}

func inOrder(counts map[int64]changed) []changed {
	return slices.SortedFunc(maps.Values(counts), func(a, b changed) int { return cmp.Compare(a.told, b.told) })
}

func ctids(ctx context.Context, q querier, sql string, args ...any) ([]string, error) {
	rows, err := q.Query(ctx, sql, append([]any{planned}, args...)...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func versions(ctx context.Context, q querier, sql string, args ...any) ([]version, error) {
	rows, err := q.Query(ctx, sql, append([]any{planned}, args...)...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (v version, err error) {
		err = row.Scan(&v.at, &v.key, &v.row)
		return v, err
	})
}
