package main

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/task"
)

// The oracle of tasks judges by the log of the systems outside, by the rows that steps in
// transactions added, and by plain SQL over the tasks.

// enqueue adds tasks, as a service does. The suite never dies, so that they are there.
func (r *run) enqueue(drafts ...task.Draft) {
	db, err := postgres.New(r.pool, &postgres.Config{Notify: true})
	r.must(err)
	defer db.Close()
	r.must(pgx.BeginFunc(r.suite.ctx, r.pool, func(tx pgx.Tx) error { return db.TasksIn(tx).Enqueue(r.suite.ctx, drafts...) }))
}

// taskDraft returns a task of a kind that the workers define.
func taskDraft(kind, id string, in any) task.Draft {
	text, err := json.Marshal(in)
	return task.Draft{ID: id, Kind: kind, Input: text, Err: err}
}

// openTasks counts the tasks that have not ended.
const openTasks = `select count(*) from kinora.tasks where status not in ('done', 'undone')`

// orders adds orders from number n until stop is called, which returns the next number. Some are always open, and
// every third one is refused.
func (r *run) orders(n, ahead int) (stop func() int) {
	done, ended := make(chan struct{}), make(chan struct{})
	go r.guard(func() {
		defer close(ended)
		for ; !isClosed(done); r.sleep(20 * time.Millisecond) {
			var open int
			if r.pool.QueryRow(r.suite.ctx, openTasks+` and kind = 'shop/order'`).Scan(&open) != nil { // the fault hits the suite too
				continue
			}
			for ; open < ahead && !isClosed(done); open++ {
				r.enqueue(taskDraft("shop/order", orderID(n), order{Refused: n%3 == 0}))
				n++
			}
		}
	})
	return func() int { close(done); <-ended; return n }
}

// vanished selects the tasks that are abandoned because each attempt ended with its lease, except those that end their
// process.
const vanished = `status = 'abandoned' and code = 'vanished' and not (kind = 'killers/call' and input = 'true')`

// awaitEnded waits until every task is done or undone, and fails the cell if one is abandoned.
func (r *run) awaitEnded() {
	if r.settleTasks() && r.countOf(openTasks) > 0 {
		r.fail("tasks are abandoned: %s", r.openList())
	}
}

// settleTasks waits until every task has ended, or is abandoned and no process of the cell completes it by hand. On a slow
// or busy machine leases also end of tasks that nothing interrupts: the short form requeues those.
func (r *run) settleTasks() bool {
	begin := time.Now()
	settled := r.awaitOr(r.suite.patience(), func() bool {
		var open, gone int
		if r.pool.QueryRow(r.suite.ctx, `select count(*) filter (where status <> 'abandoned' or kind = 'shop/broken'), count(*) filter (where `+vanished+`)
			from kinora.tasks where status not in ('done', 'undone')`).Scan(&open, &gone) != nil {
			return false
		}
		if gone > 0 && r.suite.short && !r.suite.mutant {
			r.requeueVanished()
			return false
		}
		return open == 0
	})
	if r.measure("drained_ms", time.Since(begin)); !settled {
		r.fail("tasks have not ended in %s: %s", time.Since(begin), r.openList())
	}
	return settled
}

func (r *run) requeueVanished() {
	db, err := postgres.New(r.pool, &postgres.Config{Notify: true})
	r.must(err)
	defer db.Close()
	rows, err := r.pool.Query(r.suite.ctx, `select id from kinora.tasks where `+vanished)
	r.must(err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	r.must(err)
	n, err := db.RequeueTasks(r.suite.ctx, task.Filter{IDs: ids}, task.Decision{By: "suite", Reason: "its leases ended on a busy machine"})
	r.must(err)
	r.inject("requeued_vanished", n)
}

// openList describes the first tasks that have not ended.
func (r *run) openList() (list string) {
	_ = r.pool.QueryRow(r.suite.ctx, `select string_agg(format('%s %s attempts %s suspect %s code %s', id, status, attempts, suspect, code), ', ')
		from (select * from kinora.tasks where status not in ('done', 'undone') order by id limit 10) t`).Scan(&list)
	return list
}

// stored tasks and effects, as plain SQL reads them.
type taskRow struct {
	ID, Kind, Status string
	Result           string
	Charge           string // recorded result of the step charge
}

func (r *run) taskRows() map[string]taskRow {
	rows, err := r.pool.Query(r.suite.ctx, `select id, kind, status, coalesce(result #>> '{}', ''), coalesce(state #>> '{charge,out}', '') from kinora.tasks`)
	r.must(err)
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[taskRow])
	r.must(err)
	all := map[string]taskRow{}
	for _, t := range list {
		all[t.ID] = t
	}
	return all
}

