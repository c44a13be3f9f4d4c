package main

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/providers/postgres"
)

// cell is one kind of fault.
type cell struct {
	name         string
	number       int // number in the list of cells
	summary      string
	full         time.Duration // time to inject faults in a full run
	short        time.Duration // time to inject faults in a short run
	redelivers   bool          // the control arm must be wrong
	byFault      bool          // the control arm must be wrong even without the broker's copies
	byFaultLong  bool          // that, in runs of a minute or more
	alone        bool          // in the full form it has the machine for itself, because it limits times
	fails        bool          // handlers fail, or messages are corrupted
	requires     []string      // kinds that must be injected, or the cell proves nothing
	requiresLong []string      // kinds that must also be injected in runs of a minute or more
	run          func(*run)
}

// lease is the lease of relays and runners, unless a cell sets another.
const lease = 2 * time.Second

// run is one running cell. Its methods are for the cell's own goroutine, unless they say otherwise.
// Failures are recorded, and the cell continues if that is useful.
type run struct {
	suite  *suite
	cell   *cell
	length time.Duration // time to inject faults
	seed   uint64
	dir    string
	start  time.Time
	trace  *trace
	ahead  int           // limit on commands that are not acked yet; this backlog is the load
	span   time.Duration // time to inject faults in the present call of prove's work
	work   float64       // the work done, in multiples of the planned work
	needs  []string      // kinds that must be injected
	needy  bool          // messages stay parked that no program can apply
	gauges map[string]func() int
	// control counts the items of the control that are wrong, and those that the fault doubled.
	control func() (wrong, byFault int)

	pg      *pgtest.Server
	dsn     string // of the cell's database
	pool    *pgxpool.Pool
	broker  *broker
	all     []*process
	cleanup []func()
	last    []func() // called after the server's end
	flowing sync.WaitGroup
	held    atomic.Bool // no commands flow
	// starting is held by cells whose goroutines start children.
	starting sync.Mutex

	mu       sync.Mutex
	rnd      *rand.Rand
	injected map[string]int
	failures []string
	note     string
	// parked is the number of messages that may remain in the table of parked messages: those that
	// a person decided on.
	parked int
	past   int   // number of events that were never published
	arms   []arm // further arms, which judge judges
	asks   int64 // number of requests for rebuilds
	// fairAfter has the times until segments were shared fairly after each fault.
	fairAfter []time.Duration
	result    result
}

// intn draws from the cell's seed. Any goroutine may call it.
func (r *run) intn(n int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.rnd.IntN(n)
}

// between draws a duration.
func (r *run) between(least, most time.Duration) time.Duration {
	return least + time.Duration(r.intn(int(most-least)+1))
}

// inject counts injected faults. Any goroutine may call it.
func (r *run) inject(kind string, n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.injected[kind] += n
}

// fail records a failure: the cell fails, but continues. Any goroutine may call it.
func (r *run) fail(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	r.trace.printf("fail %s", text)
	r.say("FAILED: %s", text)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, text)
}

// measure keeps the worst value. Any goroutine may call it.
func (r *run) measure(what string, took time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.result.Measured == nil {
		r.result.Measured = map[string]int{}
	}
	r.result.Measured[what] = max(r.result.Measured[what], int(took.Milliseconds()))
}

// say prints a progress line.
func (r *run) say(format string, args ...any) {
	fmt.Printf("%6.1fs  %-10s %s\n", time.Since(r.start).Seconds(), r.cell.name, fmt.Sprintf(format, args...))
}

// giveUp is the panic value of a cell that cannot continue.
type giveUp struct{ error }

func (r *run) must(err error) {
	if err != nil {
		panic(giveUp{err})
	}
}

// await polls until done returns true. It gives up when the suite's patience ends.
func (r *run) await(what string, done func() bool) {
	if limit := r.suite.patience(); !r.awaitOr(limit, done) {
		r.must(fmt.Errorf("waited %s for %s", limit, what))
	}
}

// hasFailed reports whether a failure was recorded.
func (r *run) hasFailed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.failures) > 0
}

// awaitOr polls until done returns true, and reports whether that happened within limit.
func (r *run) awaitOr(limit time.Duration, done func() bool) bool {
	for begin := time.Now(); !done(); {
		if time.Since(begin) > limit {
			return false
		}
		r.sleep(5 * time.Millisecond)
	}
	return true
}

// sleep waits for d, or until the suite is interrupted.
func (r *run) sleep(d time.Duration) {
	pause(r.suite.ctx, d)
	r.must(r.suite.ctx.Err())
}

// server starts the cell's own server with its database and read models, and the broker.
func (r *run) server(b brokerConfig, more ...string) { r.serverWith(b, migrate, more...) }

