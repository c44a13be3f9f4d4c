package main

import (
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"
)

var deployCell = &cell{
	// Promise: G6.9, G7.10
	name: "deploy", number: 44,
	summary: "an old and a new program side by side, rolled forward and back under load and kill -9: a new schema version, type, handler and kind of tasks, a handler renamed and one removed; over the log, segments, a broker and tasks",
	full:    4 * time.Minute, short: 2 * time.Second, alone: true,
	requires: []string{"forward", "back", "side_by_side", "unable", "kill_consumer", "tasks_of_later"}, run: runDeploy,
}

// Numbers of the cell.
const (
	deployRounds   = 10 // of a full run: forward and back
	deploySegments = 4
	deployRate     = 300 // commands a second
	deployTasks    = 20  // of each kind in a step
)

// Limits of the lag at the 99th percentile, while a program that is able is alive.
const (
	lagBound     = 2 * time.Second
	lagAfterKill = lease + 3*time.Second
)

// deployment is what the cell knows of its processes.
type deployment struct {
	*run
	consumers []*process
	producer  *process
	tasks     int
	quiet     []string // windows in which both versions ran, and no process had been killed or replaced before, for SQL
	killed    []string // windows after kills
}

func runDeploy(r *run) {
	r.server(brokerConfig{Duplicate: 0.02}, idleLimit)
	r.readerTables(2)
	_, err := r.pool.Exec(r.suite.ctx, `create table lags (projector text not null, at timestamptz not null, ms bigint not null)`)
	r.must(err)
	o := r.systems()
	d := &deployment{run: r}
	d.producer = r.child(producing, func(s *settings) {
		s.Rate, s.Streams, s.Hot, s.Length, s.More = deployRate, 200, 0, 50, map[string]string{"version": earlier}
	})
	r.child(relaying, nil)
	for range 2 {
		d.consumers = append(d.consumers, r.child(reading, func(s *settings) {
			s.More = map[string]string{"version": earlier, "projectors": "2", "segments": strconv.Itoa(deploySegments), "segmentsOf": "1"}
		}))
		d.consumers = append(d.consumers, r.child(running, func(s *settings) {
			s.Control, s.More = false, map[string]string{"version": earlier, "log": "yes"}
		}))
		d.consumers = append(d.consumers, r.worker(o, "deploy", func(s *settings) { s.More["version"] = earlier }))
	}
	for _, p := range r.all {
		p.awaitReady()
	}
	w := r.watchProgress(2)
	r.gauge("unable", func() int { return r.heldAgainst("unable") })
	r.prove(func() {
		stop := r.flow()
		for round := range r.part(r.rounds()) {
			d.forward(round > 0 || r.has("forward"))
			d.back()
		}
		stop()
	})
	for _, p := range append(d.consumers, d.producer) {
		d.to(p, later)
	}
	w.fed.Store(true)
	r.awaitRead(w)
	r.waitDrained(10 * lease)
	r.awaitEnded()
	d.judge(o)
}

func (r *run) rounds() int {
	if r.suite.short {
		return 1
	}
	return deployRounds
}

// forward deploys the later program, process by process. The first time the consumers come before the producer: a handler
// begins to take events when it is there.
func (d *deployment) forward(known bool) {
	all := append([]*process{d.producer}, d.shuffled()...)
	if !known {
		all = append(all[1:], all[0])
	}
	d.producer.More = maps.Clone(d.producer.More)
	d.producer.More["shifts"] = "yes"
	d.roll(all, later)
	d.inject("forward", 1)
}

// back deploys the earlier program again. While none of the later programs runs, what only they can apply waits.
func (d *deployment) back() {
	d.roll(append(d.shuffled(), d.producer), earlier)
	d.inject("back", 1)
}

func (d *deployment) shuffled() []*process {
	all := append([]*process(nil), d.consumers...)
	for i := range all {
		j := i + d.intn(len(all)-i)
		all[i], all[j] = all[j], all[i]
	}
	return all
}

