package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	goredis "github.com/redis/go-redis/v9"

	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/task"
)

var deployCell = &cell{
	// Promise: G6.9, G7.10
	name: "deploy", number: 46,
	summary: "an old and a new program side by side, rolled forward and back under load and kill -9: a new schema version, type, handler, kind of tasks and version of a read model, a handler and a projector renamed, a handler removed; over the log, segments, a broker, Redis and tasks",
	full:    6 * time.Minute, short: 2 * time.Second, alone: true,
	requires: []string{"forward", "back", "side_by_side", "unable", "kill_consumer", "tasks_of_later", "promoted"}, run: runDeploy,
}

// Numbers of the cell.
const (
	deployRounds    = 10 // of a full run: forward and back
	deployReplicas  = 2  // processes of each role
	deploySegments  = 4
	deployReaders   = 2   // projectors of a reader: one of them with segments
	deployRate      = 300 // commands a second
	deployRateShort = 100
	deployTasks     = 20 // of each kind in a step
)

// Limits of the lag at the 99th percentile, while a program that is able is alive.
const (
	lagBound     = 2 * time.Second
	lagAfterKill = lease + 3*time.Second
)

// deployment is what the cell knows of its processes.
type deployment struct {
	*run
	consumers [][]*process // by role; each has replicas
	producer  *process
	client    *goredis.Client // nil: Redis is skipped
	outside   *outside
	tasks     int
	quiet     []string // ranges of time for SQL: events recorded then were applied while both releases ran undisturbed
	killed    []string // events recorded then were applied after a kill
}

func runDeploy(r *run) {
	d, rounds := &deployment{run: r}, deployRounds
	if r.suite.short {
		rounds = 1
	}
	d.start()
	r.gauge("unable", func() int { return r.heldAgainst("unable") })
	r.prove(func() {
		stop := r.flow()
		defer stop()
		for range r.part(rounds) {
			d.forward()
			d.back()
		}
	})
	d.settle()
	d.judge()
}

// start starts the servers, and all processes with the earlier release.
func (d *deployment) start() {
	d.server(brokerConfig{Duplicate: 0.02})
	d.readerTables(deployReaders)
	d.addArms(formerName)
	d.arms = nil // judge has its verdict
	_, err := d.pool.Exec(d.suite.ctx, callsTable+`; create table lags (projector text not null, at timestamptz not null, ms bigint not null)`)
	d.must(err)
	d.outside = d.systems()
	of := map[string]string{"projectors": strconv.Itoa(deployReaders), "segments": strconv.Itoa(deploySegments), "segmentsOf": "1"}
	if !skipsRedis() {
		server, err := redistest.Start("--save", "", "--appendonly", "no")
		d.must(err)
		d.last = append(d.last, server.Stop)
		o, err := goredis.ParseURL(server.URL)
		d.must(err)
		d.client, of["redis"] = goredis.NewClient(o), server.URL
		d.cleanup = append(d.cleanup, func() { _ = d.client.Close() })
	}
	roles := map[role]map[string]string{
		reading: of, running: {"log": "yes"}, laboring: {"program": "deploy", "outside": d.outside.url}, building: {"built": readName},
	}
	begin := func(as role) *process {
		return d.child(as, func(s *settings) {
			s.Control, s.Streams, s.Hot, s.Length, s.More = false, 200, 0, 50, roles[as]
			if s.Rate = deployRate; d.suite.short {
				s.Rate = deployRateShort
			}
			s.setRelease(earlier)
		})
	}
	d.producer = begin(producing)
	d.child(relaying, nil)
	for _, as := range []role{reading, running, laboring, building} {
		var replicas []*process
		for range deployReplicas {
			replicas = append(replicas, begin(as))
		}
		d.consumers = append(d.consumers, replicas)
	}
	for _, p := range d.all {
		p.awaitReady()
	}
}

// forward deploys the later release, process by process. The first time the producer is in the middle: a handler begins to
// take events when a program with it has started. Later it is the first, so that no program is able to apply what it appends.
func (d *deployment) forward() {
	d.producer.More["shifts"] = "yes"
	half := func() {
		d.await("the new handlers to take events", func() bool { return d.countOf(notBegunSQL, readName, shiftedAs) == 0 })
		d.to(d.producer, later)
	}
	if d.has("forward") {
		d.to(d.producer, later)
		half = func() {}
	}
	d.roll(later, half)
	d.promote(2)
	d.inject("forward", 1)
}

