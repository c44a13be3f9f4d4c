package main

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/task"
)

var taskCodeCell = &cell{
	// Promise: T10.1
	name: "task-code", number: 36,
	summary: "a rolling deploy of code with steps renamed, added, removed and appended, and of a new kind in both orders; and back again",
	full:    20 * time.Second, short: time.Second,
	requires: []string{"changed", "finished_by_old_code", "went_on", "unknown", "rolled_back"}, run: runTaskCode,
}

func runTaskCode(r *run) {
	r.server(brokerConfig{})
	ctx := r.suite.ctx
	db, err := postgres.New(r.pool, &postgres.Config{Notify: true})
	r.must(err)
	defer db.Close()
	o := r.systems()
	each := 100
	if r.suite.short {
		each = 16
	}
	open := func(n int) {
		r.must(pgx.BeginFunc(ctx, r.pool, func(tx pgx.Tx) error {
			for kind := range codeSteps {
				_, err := db.TasksIn(tx).Answer(ctx, task.Answer{Task: codeID(kind, n), Name: "gate", ID: "open", Out: json.RawMessage(`""`)})
				if err != nil {
					return err
				}
			}
			return nil
		}))
	}
	deploy := func(p *process, later bool, meanwhile ...func()) {
		p.stop()
		for _, f := range meanwhile {
			f()
		}
		delete(p.More, "later")
		if later {
			p.More["later"] = "yes"
		}
		r.must(p.begin())
		p.awaitReady()
	}
	settled := func(what string) {
		r.await(what, func() bool {
			return r.countOf(`select count(*) from kinora.tasks where status in ('pending', 'claimed', 'failed') and kind <> 'code/new'`) == 0
		})
	}
	// The program that adds tasks of a new kind is deployed first.
	r.enqueue(taskDraft("code/new", "new-first", ""))
	var workers []*process
	for range 2 {
		workers = append(workers, r.worker(o, "code", nil))
	}
	for n := range each {
		for kind := range codeSteps {
			r.enqueue(taskDraft("code/"+kind, codeID(kind, n), ""))
		}
	}
	for _, p := range workers {
		p.awaitReady()
	}
	settled("all tasks wait")
	r.checkNewKindIsLeft()

	// One of two workers has the later code. While it is replaced, the other one has all tasks.
	n := 0
	round := func() {
		open(n)
		settled("each task has ended or waits")
		r.inject("finished_by_old_code", r.countOf(`select count(*) from kinora.tasks where status = 'done' and result #>> '{}' = $1 and id like '%-' || $2::int`, workers[1].Name, n))
		n++
	}
	round()
	r.checkNewKindIsLeft()
	deploy(workers[0], true, round)
	r.enqueue(taskDraft("code/new", "new-second", "")) // a worker knows the kind
	for n < each/4 {
		round()
	}
	deploy(workers[1], true)
	opened := n
	for ; n < each; n++ {
		open(n)
	}
	r.await("the new kind", func() bool {
		return r.countOf(`select count(*) from kinora.tasks where kind = 'code/new' and status = 'done'`) == 2
	})
	settled("each task has ended")
	if n := r.countOf(`select count(*) from kinora.task_trail where task in ('new-first', 'new-second') and what <> 'done'`); n > 0 {
		r.fail("lost 0, doubled 0, phantom %d, misordered 0: something has happened to a task of the new kind before it was done", n)
	}
	r.inject("changed", r.countOf(`select count(*) from kinora.tasks where status = 'abandoned' and code = 'changed'`))
	r.inject("went_on", r.countOf(`select count(*) from kinora.tasks where status = 'done' and kind = 'code/appended'`))
	r.countAbandonedLater(each - opened)

	for _, p := range workers {
		deploy(p, false)
	}
	requeued, err := db.RequeueTasks(ctx, task.Filter{Code: "changed", Status: []task.Status{task.Abandoned}}, task.Decision{By: "suite", Reason: "the old code is back"})
	r.must(err)
	r.inject("rolled_back", requeued)
	r.awaitEnded()
	r.stopWorkers()
	r.judgeCode(o, each)
}

// checkNewKindIsLeft fails the cell unless workers that do not define the new kind have left its task as it was added.
func (r *run) checkNewKindIsLeft() {
	n := r.countOf(`select count(*) from kinora.tasks where kind = 'code/new' and status = 'pending' and version = 1 and attempts = 0 and claimed_by = ''
		and not exists (select from kinora.task_trail where task = id)`)
	if n != 1 {
		r.fail("lost 0, doubled 0, phantom 1, misordered 0: a worker that does not define the kind of a task has changed it")
	}
	r.inject("unknown", n)
}

// countAbandonedLater fails the cell if the later code has ended a task that it could not go on with.
func (r *run) countAbandonedLater(least int) {
	for kind, c := range codeSteps {
		if got := r.countOf(`select count(*) from kinora.tasks where status = 'abandoned' and code = 'changed' and kind = $1`, "code/"+kind); !c.goesOn && got < least {
			r.fail("lost 0, doubled 0, phantom %d, misordered 0: only %d tasks of %s are abandoned, want at least %d", least-got, got, kind, least)
		}
	}
}

// judgeCode checks that each step was called once, by its old name, and that the errors name both.
func (r *run) judgeCode(o *outside, each int) {
	var v verdict
	tasks := r.taskRows()
	o.mu.Lock()
	left := maps.Clone(o.done)
	once := func(id, key string) {
		switch n := left[key]; {
		case n == 0:
			v.find(&v.Lost, id, "%s was not called", key)
		case n > 1:
			v.find(&v.Doubled, id, "%s was called %d times", key, n)
		}
		delete(left, key)
	}
	for kind, c := range codeSteps {
		for n := range each {
			id := codeID(kind, n)
			if tasks[id].Status != "done" {
				v.find(&v.Lost, id, "it is %q", tasks[id].Status)
			}
			for _, step := range c.old {
				if step != "gate" {
					once(id, id+"/"+step)
				}
			}
			if c.goesOn {
				delete(left, id+"/"+c.later[len(c.later)-1])
			}
		}
	}
	once("new", "new-first")
	once("new", "new-second")
	for key, n := range left {
		v.find(&v.Doubled, key, "a step of the later code was called %d times for a task of the old code", n)
	}
	var logs string
	for _, p := range r.of(laboring) {
		text, err := os.ReadFile(filepath.Join(r.dir, "log-"+p.Name))
		r.must(err)
		logs += strings.ReplaceAll(string(text), `\"`, `"`)
	}
	for _, kind := range slices.Sorted(maps.Keys(codeSteps)) {
		if !strings.Contains(logs, codeSteps[kind].names) {
			v.find(&v.Lost, kind, "no error names both: %s", codeSteps[kind].names)
		}
	}
	o.mu.Unlock()
	r.endTasks(o, &v, each*len(codeSteps))
}
