package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/task"
)

var taskErasureCell = &cell{
	// Promise: T3.1, T8.1, T9.1
	name: "task-erasure", number: 35,
	summary: "three systems that fail, hang, answer twice, and are down for ten leases; the audit sink down for ten leases; a person decides",
	full:    time.Minute, short: time.Second, redelivers: true,
	requires: []string{"failed_calls", "hung_calls", "lost_replies", "calls_while_down", "answered_again", "answered_late", "declined", refusedRecords, "kill_worker"},
	run:      runTaskErasure,
}

// sinkAttempts is the limit of attempts while the audit sink is down. If a refused record counted,
// every task would be abandoned.
const sinkAttempts = 4

const refusedRecords = "refused_records"

func runTaskErasure(r *run) {
	r.server(brokerConfig{})
	ctx := r.suite.ctx
	db, err := postgres.New(r.pool, &postgres.Config{Notify: true})
	r.must(err)
	defer db.Close()
	o := r.systems()
	down, deciding, calm := true, false, false
	begin := time.Now()
	o.set(func(o *outside) {
		o.trouble = func(system, key string, n int) trouble {
			switch {
			case system == "ads" && down && time.Since(begin)/(10*taskLease)%2 == 0: // for ten leases, again and again
				r.inject("calls_while_down", 1)
				return isDown
			case system == "crm" && isEven(subjectOf(key)) && !deciding:
				if n == 1 {
					r.inject("declined", 1)
				}
				return declines
			case n > 4 || calm:
				return works
			}
			t := []trouble{works, works, fails, loses, hangs}[r.intn(5)]
			r.inject(map[trouble]string{works: "calls_that_work", fails: "failed_calls", loses: "lost_replies", hangs: "hung_calls"}[t], 1)
			return t
		}
		o.after = func(system, key, _ string) {
			if system == "mail" {
				r.guard(func() { r.confirm(db, strings.TrimSuffix(key, "/ask")) })
			}
		}
	})
	var workers []*process
	change := func(s *settings) {
		s.Timeout, s.More["audit"] = 300*time.Millisecond, "yes"
	}
	for range 2 {
		workers = append(workers, r.worker(o, "people", change))
	}
	for _, p := range workers {
		p.awaitReady()
	}
	n := 0
	add := func(more int) {
		for range more {
			r.must(pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error { return db.TasksIn(tx).EnqueueGroup(ctx, subject(subjectID(n))) }))
			n++
		}
	}
	r.needs = slices.DeleteFunc(r.needs, func(kind string) bool { return kind == refusedRecords }) // these come later
	r.prove(func() {
		o.set(func(*outside) { down, begin = true, time.Now() })
		for end := time.Now().Add(max(10*taskLease, r.span)); time.Now().Before(end); {
			add(4)
			workers[r.intn(2)].restart()
			r.sleep(r.between(taskLease, 3*taskLease))
		}
		o.set(func(*outside) { down = false })
		r.settleTasks()
	})
	// Only the calls that crm declines remain. They block their groups, visibly.
	blocked := (n + 1) / 2
	if got := r.countOf(`select count(*) from kinora.tasks t join kinora.task_groups g on g.id = t.group_id
		where t.status = 'abandoned' and t.kind = 'people/crm' and g.open = 1 and g.completed_at is null`); got != blocked {
		r.fail("lost %d, doubled 0, phantom 0, misordered 0: %d abandoned calls block their groups, want %d", blocked-got, got, blocked)
	}
	if got := r.countOf(`select count(*) from kinora.events where type = $1`, erasedAs); got != n-blocked {
		r.fail("lost 0, doubled 0, phantom %d, misordered 0: %d completion events, want %d", got-n+blocked, got, n-blocked)
	}
	o.set(func(*outside) { deciding = true })
	r.decide(db)
	r.awaitEnded()

	for _, p := range workers {
		p.stop()
		p.Attempts = sinkAttempts
		r.must(p.begin())
	}
	before := r.countOf(`select count(*) from kinora.tasks where status = 'done'`)
	o.set(func(o *outside) { o.sink, calm = true, true })
	add(4)
	r.sleep(10 * taskLease)
	r.await("the sink to refuse a record more often than the limit of attempts", func() bool { return o.mostRefused() > sinkAttempts })
	if got := r.countOf(`select count(*) from kinora.tasks where status = 'done'`) - before; got > 0 {
		r.fail("lost %d, doubled 0, phantom 0, misordered 0: records of tasks that are done", got)
	}
	o.set(func(o *outside) { o.sink = false })
	r.awaitEnded()
	r.stopWorkers()
	r.judgeErasures(o, n)
}