// notBegunSQL counts the read models that do not take events of a type. The earlier version of the one with versions never does.
const notBegunSQL = `select count(*) from kinora.checkpoints where not (projector = $1 and generation = 1)
	and not handlers @> jsonb_build_array(jsonb_build_object('type', $2::text))`

// back deploys the earlier release again. While none of the later processes runs, what only they can apply waits.
func (d *deployment) back() {
	d.roll(earlier, func() {})
	d.promote(1)
	d.to(d.producer, earlier)
	d.inject("back", 1)
}

// promote makes a generation of the read model live, if it is not: the first time, the later release builds it.
func (d *deployment) promote(number int) {
	d.await("the generation of the later release", func() bool { return len(d.fed(readName)) == 2 })
	if d.generation(readName, number).State == "standby" {
		d.run.promote("promoted_ms", readName, number, d.suite.patience())
		d.inject("promoted", 1)
	}
}

// roll replaces one process of each role, calls half, lets both releases run side by side, and replaces the others.
func (d *deployment) roll(release string, half func()) {
	for i := range deployReplicas {
		for j := range d.consumers { // in any order
			k := j + d.intn(len(d.consumers)-j)
			d.consumers[j], d.consumers[k] = d.consumers[k], d.consumers[j]
			d.to(d.consumers[j][i], release)
			d.add()
			if d.intn(3) == 0 {
				d.kill()
			}
			d.sleep(d.between(50*time.Millisecond, 300*time.Millisecond))
		}
		if i == 0 {
			half()
			d.sideBySide()
		}
	}
}

// to makes a process one of a release.
func (d *deployment) to(p *process, release string) {
	p.stop()
	p.setRelease(release)
	d.must(p.begin())
	p.awaitReady()
}

// kill kills a process of any role.
func (d *deployment) kill() {
	replicas := d.consumers[d.intn(len(d.consumers))]
	p := replicas[d.intn(len(replicas))]
	p.restart()
	d.inject("kill_consumer", 1)
	p.awaitReady()
}

// sideBySide lets both releases run, first undisturbed, and then after a kill.
func (d *deployment) sideBySide() {
	rest := lease
	if d.suite.short {
		rest = lease / 2
	}
	d.sleep(2 * rest) // after the last process that was replaced
	begin := time.Now()
	d.sleep(rest)
	d.quiet = append(d.quiet, window(begin, time.Now()))
	d.sleep(rest)
	begin = time.Now()
	d.kill()
	d.killed = append(d.killed, window(begin, begin.Add(lease)))
	d.sleep(2 * rest)
	d.inject("side_by_side", 1)
}

// window returns a range of times for SQL.
func window(from, to time.Time) string {
	return fmt.Sprintf("tstzrange('%s', '%s')", from.UTC().Format(time.RFC3339Nano), to.UTC().Format(time.RFC3339Nano))
}

// add adds tasks of the kinds that the producer's release has.
func (d *deployment) add() {
	kinds := []string{"always"}
	if d.producer.More["release"] == later {
		kinds = append(kinds, "later")
		d.inject("tasks_of_later", deployTasks)
	}
	var drafts []task.Draft
	for range deployTasks {
		for _, kind := range kinds {
			drafts = append(drafts, taskDraft("deploy/"+kind, fmt.Sprint(kind, "-", d.tasks), ""))
			d.tasks++
		}
	}
	d.enqueue(drafts...)
}

// settle deploys the later release for good, and waits until everything is applied.
func (d *deployment) settle() {
	// The later release does not have the projector "former".
	d.await("what is parked by a projector that is renamed", func() bool {
		return d.countOf(`select count(*) from kinora.parked where projector = $1`, formerName) == 0
	})
	for _, replicas := range d.consumers {
		for _, p := range replicas {
			d.to(p, later)
		}
	}
	d.to(d.producer, later)
	d.promote(2)
	d.drop()
	d.waitDrained(10 * lease)
	d.awaitApplied(readName)
	all := d.countOf(`select count(*) from kinora.events`)
	for i := range deployReaders {
		d.await(readerName(i), func() bool {
			return d.countOf(`select coalesce(sum(cardinality(items)), 0) from `+readerPrefix(i)+`lists`) >= all
		})
	}
	if d.client != nil {
		d.await(redisName, func() bool {
			n, err := countRedis(d.suite.ctx, d.client, redisName)
			return err == nil && n >= all
		})
	}
	d.awaitEnded()
}

