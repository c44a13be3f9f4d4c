package main

import (
	"context"
	"time"
)

var conflictsCell = &cell{
	// Promise: G1.1, G1.3, G6.1
	name: "conflicts", number: 10, summary: "SQLSTATE 40001 and 40P01 in handler transactions and in appends",
	full: 30 * time.Second, short: 3 * time.Second, redelivers: true,
	requires: []string{"deadlocks", "raised_in_handlers", "raised_in_appends"}, run: runConflicts,
}

// triesLimit limits how often one message is tried. A failed unit of several messages is tried
// again in halves, so each of its messages starts again.
const triesLimit = 25

// Sequences also count in transactions that roll back.
const conflictTables = `
create table contended (id int primary key, n int not null);
insert into contended select g, 0 from generate_series(1, 2) g;
create sequence raised_in_handlers;
create sequence raised_in_appends;
create function provoke(share float) returns void language plpgsql as $$
begin
	if random() < share then
		perform nextval('raised_in_handlers');
		raise serialization_failure;
	end if;
end $$;
create function cross_over(a int, b int) returns void language plpgsql as $$
begin
	update contended set n = n + 1 where id = a;
	perform pg_sleep(0.003);
	update contended set n = n + 1 where id = b;
end $$;
create function refuse_some() returns trigger language plpgsql as $$
begin
	if random() < 0.03 then
		perform nextval('raised_in_appends');
		if random() < 0.5 then
			raise deadlock_detected;
		end if;
		raise serialization_failure;
	end if;
	return new;
end $$;
create trigger refuse_some before insert on kinora.events for each row execute function refuse_some();
create trigger refuse_some before insert on kinora.outbox for each row execute function refuse_some()`

// conflicting causes conflicts in the handler's own transaction: two handlers lock two rows in
// opposite order.
func conflicting(_ context.Context, _ *work, e moved, exec func(sql string, args ...any) error) error {
	if err := exec(`select provoke(0.03)`); err != nil {
		return err
	}
	switch e.N % 4 {
	case 0:
		return exec(`select cross_over(1, 2)`)
	case 2:
		return exec(`select cross_over(2, 1)`)
	}
	return nil
}

func runConflicts(r *run) {
	r.server(brokerConfig{Duplicate: 0.02}, "deadlock_timeout=20ms")
	_, err := r.pool.Exec(r.suite.ctx, conflictTables)
	r.must(err)
	r.startAll(2, 2, func(s *settings) {
		// A few used-up attempts would park a message.
		limitAttempts(2)(s)
		s.Slow, s.More = 0, map[string]string{"harm": "conflicting"}
	})
	for kind, sql := range map[string]string{
		"raised_in_handlers": `select case when is_called then last_value else 0 end from raised_in_handlers`,
		"raised_in_appends":  `select case when is_called then last_value else 0 end from raised_in_appends`,
		"deadlocks":          `select deadlocks from pg_stat_database where datname = current_database()`,
	} {
		r.gauge(kind, func() int { return r.countOf(sql) })
	}
	r.prove(func() {
		r.during(func() { r.acks(20) })
		r.waitDrained(5 * lease)
	})
	r.blameless()
	starts, err := countStarts(r.dir)
	r.must(err)
	tries := 0
	for _, n := range starts {
		tries = max(tries, n)
	}
	r.atMost("tries", tries, triesLimit)
	r.judge()
	if n := r.result.Ambiguous + r.result.Rejected; n > 0 {
		r.fail("%d commands were rejected: a producer got a conflict that another caller caused", n)
	}
}
