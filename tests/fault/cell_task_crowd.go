package main

import (
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

var taskCrowdCell = &cell{
	// Promise: T2.2
	name: "task-crowd", number: 39,
	summary: "50,000 tasks due at once beside a million that wait, while a snapshot is held open, under kill -9 of workers (3,000 and 20,000 in short)",
	full:    20 * time.Second, short: time.Second, alone: true,
	requires: []string{"kill_worker", "snapshot_held"}, run: runTaskCrowd,
}

// crowdClaim is how long a claim may take in the full form. One that read all waiting tasks would take seconds.
const crowdClaim = time.Second

func runTaskCrowd(r *run) {
	waiting, due := 1_000_000, 50_000
	if r.suite.short {
		waiting, due = 20_000, 3_000
	}
	r.server(brokerConfig{}, "shared_buffers=256MB", idleLimit)
	ctx := r.suite.ctx
	_, err := r.pool.Exec(ctx, effects)
	r.must(err)
	_, err = r.pool.Exec(ctx, `insert into kinora.tasks (id, kind, input, status, waits, next_at)
		select 'waits-' || i, 'crowd/count', '0', 'waiting', 'answer', case when i % 2 = 0 then 'infinity' else now() + interval '1 year' end
		from generate_series(1, $1::int) i`, waiting)
	r.must(err)
	snapshot, err := r.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	r.must(err)
	defer func() { _ = snapshot.Rollback(ctx) }()
	_, err = snapshot.Exec(ctx, `set local idle_in_transaction_session_timeout = 0; select count(*) from kinora.events`)
	r.must(err)
	r.gauge("snapshot_held", func() int {
		return r.countOf(`select count(*) from pg_stat_activity where application_name = 'suite' and backend_xmin is not null and state = 'idle in transaction'`)
	})
	o := r.systems()
	var workers []*process
	all := 0
	r.prove(func() {
		n := r.part(due)
		_, err = r.pool.Exec(ctx, `insert into kinora.tasks (id, kind, input, next_at)
			select 'due-' || i, 'crowd/count', to_jsonb('due-' || i), now() from generate_series($1::int, $2::int) i`, all+1, all+n)
		r.must(err)
		all += n
		for range 2 - len(workers) {
			workers = append(workers, r.worker(o, "crowd", func(s *settings) { s.Concurrency, s.Conns, s.Lease = 32, 16, 2*time.Second }))
		}
		r.killInCrowd(workers, n)
	})
	due = all
	r.sleep(time.Second) // claims that find nothing
	longest := time.Duration(0)
	for _, p := range workers {
		longest = max(longest, time.Duration(p.status.get(wordClaim)))
	}
	r.within("claim_ms", "a claim ended", longest, crowdClaim)
	r.stopWorkers()
	var v verdict
	found := r.effectsOf()
	for i := 1; i <= due; i++ {
		switch id := fmt.Sprint("due-", i); len(found[id+" counted"]) {
		case 0:
			v.find(&v.Lost, id, "not counted")
		case 1:
		default:
			v.find(&v.Doubled, id, "counted %d times", len(found[id+" counted"]))
		}
	}
	if len(found) > due {
		v.find(&v.Phantom, "waits", "%d tasks that wait were counted", len(found)-due)
	}
	r.endTasks(o, &v, due)
}

// killInCrowd kills workers until the last tenth of n due tasks, and waits until all have ended.
func (r *run) killInCrowd(workers []*process, n int) {
	left := func() int {
		return r.countOf(`select count(*) from kinora.tasks where kind = 'crowd/count' and status in ('pending', 'claimed', 'failed')`)
	}
	begin := time.Now()
	for rest := left(); rest > 0 && time.Since(begin) < r.suite.patience(); rest = left() {
		p := workers[r.intn(2)]
		if !r.has("kill_worker") {
			r.awaitOr(time.Second, p.open)
		}
		if rest > n/10 && p.open() { // the last run alone, as suspects
			p.restart()
			r.sleep(r.between(300*time.Millisecond, time.Second))
			r.sleep(time.Duration(n/1000) * 20 * time.Millisecond)
		}
		r.sleep(time.Millisecond)
	}
	r.measure("drained_ms", time.Since(begin))
}