func migrate(ctx context.Context, dsn string) error {
	db, err := postgres.Open(ctx, dsn, nil)
	if err != nil {
		return err
	}
	defer db.Close()
	return db.Migrate(ctx)
}

// serverWith is server with another migration.
func (r *run) serverWith(b brokerConfig, migrate func(ctx context.Context, dsn string) error, more ...string) {
	var err error
	r.pg, err = pgtest.Start(more...)
	r.must(err)
	ctx := r.suite.ctx
	r.dsn = r.pg.DSN
	config, err := pgxpool.ParseConfig(r.dsn + "&pool_max_conns=4&application_name=suite")
	r.must(err)
	r.pool, err = pgxpool.NewWithConfig(ctx, config)
	r.must(err)
	r.must(migrate(ctx, r.dsn))
	_, err = r.pool.Exec(ctx, tables+";"+heldAgainst)
	r.must(err)
	if b.Groups == nil {
		b.Groups = []string{"readers"}
	}
	t, err := openTrace(filepath.Join(r.dir, "trace-broker"))
	r.must(err)
	r.broker, err = newBroker(filepath.Join(r.dir, "broker"), r.seed, t, b)
	r.must(err)
	r.control = r.controlArm
	r.commonGauges()
}

// child starts a process. change, if not nil, modifies its settings.
func (r *run) child(as role, change func(*settings)) *process {
	n := 1
	for _, p := range r.all {
		if p.Role == as {
			n++
		}
	}
	p := &process{r: r, settings: settings{
		Role: as, Name: fmt.Sprintf("%s-%d", as, n), DSN: r.dsn, Socket: r.broker.socket, Dir: r.dir, Seed: r.seed + uint64(len(r.all)),
		Conns: 12, Lease: lease, Attempts: -1, Timeout: 10 * time.Second, Patience: r.suite.patience(),
		Streams: 300, Hot: 4, Workers: 16, Length: 200, Alone: true,
		Batch: 50, Ordered: n%2 == 1,
		Concurrency: concurrency(n, r.seed), Group: r.broker.cfg.Groups[0], Control: true, Batched: as == running && n%2 == 0,
	}}
	if change != nil {
		change(&p.settings)
	}
	var err error
	p.status, err = openStatus(filepath.Join(r.dir, "status-"+p.Name))
	r.must(err)
	r.all = append(r.all, p)
	r.must(p.begin())
	return p
}

// concurrency is one worker for half of the runners and four for the others. The seed decides
// which.
func concurrency(n int, seed uint64) int {
	if (uint64(n/2)+seed)%2 == 0 {
		return 1
	}
	return 4
}

// startAll starts a producer, relays and runners, and waits until all work.
func (r *run) startAll(relays, runners int, change func(*settings)) (producer *process, rs, ps []*process) {
	producer = r.child(producing, change)
	for range relays {
		rs = append(rs, r.child(relaying, change))
	}
	for range runners {
		ps = append(ps, r.child(running, change))
	}
	for _, p := range r.all {
		p.awaitReady()
	}
	return producer, rs, ps
}

// of returns the processes of a role.
func (r *run) of(as role) (ps []*process) {
	for _, p := range r.all {
		if p.Role == as {
			ps = append(ps, p)
		}
	}
	return ps
}

// sum adds up a status word of all processes of a role.
func (r *run) sum(as role, word int) (n int64) {
	for _, p := range r.of(as) {
		n += p.status.get(word)
	}
	return n
}

func (r *run) gate(open int64) {
	for _, p := range r.of(producing) {
		p.status.set(wordGate, open)
	}
}

// flow lets commands flow, as fast as they are acked, until stop is called.
func (r *run) flow() (stop func()) {
	done := make(chan struct{})
	r.flowing.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		defer r.gate(0)
		for {
			var open int64
			if r.sum(producing, wordAcked)-int64(r.broker.count("acked")) < int64(r.ahead) && !r.held.Load() {
				open = 1
			}
			r.gate(open)
			select {
			case <-tick.C:
			case <-done:
				return
			}
		}
	})
	var once sync.Once
	stop = func() { once.Do(func() { close(done) }); r.flowing.Wait() }
	r.cleanup = append(r.cleanup, stop)
	return stop
}

// during lets commands flow and calls work repeatedly meanwhile, for the time in span, and at least once.
func (r *run) during(work func()) {
	stop := r.flow()
	defer stop()
	for begin, n := time.Now(), 0; n == 0 || time.Since(begin) < r.span; n++ {
		work()
	}
}