// drop drops the generation of the earlier release, with what it waits for. Its lists have no holes.
func (d *deployment) drop() {
	if n := d.countOf(`select count(*) from logged_lists_g1 where items <> (select array_agg(i) from generate_series(1, cardinality(items)) i)`); n > 0 {
		d.fail("lost 0, doubled 0, phantom 0, misordered %d: the generation of the earlier release has lists with holes", n)
	}
	db, err := postgres.New(d.pool, nil)
	d.must(err)
	defer db.Close()
	d.must(projector.Control(d.suite.ctx, db, readName, 1, projector.Drop, bySuite))
	d.to(d.of(building)[0], later) // a runner that starts deletes its rows
	d.await("the rows of a dropped generation to be deleted", func() bool {
		return d.countOf(`select count(*) from kinora.parked where projector = $1 and generation = 1`, readName) == 0
	})
}

// judge compares all read models with the ledger, and the tasks with the calls of the system outside.
func (d *deployment) judge() {
	for _, p := range d.all {
		p.stop()
	}
	var v verdict
	_, h := d.judgeAppends(&v)
	compare := func(name string, m model, err error) {
		d.must(err)
		var one verdict
		judgeModel(h, m, &one)
		v.merge(name, &one)
	}
	if d.client != nil {
		m, err := readRedis(d.suite.ctx, d.client, redisName)
		compare(redisName, m, err)
	}
	m, wrong, err := readBuilt(d.suite.ctx, d.pool, readName, d.generation(readName, 2))
	if compare(readName, m, err); len(wrong) > 0 {
		d.fail("lost 0, doubled 0, phantom %d, misordered 0: items of another version of %s", len(wrong), readName)
	}
	// What one of two names has parked comes later, so that there is no order.
	one := d.verdictOf(armKinds[formerName], h)
	d.inject("renamed_misordered", one.Misordered)
	if one.Misordered = 0; !one.ok() {
		v.merge(formerName, &one)
	}
	d.judgeProjectors(deployReaders, false, h, &v)
	d.judgeTasks()
	lost, doubled := d.countOf(neverCalledSQL), d.countOf(calledAgainSQL)
	if lost+doubled > 0 {
		d.fail("lost %d, doubled %d, phantom 0, misordered 0: calls of other systems by handlers of %s", lost, doubled, readName)
	}
	d.lagWithin("lag_p99", d.quiet, lagBound)
	d.lagWithin("lag_after_kill_p99", d.killed, lagAfterKill)
	d.run.judge()
}

// The calls of other systems by the handlers of a read model with generations: once for each event, whichever generation is
// live. A generation without a handler for "shifted" passes such events while it is live. Then the other one takes them for
// events of the past, for which no system is called (R8.1).
const (
	neverCalledSQL = `select count(*) from kinora.events e where type = 'moved' and not exists (
		select from calls c where c.stream = e.stream and c.n = (e.data->>'n')::int)`
	calledAgainSQL = `select count(*) from (select from calls group by stream, n having count(*) > 1) c`
)

func (d *deployment) judgeTasks() {
	if n := d.countOf(`select count(*) from kinora.task_trail where what = 'abandoned'`); n > 0 {
		d.fail("%d tasks were abandoned", n)
	}
	rows := d.taskRows()
	d.outside.mu.Lock()
	defer d.outside.mu.Unlock()
	for id, t := range rows {
		if t.Status != "done" || d.outside.done[id] == 0 {
			d.fail("task %s is %s, and was called %d times", id, t.Status, d.outside.done[id])
		}
	}
	if len(rows) != d.tasks {
		d.fail("%d tasks, want %d", len(rows), d.tasks)
	}
}

// lagWithin measures the lag of each projector in windows.
func (r *run) lagWithin(what string, windows []string, limit time.Duration) {
	rows, err := r.pool.Query(r.suite.ctx, `select projector, percentile_disc(0.99) within group (order by ms) from lags where `+
		`exists (select from unnest(array[`+strings.Join(windows, ", ")+`]) w where at <@ w) group by projector order by projector`)
	r.must(err)
	var name string
	var ms int64
	_, err = pgx.ForEachRow(rows, []any{&name, &ms}, func() error {
		r.within(what+"_"+strings.ReplaceAll(name, "-", "_")+"_ms", fmt.Sprintf("%s: 99 of 100 changes of %s came", what, name), time.Duration(ms)*time.Millisecond, limit)
		return nil
	})
	r.must(err)
}