// decide completes every second abandoned task by hand, and requeues the others.
func (r *run) decide(db *postgres.DB) {
	ctx := r.suite.ctx
	list, err := db.Tasks(ctx, task.Filter{Status: []task.Status{task.Abandoned}, Limit: 100_000})
	r.must(err)
	who := task.Decision{By: "suite", Reason: "crm was asked by telephone"}
	for i, t := range list {
		if i%2 == 0 {
			r.must(db.CompleteTask(ctx, t.ID, json.RawMessage(`"by hand"`), who))
			continue
		}
		if _, err := db.RequeueTasks(ctx, task.Filter{IDs: []string{t.ID}}, who); err != nil {
			r.must(err)
		}
	}
	r.inject("decided", len(list))
}

// confirm answers the task of a call to mail twice at the same time, and a third time otherwise.
func (r *run) confirm(db *postgres.DB, id string) {
	var all sync.WaitGroup
	taken := make([]task.Outcome, 3)
	answer := func(i int, message string) {
		_ = pgx.BeginFunc(r.suite.ctx, r.pool, func(tx pgx.Tx) (err error) {
			taken[i], err = db.TasksIn(tx).Answer(r.suite.ctx, task.Answer{
				Task: id, Name: "confirmed", ID: message, Out: json.RawMessage(fmt.Sprintf("%q", message)),
			})
			return err
		})
	}
	all.Go(func() { answer(0, "gone") })
	all.Go(func() { answer(1, "gone") })
	all.Wait()
	answer(2, "gone for good")
	for i, outcome := range taken {
		switch {
		case outcome == task.Taken:
			r.inject("answers_taken", 1)
		case i < 2 && outcome == task.Again:
			r.inject("answered_again", 1)
		case i == 2 && outcome == task.Late:
			r.inject("answered_late", 1)
		case outcome == task.Late: // the task has ended meanwhile, or the third answer of an earlier call came first
		default:
			r.fail("lost 1, doubled 0, phantom 0, misordered 0: answer %d of %s is %q", i, id, outcome)
		}
	}
}

// judgeErasures judges n subjects.
func (r *run) judgeErasures(o *outside, n int) {
	var v verdict
	tasks := r.taskRows()
	o.mu.Lock()
	left := maps.Clone(o.done)
	for i := range n {
		id := subjectID(i)
		for _, system := range []string{"ads", "crm", "mail"} {
			t := tasks[id+"/"+system]
			if t.Status != "done" {
				v.find(&v.Lost, id, "%s is %q", system, t.Status)
			}
			key := t.ID
			if system == "mail" {
				key += "/ask"
			}
			if left[key] == 0 && t.Result != "by hand" {
				v.find(&v.Lost, id, "%s was not called", system)
			}
			delete(left, key)
		}
		switch got := r.countOf(`select count(*) from kinora.events where stream = $1 and type = $2`, "person-"+id, erasedAs); {
		case got == 0:
			v.find(&v.Lost, id, "no completion event")
		case got > 1:
			v.find(&v.Doubled, id, "%d completion events", got)
		}
		if got := r.countOf(`select count(*) from kinora.task_trail where task = $1 and what = 'answered'`, id+"/mail"); got != 1 {
			v.find(&v.Doubled, id, "%d answers were taken", got)
		}
	}
	for key := range left {
		v.find(&v.Phantom, key, "nobody asked for this call")
	}
	if got := r.countOf(`select count(*) from kinora.events`); got != n {
		v.find(&v.Phantom, "log", "%d events, want %d", got, n)
	}
	r.judgeRecords(o, tasks, &v)
	for _, times := range o.refused {
		r.inject(refusedRecords, times)
	}
	r.needs = append(r.needs, refusedRecords)
	o.mu.Unlock()
	r.endTasks(o, &v, n)
}