// effectsOf returns the references of the effects, by task and kind of effect.
func (r *run) effectsOf() map[string][]string {
	rows, err := r.pool.Query(r.suite.ctx, `select task || ' ' || what, array_agg(ref) from effects group by 1`)
	r.must(err)
	all := map[string][]string{}
	var of string
	var refs []string
	_, err = pgx.ForEachRow(rows, []any{&of, &refs}, func() error { all[of] = slices.Clone(refs); return nil })
	r.must(err)
	return all
}

// judgeShop judges n orders: each is done, or undone if it was refused, with each effect once.
func (r *run) judgeShop(o *outside, n int) {
	var v verdict
	tasks, found := r.taskRows(), r.effectsOf()
	o.mu.Lock()
	known := map[string]bool{}
	called := func(id, key string, want bool) {
		known[key] = true
		switch calls := o.done[key]; {
		case want && calls == 0:
			v.find(&v.Lost, id, "%s was never called", key)
		case !want && calls > 0:
			v.find(&v.Phantom, id, "%s was called %d times", key, calls)
		}
	}
	for i := range n {
		id, refused := orderID(i), i%3 == 0
		t := tasks[id]
		if want := map[bool]string{false: "done", true: "undone"}[refused]; t.Status != want {
			v.find(&v.Lost, id, "it is %q, want %q", t.Status, want)
		}
		want := map[string]int{"booked": 1, "counted": 1, "notified": 1, "unbooked": 0, "closed": 1, "reminded": 1}
		if refused {
			want["unbooked"], want["closed"], want["reminded"] = 1, 0, 0
		} else if !isEven(id) {
			want["reminded"] = 0
		}
		for what, times := range want {
			refs := found[id+" "+what]
			delete(found, id+" "+what)
			switch {
			case len(refs) < times:
				v.find(&v.Lost, id, "not %s", what)
			case len(refs) > 1:
				v.find(&v.Doubled, id, "%s %d times", what, len(refs))
			case len(refs) > times:
				v.find(&v.Phantom, id, "%s", what)
			case times == 1 && refs[0] != "" && refs[0] != t.Charge:
				v.find(&v.Doubled, id, "%s with the reference %s, but %s is recorded", what, refs[0], t.Charge)
			}
		}
		if !refused && t.Result != t.Charge {
			v.find(&v.Doubled, id, "its result is %s, but %s is recorded", t.Result, t.Charge)
		}
		called(id, id+"/charge", true)
		called(id, id+"/charge/undo", refused)
		called(id, id+"/customer", true)
		called(id, id+"/store", true)
	}
	for of := range found {
		v.find(&v.Phantom, of, "nobody asked for it")
	}
	for key := range o.done {
		if !known[key] {
			v.find(&v.Phantom, key, "nobody asked for this call")
		}
	}
	r.judgeRecords(o, tasks, &v)
	o.mu.Unlock()
	r.endTasks(o, &v, n)
}

// judgeRecords checks that each task that has ended has its record in the audit sink.
func (r *run) judgeRecords(o *outside, tasks map[string]taskRow, v *verdict) {
	if len(o.records) == 0 {
		return
	}
	for _, t := range tasks {
		if (t.Status == "done" || t.Status == "undone") && !slices.Contains(o.records[t.ID], t.Status) {
			v.find(&v.Lost, t.ID, "it is %s without a record: %v", t.Status, o.records[t.ID])
		}
	}
}

// endTasks fills in the report.
func (r *run) endTasks(o *outside, v *verdict, n int) {
	res := &r.result
	res.ControlWrong, res.ControlByFault = r.control()
	o.set(func(o *outside) {
		for _, times := range o.done {
			r.inject("calls", times)
		}
	})
	for _, why := range v.reasons {
		r.trace.printf("verdict %s", why)
	}
	res.Commands, res.Acked, res.Judged = n, n, true
	res.Lost, res.Doubled, res.Phantom, res.Misordered = v.Lost, v.Doubled, v.Phantom, v.Misordered
	if !v.ok() {
		r.fail("lost %d, doubled %d, phantom %d, misordered %d: %s", v.Lost, v.Doubled, v.Phantom, v.Misordered, v.reasons[0])
	}
	if n := r.countOf(`select count(*) from kinora.tasks where suspect`); n > 0 {
		r.inject("suspect", n)
	}
	r.inject("fenced", int(r.sum(laboring, wordLate)))
	r.requireKinds()
}

// worker starts a worker of a program.
func (r *run) worker(o *outside, program string, change func(*settings)) *process {
	return r.child(laboring, func(s *settings) {
		s.Lease, s.Timeout, s.Concurrency, s.Control = taskLease, 2*time.Second, 8, false
		s.More = map[string]string{"program": program, "outside": o.url}
		if change != nil {
			change(s)
		}
	})
}

// taskLease is the lease of workers.
const taskLease = 400 * time.Millisecond

// stopWorkers drains the workers.
func (r *run) stopWorkers() {
	for _, p := range r.of(laboring) {
		p.stop()
	}
}
