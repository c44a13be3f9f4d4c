package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

var settingsCell = &cell{
	// Promise: G7.3, G1.14
	name: "settings", number: 44,
	summary: "settings of the role and of the database that change what a statement does, one after another, under kill -9: exact, or refused by name at start",
	full:    2 * time.Minute, short: 4 * time.Second, redelivers: true, fails: true,
	requires: []string{"right", "refused", "by_role", "by_database"}, requiresLong: []string{"all_settings"}, run: runSettings,
}

// sessionSetting is a setting, and how each process takes it.
type sessionSetting struct {
	sql string
	// A relay and a runner that start must refuse it with an error that has this text, unless it is empty.
	refused string
	byText  bool // only those whose pool is their own and sends text refuse it
}

// sessionSettings are tried one after another. Timeouts are so long that a slow machine seldom meets them.
var sessionSettings = []sessionSetting{
	{sql: `standard_conforming_strings = off`}, {sql: `escape_string_warning = off`}, {sql: `backslash_quote = off`},
	{sql: `client_encoding = 'LATIN1'`, refused: "client_encoding is LATIN1", byText: true},
	{sql: `client_encoding = 'SQL_ASCII'`, refused: "client_encoding is SQL_ASCII", byText: true},
	{sql: `datestyle = 'SQL, DMY'`, refused: "DateStyle is SQL, DMY", byText: true},
	{sql: `datestyle = 'German'`, refused: "DateStyle is German", byText: true},
	{sql: `datestyle = 'ISO, DMY'`}, {sql: `intervalstyle = 'sql_standard'`}, {sql: `intervalstyle = 'iso_8601'`},
	{sql: `timezone = 'Asia/Kolkata'`}, {sql: `timezone = 'America/St_Johns'`}, {sql: `timezone_abbreviations = 'India'`},
	{sql: `default_transaction_isolation = 'repeatable read'`, refused: "default_transaction_isolation"},
	{sql: `default_transaction_isolation = 'serializable'`, refused: "default_transaction_isolation"},
	{sql: `default_transaction_read_only = on`, refused: "default_transaction_read_only"},
	{sql: `default_transaction_deferrable = on`},
	{sql: `statement_timeout = '5s'`}, {sql: `lock_timeout = '3s'`}, {sql: `idle_in_transaction_session_timeout = '5s'`}, {sql: `idle_session_timeout = '300ms'`},
	{sql: `search_path = decoy, public`}, {sql: `search_path = decoy, public, kinora, pg_catalog`},
	{sql: `bytea_output = 'escape'`}, {sql: `row_security = off`}, {sql: `session_replication_role = replica`}, {sql: `synchronous_commit = off`},
	{sql: `extra_float_digits = -15`}, {sql: `array_nulls = off`}, {sql: `quote_all_identifiers = on`}, {sql: `xmloption = document`}, {sql: `xmlbinary = hex`},
	{sql: `transform_null_equals = on`}, {sql: `lc_messages = 'C'`}, {sql: `client_min_messages = error`}, {sql: `default_toast_compression = pglz`},
	{sql: `plan_cache_mode = force_generic_plan`}, {sql: `plan_cache_mode = force_custom_plan`}, {sql: `jit = on`}, {sql: `geqo_threshold = 2`},
	{sql: `enable_seqscan = off`}, {sql: `enable_indexscan = off`}, {sql: `enable_indexonlyscan = off`}, {sql: `enable_bitmapscan = off`},
	{sql: `enable_nestloop = off`}, {sql: `enable_hashjoin = off`}, {sql: `enable_mergejoin = off`}, {sql: `enable_sort = off`}, {sql: `enable_material = off`},
	{sql: `join_collapse_limit = 1`}, {sql: `from_collapse_limit = 1`}, {sql: `work_mem = '64kB'`}, {sql: `commit_delay = 1000`},
}

// serviceRole is the role of the processes. The schema decoy has a table of each name of Kinora's.
const serviceRole = `
create role service login in role kinora_appender, kinora_relay, kinora_projector;
grant all on all tables in schema public to service;
create schema decoy;
grant usage on schema decoy to service;
do $$
declare
	name text;
begin
	for name in select tablename from pg_tables where schemaname = 'kinora' loop
		execute format('create table decoy.%I (like kinora.%I including all)', name, name);
		execute format('grant all on decoy.%I to service', name);
	end loop;
end $$`

// settable is a process of the cell, and whether it must refuse the present setting.
type settable struct {
	*process
	byText  bool
	refuses atomic.Bool
}

