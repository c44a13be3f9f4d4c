package main

import (
	"time"

	"github.com/jackc/pgx/v5"
)

var backendsCell = &cell{
	// Promise: G1.1, G6.1
	name: "backends", number: 4, summary: "pg_terminate_backend of random connections",
	full: 80 * time.Second, short: 3 * time.Second, alone: true, redelivers: true, requires: []string{"terminated_at_work", "terminated_with_many_open"}, run: runBackends,
}

func runBackends(r *run) {
	r.server(brokerConfig{Duplicate: 0.02})
	r.startAll(2, 2, nil)
	r.prove(func() {
		r.during(func() {
			r.sleep(r.between(50*time.Millisecond, 400*time.Millisecond))
			terminate(r)
		})
		r.waitDrained(2 * lease)
	})
	r.judge()
}

// terminate ends a child's backend: half of the time one that is in a transaction, if there is one.
func terminate(r *run) {
	rows, err := r.pool.Query(r.suite.ctx, `
		select pid from pg_stat_activity
		where backend_type = 'client backend' and application_name <> 'suite' order by state is distinct from 'idle' desc, pid`)
	r.must(err)
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int])
	r.must(err)
	if len(pids) == 0 {
		return
	}
	pid := pids[0]
	if r.intn(2) == 0 {
		pid = pids[r.intn(len(pids))]
	}
	var done bool
	var application, state string
	many := r.manyOpen()
	err = r.pool.QueryRow(r.suite.ctx, `select pg_terminate_backend(pid), application_name, coalesce(state, '')
		from pg_stat_activity where pid = $1`, pid).Scan(&done, &application, &state)
	if err == nil && done {
		r.trace.printf("terminated %d %s %s", pid, application, state)
		r.inject("terminated", 1)
		if state != "idle" {
			r.inject("terminated_at_work", 1)
		}
		if many[application] && state != "idle" {
			r.inject("terminated_with_many_open", 1)
		}
	}
}

// manyOpen returns the runners that have a unit of several messages open.
func (r *run) manyOpen() map[string]bool {
	many := map[string]bool{}
	for _, p := range r.of(running) {
		many[p.Name] = p.status.get(wordManyOpen) > 0
	}
	return many
}
