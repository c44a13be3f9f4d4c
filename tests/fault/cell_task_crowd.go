package main

import (
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

var taskCrowdCell = &cell{
	name: "task-crowd", number: 39,
	summary: "50,000 tasks due at once beside a million that wait, while a snapshot is held open, under kill -9 of workers (3,000 and 20,000 in short)",
	full:    20 * time.Second, short: time.Second,
	requires: []string{"kill_worker", "snapshot_held"}, run: runTaskCrowd,
}

// crowdClaim is how long a claim may take. One that read all waiting tasks would take seconds.
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
	_, err = r.pool.Exec(ctx, `insert into kinora.tasks (id, kind, input, next_at)
		select 'due-' || i, 'crowd/count', to_jsonb('due-' || i), now() from generate_series(1, $1::int) i`, due)
	r.must(err)

	o := r.systems()
	var workers []*process
	for range 2 {
		workers = append(workers, r.worker(o, "crowd", func(s *settings) { s.Concurrency, s.Conns, s.Lease = 32, 16, 2*time.Second }))
	}
	left := func() int {
		return r.countOf(`select count(*) from kinora.tasks where kind = 'crowd/count' and status in ('pending', 'claimed', 'failed')`)
	}
	begin := time.Now()
	for n := left(); n > 0 && time.Since(begin) < 5*time.Minute; n = left() {
		p := workers[r.intn(2)]
		if r.kinds()["kill_worker"] == 0 {
			r.awaitOr(time.Second, p.open)
		}
		if n > due/10 && p.open() { // the last run alone, as suspects: more kills in a row would abandon them
			p.restart()
			r.sleep(r.between(300*time.Millisecond, time.Second))
			r.sleep(time.Duration(due/1000) * 20 * time.Millisecond)
		}
		r.sleep(time.Millisecond)
	}
	r.measure("drained_ms", time.Since(begin))
	r.sleep(time.Second) // claims that find nothing
	r.inject("snapshot_held", r.countOf(`select count(*) from pg_stat_activity where application_name = 'suite' and backend_xmin is not null and state = 'idle in transaction'`))
	longest := time.Duration(0)
	for _, p := range workers {
		longest = max(longest, time.Duration(p.status.get(wordClaim)))
	}
	r.measure("claim_ms", longest)
	limit := crowdClaim
	if r.suite.short {
		limit *= 3 // other cells run too
	}
	if longest > limit {
		r.fail("a claim took %s, the limit is %s", longest, limit)
	}
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