// log returns what the process has written to its log behind a place.
func (p *settable) log(behind int64) string {
	text, err := os.ReadFile(filepath.Join(p.Dir, "log-"+p.Name))
	p.r.must(err)
	return string(text[min(behind, int64(len(text))):])
}

func runSettings(r *run) {
	r.server(brokerConfig{Duplicate: 0.02})
	r.asOwner(serviceRole)
	_, _, _ = r.startAll(2, 2, func(s *settings) {
		s.DSN = strings.Replace(s.DSN, "//postgres@", "//service@", 1)
		s.Conns = 6
		if s.Role != producing && strings.HasSuffix(s.Name, "-2") {
			s.More = map[string]string{"text": "yes"}
		}
	})
	var all []*settable
	for _, p := range r.all {
		one := &settable{process: p, byText: p.More["text"] != ""}
		p.onEnd(func(code int) bool { return code == 1 && one.refuses.Load() })
		all = append(all, one)
	}
	todo, n := slices.Clone(sessionSettings), 0
	for i := range todo {
		j := i + r.intn(len(todo)-i)
		todo[i], todo[j] = todo[j], todo[i]
	}
	first := slices.IndexFunc(todo, func(s sessionSetting) bool { return s.refused != "" })
	todo[0], todo[first] = todo[first], todo[0]
	r.prove(func() {
		r.during(func() { r.trySetting(all, todo[n%len(todo)], n); n++ })
		for stop := r.flow(); ; n++ {
			if !r.isLong() || n >= len(todo) {
				stop()
				break
			}
			r.trySetting(all, todo[n], n)
		}
		if n >= len(todo) {
			r.inject("all_settings", 1)
		}
		r.waitDrained(5 * lease)
	})
	r.judge()
	if n := r.countOf(`select (select count(*) from decoy.events) + (select count(*) from decoy.outbox) + (select count(*) from decoy.markers)`); n > 0 {
		r.fail("%d rows are in the tables of another schema", n)
	}
}

// trySetting starts all processes with a setting, lets them work, or refuse it, and starts them again without it.
func (r *run) trySetting(all []*settable, s sessionSetting, n int) {
	where, kind := `role service`, "by_role"
	if n%2 == 1 {
		where, kind = `role service in database postgres`, "by_database"
	}
	exec := func(sql string) {
		_, err := r.pool.Exec(r.suite.ctx, sql)
		r.must(err)
	}
	exec(`alter ` + where + ` set ` + s.sql)
	r.trace.printf("setting %s %s", where, s.sql)
	logged, refuse := map[*settable]int64{}, 0
	for _, p := range all {
		refuses := s.refused != "" && (!s.byText || p.byText) && p.Role != producing
		p.refuses.Store(refuses)
		logged[p] = int64(len(p.log(0)))
		if refuses {
			refuse++
		}
		p.restart()
	}
	for p, behind := range maps.All(logged) {
		if !p.refuses.Load() {
			r.awaitTaken(p, s)
			continue
		}
		r.await(fmt.Sprintf("%s to refuse %s", p.Name, s.sql), func() bool { return isClosed(p.life()) || p.isReady() })
		if text := p.log(behind); p.isReady() || !strings.Contains(text, s.refused) {
			r.fail("%s does not refuse %s by name: %s", p.Name, s.sql, text)
		}
	}
	if refuse < len(r.of(relaying))+len(r.of(running)) { // a relay and a runner work
		r.awaitAllWork(all, s)
	}
	exec(`alter ` + where + ` reset all`)
	for _, p := range all {
		if isClosed(p.life()) {
			r.must(p.begin())
		} else {
			p.restart()
		}
		p.awaitReady()
		p.refuses.Store(false)
	}
	r.inject(kind, 1)
	if refuse > 0 {
		r.inject("refused", refuse)
	}
	if refuse < len(all)-1 {
		r.inject("right", 1)
	}
}

// awaitTaken waits until a process works with a setting.
func (r *run) awaitTaken(p *settable, s sessionSetting) {
	r.await(fmt.Sprintf("%s to work with %s", p.Name, s.sql), func() bool { return p.isReady() || isClosed(p.life()) })
	if !p.isReady() {
		r.must(fmt.Errorf("%s has ended with %s: %s", p.Name, s.sql, p.log(0)))
	}
}

// awaitAllWork waits until each relay has marked entries, and each runner has applied events, since the call.
func (r *run) awaitAllWork(all []*settable, s sessionSetting) {
	for _, p := range all {
		if before := p.status.get(wordDone); p.Role != producing && !p.refuses.Load() {
			r.await(fmt.Sprintf("%s to do work with %s", p.Name, s.sql), func() bool { return p.status.get(wordDone) > before })
		}
	}
}
