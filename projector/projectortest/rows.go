package projectortest

import (
	"context"
	"database/sql/driver"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// cursor has the rows of a query: *sql.Rows or pgx.Rows.
type cursor interface {
	Next() bool
	Scan(dest ...any) error
	Err() error
}

// Rows runs a query, and returns its rows as text, with " | " between the columns:
//
//	projectortest.Rows(ctx, db.SQL().QueryContext, `select product, stars from ratings order by product`)
//	projectortest.Rows(ctx, db.Pool().Query, `select product, stars from ratings order by product`)
//
// The query should have an order. A null is "NULL", a time is in RFC 3339 and UTC, and bytes are hexadecimal
// unless they are text.
func Rows[C cursor](ctx context.Context, query func(context.Context, string, ...any) (C, error), text string, args ...any) ([]string, error) {
	rows, err := query(ctx, text, args...)
	if err != nil {
		return nil, err
	}
	defer closeRows(rows)
	var all []string
	for rows.Next() {
		values, err := valuesOf(rows)
		if err != nil {
			return nil, err
		}
		line := make([]string, len(values))
		for i, v := range values {
			line[i] = textOf(v)
		}
		all = append(all, strings.Join(line, " | "))
	}
	return all, rows.Err()
}

func closeRows(rows any) {
	switch r := rows.(type) {
	case interface{ Close() error }:
		_ = r.Close() // Err has returned what matters
	case interface{ Close() }:
		r.Close()
	}
}

// valuesOf returns the columns of the current row.
func valuesOf(rows cursor) ([]any, error) {
	if r, ok := rows.(interface{ Values() ([]any, error) }); ok { // pgx.Rows
		return r.Values()
	}
	r, ok := rows.(interface{ Columns() ([]string, error) })
	if !ok {
		return nil, fmt.Errorf("rows of type %T: want *sql.Rows or pgx.Rows", rows)
	}
	names, err := r.Columns()
	if err != nil {
		return nil, err
	}
	values, at := make([]any, len(names)), make([]any, len(names))
	for i := range values {
		at[i] = &values[i]
	}
	return values, rows.Scan(at...)
}

func textOf(v any) string {
	if d, ok := v.(driver.Valuer); ok { // such as a numeric of pgx
		if value, err := d.Value(); err == nil {
			v = value
		}
	}
	switch v := v.(type) {
	case nil:
		return "NULL"
	case time.Time:
		return v.UTC().Format(time.RFC3339Nano)
	case []byte:
		if isText(v) {
			return string(v)
		}
		return fmt.Sprintf("%x", v)
	case [16]byte: // a UUID of pgx
		return fmt.Sprintf("%x-%x-%x-%x-%x", v[:4], v[4:6], v[6:8], v[8:10], v[10:])
	case map[string]any, []any:
		if b, err := json.Marshal(v); err == nil {
			return string(b)
		}
	}
	return fmt.Sprint(v)
}

func isText(b []byte) bool {
	for _, r := range string(b) {
		if r < ' ' || r == '�' {
			return false
		}
	}
	return true
}
