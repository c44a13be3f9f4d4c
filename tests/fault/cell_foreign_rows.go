package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/internal/foreignrows"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

var foreignRowsCell = &cell{
	// Promise: G1.16
	name: "foreign-rows", number: 30,
	summary: "another program writes hostile values into every column of every table, with the rights of Kinora's roles, under load and kill -9: each harms its own row only",
	full:    time.Minute, short: 4 * time.Second, redelivers: true,
	requires: []string{"taken", "refused", "foreign_letters", "foreign_parked", "foreign_tasks", "kill_relay", "kill_runner"}, requiresLong: []string{"all_rows"},
	run: runForeignRows,
}

const (
	foreignReaders = 2 // one with transactions, one with batches
	// ownStreams is a condition on a stream or a key: it is of the workload.
	ownStreams = `like '` + category + `-%'`
)

// metRows replace values of the plain rows, so that the processes of the cell meet the row.
var metRows = map[string]map[string]string{
	"events": {"type": "'" + movedAs + "'"},
	"outbox": {"topic": "'" + category + "'"},
	"tasks":  {"kind": "'crowd/count'"},
	"parked": {"projector": "'" + exactName + "'"},
	"holds":  {"projector": "'" + exactName + "'"},
}

// writerOf returns the role that may insert into a table.
func writerOf(table string) string {
	switch table {
	case "streams", "events", "snapshots", "outbox", "tasks", "task_groups", "task_trail":
		return "kinora_appender"
	case "pauses", "acts":
		return "kinora_operator"
	}
	return "kinora_projector"
}

// hostileRows returns all rows, in random order.
func (r *run) hostileRows() (all []foreignrows.Row) {
	for _, table := range slices.Sorted(maps.Keys(foreignrows.Plain)) {
		rows, err := r.pool.Query(r.suite.ctx, foreignrows.ColumnsSQL, table)
		r.must(err)
		columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[foreignrows.Column])
		r.must(err)
		plain := maps.Clone(foreignrows.Plain[table])
		maps.Copy(plain, metRows[table])
		all = append(all, foreignrows.Of(table, columns, plain)...)
	}
	for i := range all {
		j := i + r.intn(len(all)-i)
		all[i], all[j] = all[j], all[i]
	}
	return all
}

// insertForeign inserts a row as a role. What the role may not insert, the owner does: another role may update it.
func (r *run) insertForeign(row foreignrows.Row, n int) {
	insert := func(role string) error {
		return pgx.BeginFunc(r.suite.ctx, r.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(r.suite.ctx, `set local role `+role); err != nil {
				return err
			}
			sql := row.SQL(n)
			if r.suite.short { // a little more than the limit, instead of more than a statement can return
				sql = strings.Replace(sql, "9000", "600", 1)
			}
			_, err := tx.Exec(r.suite.ctx, sql)
			return err
		})
	}
	err := insert(writerOf(row.Table))
	var e *pgconn.PgError
	if errors.As(err, &e) && e.Code == "42501" {
		r.inject("denied", 1)
		err = insert("none")
	}
	switch {
	case err == nil:
		r.inject("taken", 1)
	case errors.As(err, &e):
		r.inject("refused", 1)
	default:
		r.must(err)
	}
	r.trace.printf("foreign %d %s.%s %.40q %v", n, row.Table, row.Column, row.Value, err)
}

func runForeignRows(r *run) {
	r.server(brokerConfig{Duplicate: 0.02, Own: category + "-"}, idleLimit)
	r.asOwner(effects)
	r.readerTables(foreignReaders)
	_, relays, runners := r.startAll(2, 2, nil)
	r.child(reading, func(s *settings) { s.More = map[string]string{"projectors": fmt.Sprint(foreignReaders)} })
	r.child(laboring, func(s *settings) {
		s.Concurrency, s.More = 4, map[string]string{"program": "crowd"}
	})
	r.gauge("foreign_letters", func() int { return r.broker.count("foreign") })
	rows, n := r.hostileRows(), 0
	r.prove(func() {
		for _, p := range r.all {
			if isClosed(p.life()) {
				r.must(p.begin())
			}
			p.awaitReady()
		}
		write := func() {
			for range 10 {
				r.insertForeign(rows[n%len(rows)], n)
				n++
			}
			r.enqueue(taskDraft("crowd/count", fmt.Sprintf("own-%d", n), fmt.Sprintf("own-%d", n)))
			r.sleep(r.between(0, 50*time.Millisecond))
			switch r.intn(4) {
			case 0:
				relays[r.intn(2)].restart()
			case 1:
				runners[r.intn(2)].restart()
			}
		}
		r.during(func() {
			if write(); r.isLong() && n >= len(rows) {
				r.sleep(100 * time.Millisecond)
			}
		})
		for stop := r.flow(); ; write() {
			if !r.isLong() || n >= len(rows) {
				stop()
				break
			}
		}
		if n >= len(rows) {
			r.inject("all_rows", 1)
		}
		r.awaitOwn()
		r.inject("foreign_parked", r.countOf(`select count(*) from kinora.parked where not key `+ownStreams))
		r.inject("foreign_tasks", r.countOf(`select count(*) from kinora.tasks where id not like 'own-%' and attempts > 0`))
		r.readLists()
		for _, p := range r.all {
			p.stop()
		}
		r.deleteForeign()
	})
	r.judge()
	var v verdict
	_, h := r.judgeAppends(&v)
	r.judgeProjectors(foreignReaders, false, h, &v)
	if all, tasks := r.countOf(`select count(*) from effects where task like 'own-%'`), r.countOf(`select count(*) from kinora.tasks where id like 'own-%'`); all != tasks {
		r.fail("%d tasks have run, want %d", all, tasks)
	}
}

