package sqlite

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
)

// form is how a table's rows are read.
type form struct {
	table   table
	columns []string
	keys    []int // columns of the primary key, in its order
	keyed   bool  // it has no rowid
	query   string
}

// columnsOf is empty for a table that is not there.
const columnsOf = `
select c.name, c.pk, coalesce((select t.wr from pragma_table_list t where t.schema = ?2 and t.name = ?1), 0)
from pragma_table_xinfo(?1, ?2) c where c.hidden <> 1 order by c.cid`

func (u *unit) form(ctx context.Context, at table) (form, error) {
	f := form{table: at}
	var selected []string
	places := map[int]int{}
	err := each(ctx, u, func(rows *sql.Rows) error {
		var name string
		var pk int
		if err := rows.Scan(&name, &pk, &f.keyed); err != nil {
			return err
		}
		if pk > 0 {
			places[pk] = len(f.columns)
		}
		f.columns = append(f.columns, name)
		selected = append(selected, "+"+quoted(name)) // without its type, the value is as it is stored
		return nil
	}, columnsOf, at.name, at.schema)
	if err != nil {
		return f, fmt.Errorf("read the columns of %s: %w", at, err)
	}
	for pk := range len(places) {
		f.keys = append(f.keys, places[pk+1])
	}
	if len(f.columns) > 0 {
		where, err := f.where()
		if err != nil {
			return f, err
		}
		f.query = `select ` + strings.Join(selected, ", ") + ` from ` + at.quoted() + ` where ` + where
	}
	return f, nil
}

func (f form) where() (string, error) {
	if f.keyed {
		var all []string
		for _, i := range f.keys {
			all = append(all, quoted(f.columns[i])+" = ?")
		}
		return strings.Join(all, " and "), nil
	}
	for _, rowid := range []string{"rowid", "_rowid_", "oid"} {
		if !slices.ContainsFunc(f.columns, func(c string) bool { return strings.EqualFold(c, rowid) }) {
			return rowid + " = ?", nil
		}
	}
	return "", fmt.Errorf("the columns of %s hide its rowid", f.table)
}

// keyOf is the primary key of a row.
func (f form) keyOf(values []any) []any {
	var key []any
	for _, i := range f.keys {
		key = append(key, values[i])
	}
	return key
}

// json is an object in the order of the columns. A blob is written as Postgres writes one; what JSON has no number for
// is a string.
func (r row) json() json.RawMessage {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, name := range r.columns {
		if i > 0 {
			b.WriteByte(',')
		}
		v := r.values[i]
		switch is := v.(type) {
		case []byte:
			v = fmt.Sprintf(`\x%x`, is)
		case float64:
			if math.IsInf(is, 0) {
				v = fmt.Sprint(is)
			}
		}
		b.WriteString(jsonOf(name) + ":" + jsonOf(v))
	}
	b.WriteByte('}')
	return b.Bytes()
}

// compareValues is SQLite's order: nulls, numbers, texts, blobs.
func compareValues(a, b any) int {
	if c := cmp.Compare(kindOf(a), kindOf(b)); c != 0 {
		return c
	}
	switch a := a.(type) {
	case int64:
		if b, ok := b.(int64); ok {
			return cmp.Compare(a, b)
		}
		return cmp.Compare(float64(a), b.(float64))
	case float64:
		if b, ok := b.(int64); ok {
			return cmp.Compare(a, float64(b))
		}
		return cmp.Compare(a, b.(float64))
	case string:
		return cmp.Compare(a, b.(string))
	case []byte:
		return bytes.Compare(a, b.([]byte))
	default:
		return 0
	}
}

func kindOf(v any) int {
	switch v.(type) {
	case nil:
		return 0
	case int64, float64:
		return 1
	case string:
		return 2
	default:
		return 3
	}
}
