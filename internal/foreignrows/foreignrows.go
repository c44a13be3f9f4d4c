// Package foreignrows has rows that another program could write into Kinora's tables on PostgreSQL, each with a hostile
// value in one column. A test writes all of them, and a cell of the fault suite writes them under load.
package foreignrows

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// hostile are values of each type, as SQL. Numbers of 131,000 digits are short in the table and long as text.
var hostile = map[string][]string{
	"integer":                  {"2147483647", "-2147483648", "0", "-1"},
	"bigint":                   {"9223372036854775807", "-9223372036854775808", "0", "-1"},
	"boolean":                  {"true", "false"},
	"uuid":                     {"'00000000-0000-0000-0000-000000000000'"},
	"text":                     {"''", "repeat('x', 2000)", `E'\x01\u202e<script>'`, "'a' || chr(1114111)"},
	"bytea":                    {"''", "'\\x00'", "convert_to(repeat('x', 70000000), 'UTF8')"},
	"text[]":                   {"'{}'", "array[null]::text[]", "'{{a},{b}}'", "'[5:6]={a,b}'"},
	"jsonb":                    {"'null'", "'1'", "'[]'", `'{"": null}'`, `'"x"'`, "('[' || repeat('1e131000,', 9000) || '0]')::jsonb", "(repeat('[', 5000) || repeat(']', 5000))::jsonb"},
	"timestamp with time zone": {"'infinity'", "'-infinity'", "'294276-01-01'", "'4713-01-01 BC'", "'epoch'"},
}

// Plain has a row of each table that another hand could have written, as SQL by column. A $ is for a number of its own.
var Plain = map[string]map[string]string{
	"streams":         {"stream": "'v-$'", "category": "'v'", "version": "1"},
	"events":          {"stream": "'v-$'", "version": "1", "id": "gen_random_uuid()", "type": "'counted'", "schema_version": "1", "data": `'{"N": 1}'`, "metadata": "'{}'", "recorded_at": "now()"},
	"snapshots":       {"stream": "'v-$'", "schema": "'s'", "version": "1", "event_id": "'e'", "state": "'{}'", "saved_at": "now()"},
	"outbox":          {"message_id": "'m$'", "topic": "'t'", "key": "'v-$'", "payload": "'{}'", "headers": "'{}'", "next_attempt_at": "now()", "created_at": "now()"},
	"generations":     {"projector": "'v$'", "generation": "1", "revision": "1", "state": "'live'", "data": "'{}'", "created_at": "now()", "changed_at": "now()"},
	"markers":         {"handler": "'v/h'", "generation": "1", "message_id": "'m$'"},
	"low_water_marks": {"handler": "'v$/h'", "pruned_before": "now()"},
	"parked": {"projector": "'v'", "generation": "1", "handler": "'h'", "handlers": "'{}'", "message_id": "'m$'", "marker_id": "'m$'", "topic": "'t'", "key": "'k$'",
		"lane": "decode(lpad('$', 32, '0'), 'hex')", "type": "'t'", "payload": "'{}'", "headers": "'{}'", "class": "'unknown'", "code": "'c'", "attempts": "1", "version": "''"},
	"holds":       {"projector": "'v'", "generation": "1", "lane": "decode(lpad('$', 32, '0'), 'hex')", "due_at": "now()"},
	"checkpoints": {"projector": "'v$'", "generation": "1", "position": "1", "event_id": "'e'", "lineage": "'l'", "mode": "'catch-up'", "token": "gen_random_uuid()", "handlers": "'[]'"},
	"segments":    {"projector": "'v$'", "generation": "1", "segment": "1", "position": "1", "event_id": "'e'", "token": "gen_random_uuid()"},
	"leases":      {"name": "'v$'", "token": "gen_random_uuid()", "holder": "'h'", "expires_at": "now()"},
	"runners":     {"runner": "'v$'", "expires_at": "now()"},
	"in_flight":   {"message_id": "'m$'", "build": "'v'", "runner": "'v'", "worker": "1"},
	"services":    {"id": "'v$'", "kind": "'runner'", "holder": "'h'", "data": "'{}'", "skew": "0", "started_at": "now()", "seen_at": "now()", "expires_at": "now() + interval '1 hour'"},
	"pauses":      {"kind": "'projector'", "name": "'v$'", "paused_by": "'p'", "reason": "'r'", "paused_at": "now()"},
	"acts":        {"verb": "'verify'", "kind": "'projector'", "name": "'v$'", "decided_by": "'p'", "reason": "'r'", "state": "'requested'", "at": "now()"},
	"tasks":       {"id": "'v$'", "kind": "'t/a'", "input": "'{}'", "next_at": "now()"},
	"task_groups": {"id": "'v$'", "kind": "'g/a'", "data": "'{}'", "total": "1", "open": "1"},
	"task_trail":  {"task": "'v$'", "what": "'answered'"},
}

// together has more values of the rows of a table: those that are hostile together.
var together = map[string][]map[string]string{
	"parked": {
		{"class": "'unable'"},
		{"class": "'unable'", "needs": "repeat('x', 2000)"},
		{"class": "'unable'", "needs": `E'\uFFFD\x01<script>\n'`},
		{"class": "'unable'", "needs": "'event t 1'", "state": "'stuck'"},
		{"class": "'unable'", "needs": "'event t 1'", "lane": "''"},
		{"class": "'unable'", "needs": "'event t 1'", "attempts": "2147483647"},
		{"class": "'held'", "needs": "'event t 1'"},
	},
}

// ColumnsSQL returns the columns of a table of the schema kinora that a role may write, as Column.
const ColumnsSQL = `
select attname::text, format_type(coalesce(nullif(typbasetype, 0), atttypid), null)
from pg_attribute join pg_type t on t.oid = atttypid
where attrelid = ('kinora.' || $1)::regclass and attnum > 0 and not attisdropped and attidentity = '' order by attnum`

// Column is a column of a table. Its type is that below its domain.
type Column struct{ Name, Type string }

// Row is a row with a hostile value in one column, or with values of several that are hostile together.
type Row struct {
	Table, Column, Value string
	is                   map[string]string
}

// Of returns the rows of a table: plain with each hostile value of each column, and with those together. It panics for a type without values.
func Of(table string, columns []Column, plain map[string]string) (all []Row) {
	for _, c := range columns {
		if len(hostile[c.Type]) == 0 {
			panic("no hostile values of " + c.Type)
		}
		for _, value := range hostile[c.Type] {
			is := maps.Clone(plain)
			is[c.Name] = value
			all = append(all, Row{table, c.Name, value, is})
		}
	}
	for _, values := range together[table] {
		is := maps.Clone(plain)
		maps.Copy(is, values)
		all = append(all, Row{table, strings.Join(slices.Sorted(maps.Keys(values)), ", "), fmt.Sprint(values), is})
	}
	return all
}

// SQL returns the statement that inserts the row. n is the row's own number.
func (r Row) SQL(n int) string {
	names, is := slices.Sorted(maps.Keys(r.is)), []string{}
	for _, name := range names {
		is = append(is, strings.ReplaceAll(r.is[name], "$", fmt.Sprint(n)))
	}
	return fmt.Sprintf("insert into kinora.%s (%s) values (%s)", r.Table, strings.Join(names, ", "), strings.Join(is, ", "))
}