// asOwner creates Kinora's roles with their rights, and more.
func (r *run) asOwner(more string) {
	for _, script := range []func(string) (string, error){postgres.RolesSQL, postgres.GrantsSQL} {
		sql, err := script("kinora")
		r.must(err)
		_, err = r.pool.Exec(r.suite.ctx, sql)
		r.must(err)
	}
	_, err := r.pool.Exec(r.suite.ctx, `grant insert on held_against to public;`+more)
	r.must(err)
}

// awaitOwn waits until the workload is published, applied and run, while the foreign rows are there.
func (r *run) awaitOwn() {
	begin := time.Now()
	r.await("the work next to the foreign rows", func() bool {
		for _, p := range r.of(producing) {
			if p.open() {
				return false
			}
		}
		events := r.countOf(`select count(*) from kinora.events where stream ` + ownStreams)
		messages, idle := r.broker.idle()
		for i := range foreignReaders {
			if r.countOf(`select coalesce(sum(cardinality(items)), 0) from `+readerPrefix(i)+`lists where stream `+ownStreams) < events {
				return false
			}
		}
		return idle && messages == events &&
			r.countOf(`select count(*) from kinora.outbox where key `+ownStreams+` and status not in ('published', 'skipped')`) == 0 &&
			r.countOf(`select count(*) from kinora.parked where key `+ownStreams+` and state in ('waiting', 'stuck')`) == 0 &&
			r.countOf(openTasks+` and id like 'own-%'`) == 0
	})
	r.measure("drained_ms", time.Since(begin))
}

// readLists reads what operators see: foreign rows do not hide others.
func (r *run) readLists() {
	db, err := postgres.New(r.pool, nil)
	r.must(err)
	defer db.Close()
	a, err := admin.New(db)
	r.must(err)
	for what, read := range map[string]func(context.Context) error{
		"facts":   func(ctx context.Context) error { _, err := a.Facts(ctx); return err },
		"doctor":  func(ctx context.Context) error { _, err := a.Doctor(ctx, provider.DiagnosisLimits{}); return err },
		"streams": func(ctx context.Context) error { _, err := db.Streams(ctx, provider.StreamFilter{}); return err },
		"entries": func(ctx context.Context) error { _, err := db.Entries(ctx, provider.EntryFilter{}); return err },
		"tasks":   func(ctx context.Context) error { _, err := db.Tasks(ctx, provider.TaskFilter{}); return err },
	} {
		if err := read(r.suite.ctx); err != nil {
			r.fail("the list of %s: %v", what, err)
		}
	}
}

// deleteForeign deletes the foreign rows that the oracle would read, and what they left in the read models.
func (r *run) deleteForeign() {
	sqls := []string{
		`delete from kinora.events where not stream ` + ownStreams,
		`delete from kinora.outbox where not key ` + ownStreams,
		`delete from kinora.parked where not key ` + ownStreams,
		`delete from kinora.holds h where not exists (select from kinora.parked p where (p.projector, p.lane) = (h.projector, h.lane) and p.state in ('waiting', 'stuck'))`,
		// the ids of events are UUIDs
		`delete from held_against where message !~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' or projector !~ '^(` + exactName + `|` + controlName + `)$'`,
	}
	for i := range foreignReaders {
		sqls = append(sqls, `delete from `+readerPrefix(i)+`lists where not stream `+ownStreams)
	}
	for _, sql := range sqls {
		_, err := r.pool.Exec(r.suite.ctx, sql)
		r.must(err)
	}
}