// waitDrained waits until every event is published and acked, no copy is pending, and no parked message
// is retried automatically. It fails a full run if that takes longer than within. Suspects whose attempt
// ended with its process have more time: see docs/adr/0014.
func (r *run) waitDrained(within time.Duration) {
	begin, took := time.Now(), time.Duration(0)
	for {
		rest, putOff, err := r.backlog()
		if err == nil && rest == "" && took == 0 {
			took = time.Since(begin)
		}
		if err == nil && rest == "" && putOff == 0 {
			break
		}
		if limit := r.suite.patience(); time.Since(begin) > limit {
			r.fail("not drained in %s: %s, %d lanes delayed, %v; first %s", limit, rest, putOff, err, r.firstLane())
			return
		}
		r.sleep(10 * time.Millisecond)
	}
	all := time.Since(begin)
	r.measure("put_off_ms", all-took)
	r.within("drained_ms", "drained", took, within)
	r.say("drained in %s, suspects in %s", took.Round(time.Millisecond), all.Round(time.Millisecond))
}

// backlogSQL counts events, open entries and held lanes. A lane is delayed if it is not due yet and
// an attempt at the suspect at its front has begun before.
const backlogSQL = `
select (select count(*) from kinora.events), (select count(*) from kinora.outbox where status not in ('published', 'skipped')),
	count(h) filter (where not h.put_off), count(h) filter (where h.put_off)
from (
	select h.due_at > clock_timestamp() and f.code = 'crashed' and f.attempts > 1 as put_off
	from kinora.holds h, lateral (
		select code, attempts from kinora.parked p
		where p.projector = h.projector and p.lane = h.lane and p.state in ('waiting', 'stuck') order by id limit 1) f
	where h.due_at < case when $1 then timestamptz '9999-12-30' else 'infinity' end) h`

// firstLane describes the first lane that is due for a retry.
func (r *run) firstLane() (text string) {
	err := r.pool.QueryRow(r.suite.ctx, `
		select format('%s, due in %s: %s', h.projector, h.due_at - clock_timestamp(), coalesce((
			select string_agg(format('%s %s %s %s attempts %s handlers %s', p.id, p.state, p.class, p.code, p.attempts, p.handlers), ', ' order by p.id)
			from kinora.parked p where p.projector = h.projector and p.lane = h.lane and p.state in ('waiting', 'stuck')), 'empty'))
		from kinora.holds h where h.due_at < 'infinity' order by h.due_at limit 1`).Scan(&text)
	if err != nil {
		return err.Error()
	}
	return text
}

// backlog describes the remaining work. putOff counts the lanes that are delayed because an attempt
// at a suspect ended with its process.
func (r *run) backlog() (rest string, putOff int, err error) {
	for _, p := range r.of(producing) {
		if p.open() && p.status.get(wordReady) == 1 {
			return "commands are in flight", 0, nil
		}
	}
	var events, entries, due int
	ctx, cancel := context.WithTimeout(r.suite.ctx, 10*time.Second)
	defer cancel()
	if err = r.pool.QueryRow(ctx, backlogSQL, r.needy).Scan(&events, &entries, &due, &putOff); err != nil {
		return "", 0, err
	}
	messages, idle := r.broker.idle()
	if entries == 0 && idle && messages+r.past == events && due == 0 {
		return "", putOff, nil
	}
	return fmt.Sprintf("%d events, %d messages, %d open entries, idle: %t, %d lanes to retry", events, messages, entries, idle, due), putOff, nil
}

// end stops all processes and releases the cell's resources.
func (r *run) end() {
	for _, stop := range slices.Backward(r.cleanup) {
		stop()
	}
	for _, p := range r.all {
		p.destroy()
	}
	if r.broker != nil {
		r.broker.close()
	}
	if r.pool != nil {
		r.pool.Close()
	}
	if r.pg != nil {
		r.pg.Stop()
	}
	for _, do := range r.last {
		do()
	}
	_ = r.trace.close()
}

// kinds returns the counts of injected faults.
func (r *run) kinds() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.injected)
}

func newRun(s *suite, c *cell) (*run, error) {
	dir := filepath.Join(s.dir, c.name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	t, err := openTrace(filepath.Join(dir, "trace-suite"))
	if err != nil {
		return nil, err
	}
	seed := s.seed ^ uint64(c.number)<<32
	r := &run{
		suite: s, cell: c, length: c.full, seed: seed, dir: dir, start: time.Now(), trace: t, ahead: 500,
		rnd: rand.New(rand.NewPCG(seed, 0)), injected: map[string]int{}, gauges: map[string]func() int{}, needs: slices.Clone(c.requires),
	}
	switch {
	case s.length > 0:
		r.length = s.length
	case s.short:
		r.length = c.short
	}
	if r.span = r.length; r.isLong() {
		r.needs = append(r.needs, c.requiresLong...)
	}
	return r, nil
}