// roll replaces processes, and kills some. In the middle of it, both versions of each consumer run.
func (d *deployment) roll(all []*process, version string) {
	for _, p := range all {
		d.to(p, version)
		d.add()
		if d.intn(3) == 0 {
			d.kill(d.consumers[d.intn(len(d.consumers))])
		}
		d.sleep(d.between(50*time.Millisecond, 300*time.Millisecond))
		if d.isMixed() {
			d.sideBySide()
		}
	}
}

// to makes a process one of a version.
func (d *deployment) to(p *process, version string) {
	p.stop()
	p.More = maps.Clone(p.More)
	p.More["version"] = version
	d.must(p.begin())
	p.awaitReady()
}

func (d *deployment) kill(p *process) {
	begin := time.Now()
	p.restart()
	d.inject("kill_consumer", 1)
	p.awaitReady()
	d.killed = append(d.killed, window(begin, time.Now().Add(lease)))
}

// isMixed reports whether one of the two consumers of each role has the later program, and the other one has not.
func (d *deployment) isMixed() bool {
	of := map[role]int{}
	for _, p := range d.consumers {
		if p.More["version"] == later {
			of[p.Role]++
		}
	}
	return of[reading] == 1 && of[running] == 1 && of[laboring] == 1
}

// sideBySide lets both versions run undisturbed.
func (d *deployment) sideBySide() {
	d.sleep(lease + lagBound) // after the last process that was replaced
	begin := time.Now()
	d.sleep(2 * lease)
	d.quiet = append(d.quiet, window(begin, time.Now()))
	d.inject("side_by_side", 1)
}

// window returns a range of times for SQL.
func window(from, to time.Time) string {
	return fmt.Sprintf("tstzrange('%s', '%s')", from.UTC().Format(time.RFC3339Nano), to.UTC().Format(time.RFC3339Nano))
}

// add adds tasks of the kinds that the producer's version has.
func (d *deployment) add() {
	kinds := []string{"always"}
	if d.producer.More["version"] == later {
		kinds = append(kinds, "later")
		d.inject("tasks_of_later", deployTasks)
	}
	for range deployTasks {
		for _, kind := range kinds {
			d.enqueue(taskDraft("deploy/"+kind, deployID(kind, d.tasks), ""))
			d.tasks++
		}
	}
}

// judge compares all read models with the ledger, and the tasks with the calls of the system outside.
func (d *deployment) judge(o *outside) {
	r := d.run
	for _, p := range r.all {
		p.stop()
	}
	var v verdict
	_, h := r.judgeAppends(&v)
	r.judgeProjectors(2, false, h, &v)
	if n := r.countOf(`select count(*) from kinora.task_trail where what = 'abandoned'`); n > 0 {
		r.fail("%d tasks were abandoned", n)
	}
	o.mu.Lock()
	for id, t := range r.taskRows() {
		if t.Status != "done" || o.done[id] != 1 {
			r.fail("task %s is %s, and was called %d times", id, t.Status, o.done[id])
		}
	}
	o.mu.Unlock()
	r.lagWithin("lag_p99_ms", d.quiet, lagBound)
	r.lagWithin("lag_after_kill_p99_ms", d.killed, lagAfterKill)
	r.judge()
}

// lagWithin measures the lag of all projectors in windows.
func (r *run) lagWithin(what string, windows []string, limit time.Duration) {
	if len(windows) == 0 {
		return
	}
	var ms *float64
	err := r.pool.QueryRow(r.suite.ctx, `select percentile_disc(0.99) within group (order by ms) from lags where `+
		`exists (select from unnest(array[`+strings.Join(windows, ", ")+`]) w where at <@ w)`).Scan(&ms)
	r.must(err)
	if ms != nil {
		r.within(what, "99 of 100 changes came", time.Duration(*ms)*time.Millisecond, limit)
	}
}
