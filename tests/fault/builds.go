package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
)

// builtLease is the lease of runners that rebuild.
const builtLease = time.Second

// builtGeneration is a generation as read by plain SQL.
type builtGeneration struct {
	Number  int
	State   string
	Suffix  string
	Version int
	Done    bool
}

const builtGenerationsSQL = `
select generation, state, coalesce(data->>'suffix', ''), coalesce((data->>'newest')::int, 1), coalesce((data->>'done')::boolean, false)
from kinora.generations where projector = $1 order by generation`

// generations returns the generations of a projector.
func (r *run) generations(name string) []builtGeneration {
	rows, err := r.pool.Query(r.suite.ctx, builtGenerationsSQL, name)
	r.must(err)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[builtGeneration])
	r.must(err)
	return all
}

// generation returns one of them, or a zero one.
func (r *run) generation(name string, number int) (g builtGeneration) {
	for _, g := range r.generations(name) {
		if g.Number == number {
			return g
		}
	}
	return g
}

// builder starts a process that feeds and rebuilds read models.
func (r *run) builder(names string, change func(*settings)) *process {
	return r.child(building, func(s *settings) {
		s.Lease, s.Concurrency = builtLease, 1+len(r.of(building))%2
		s.Batched = len(r.of(building))%2 == 1
		s.More = map[string]string{"built": names}
		if change != nil {
			change(s)
		}
	})
}

// requestOfAll lets each builder request the same rebuild at the same time. All must get the number of
// the same new generation.
func (r *run) requestOfAll(name string, how projector.RebuildHow) (number int) {
	r.asks++
	was := r.generations(name)
	word := askWord(r.asks, name, how)
	ps := r.of(building)
	for _, p := range ps {
		p.status.set(wordAsk, word)
	}
	r.await("the answers to a request", func() bool {
		return !slices.ContainsFunc(ps, func(p *process) bool { return p.status.get(wordAnswer) != word })
	})
	for _, p := range ps {
		n := int(p.status.get(wordNumber))
		if number == 0 {
			number = n
		}
		if n != number || n != was[len(was)-1].Number+1 {
			r.fail("lost 0, doubled 1: %s got generation %d of %s, want %d for each of %d requests at once", p.Name, n, name, was[len(was)-1].Number+1, len(ps))
		}
	}
	r.inject("requests", len(ps))
	r.inject("rebuilds_"+how.String(), 1)
	return number
}

// isBuilt reports whether a rebuild is over.
func (r *run) isBuilt(name string, number int) bool {
	g := r.generation(name, number)
	if g.State == "retired" {
		r.must(fmt.Errorf("generation %d of %s was given up", number, name))
	}
	return g.State == "live" && g.Done
}

// promote makes a generation live. It measures how long that takes.
func (r *run) promote(what, name string, number int, limit time.Duration) {
	db, err := postgres.New(r.pool, nil)
	r.must(err)
	defer db.Close()
	begin := time.Now()
	r.must(projector.Control(r.suite.ctx, db, name, number, projector.Promote, bySuite))
	r.await(fmt.Sprintf("generation %d of %s to be live", number, name), func() bool {
		return r.generation(name, number).State == "live"
	})
	r.within(what, fmt.Sprintf("generation %d of %s was live again", number, name), time.Since(begin), limit)
}

// standby returns the generation that stands by, or a zero one.
func (r *run) standby(name string) (g builtGeneration) {
	for _, one := range r.generations(name) {
		if one.State == "standby" {
			g = one
		}
	}
	return g
}

// awaitFed waits until a generation is close to the live one.
func (r *run) awaitFed(name string, number int) {
	r.await(fmt.Sprintf("generation %d of %s to be fed", number, name), func() bool {
		return r.countOf(`
			select count(*) from kinora.checkpoints c, kinora.checkpoints l join kinora.generations g using (projector, generation)
			where c.projector = $1 and c.generation = $2 and l.projector = $1 and g.state = 'live' and c.position > l.position - 200`, name, number) == 1
	})
}

// awaitApplied waits until every generation that is live or stands by has all events that exist now.
func (r *run) awaitApplied(names ...string) {
	begin, all := time.Now(), r.countOf(`select count(*) from kinora.events`)
	for _, name := range names {
		if !r.awaitOr(r.suite.patience(), func() bool {
			for _, g := range r.fed(name) {
				if r.countOf(fmt.Sprintf(`select coalesce(sum(cardinality(items)), 0) from %s_lists%s`, name, g.Suffix)) < all {
					return false
				}
			}
			return true
		}) {
			r.fail("%s does not have all events in %s", name, r.suite.patience())
		}
	}
	r.measure("applied_ms", time.Since(begin))
}

// fed returns the generations of a projector that have all events.
func (r *run) fed(name string) []builtGeneration {
	return slices.DeleteFunc(r.generations(name), func(g builtGeneration) bool { return g.State != "live" && g.State != "standby" })
}

// judgeBuilt compares each read model with the ledger.
func (r *run) judgeBuilt(watches []*builtWatch, names ...string) {
	for _, p := range r.all {
		p.stop()
	}
	var v verdict
	ledger, h := r.judgeAppends(&v)
	for _, name := range names {
		for _, g := range r.fed(name) {
			m, wrong, err := readBuilt(r.suite.ctx, r.pool, name, g)
			r.must(err)
			var one verdict
			judgeModel(h, m, &one)
			for _, stream := range wrong {
				one.find(&one.Phantom, stream, "an item of another version than %d", g.Version)
			}
			v.merge(fmt.Sprintf("%s generation %d (%s)", name, g.Number, g.State), &one)
			r.inject("judged_generations", 1)
		}
		r.judgeCalls(name, h, &v)
	}
	for _, a := range r.arms {
		r.judgeArm(a, h)
	}
	for _, w := range watches {
		w.stop()
		v.merge("the reader of "+w.name, &w.found)
		r.inject("looks", w.looks)
	}
	for _, why := range v.reasons {
		r.trace.printf("verdict %s", why)
	}
	if !v.ok() {
		r.fail("lost %d, doubled %d, phantom %d, misordered %d: %s", v.Lost, v.Doubled, v.Phantom, v.Misordered, v.reasons[0])
	}
	if n := r.countOf(`select count(*) from kinora.parked where state in ('waiting', 'stuck') and projector = any($1)`, names); n > 0 {
		r.fail("%d messages are parked", n)
	}
	r.tally(ledger, &v)
	r.requireKinds()
}

// judgeCalls checks that a handler was not replaying once for each event.
func (r *run) judgeCalls(name string, h history, v *verdict) {
	rows, err := r.pool.Query(r.suite.ctx, `select stream, n, count(*) from calls where projector = $1 group by 1, 2`, name)
	r.must(err)
	calls, stream, n, times := map[string]map[int]int{}, "", 0, 0
	_, err = pgx.ForEachRow(rows, []any{&stream, &n, &times}, func() error {
		if calls[stream] == nil {
			calls[stream] = map[int]int{}
		}
		calls[stream][n] = times
		return nil
	})
	r.must(err)
	for _, stream := range slices.Sorted(maps.Keys(h)) {
		for n := range h[stream] {
			switch times := calls[stream][n]; {
			case times == 0:
				v.find(&v.Lost, stream, "%s never called other systems for %d", name, n)
			case times > 1:
				v.find(&v.Doubled, stream, "%s called other systems %d times for %d", name, times, n)
			}
		}
	}
}

// readBuilt reads the tables of a generation. wrong are streams with items of another version.
func readBuilt(ctx context.Context, pool *pgxpool.Pool, name string, g builtGeneration) (m model, wrong []string, err error) {
	if m, err = readTables(ctx, pool, name+"_sums"+g.Suffix, name+"_lists"+g.Suffix); err != nil {
		return m, nil, err
	}
	for stream, items := range m.Lists {
		own, version, ok := fromVersion(items)
		if m.Lists[stream] = own; !ok || version != g.Version {
			wrong = append(wrong, stream)
		}
		m.Totals[stream] /= int64(g.Version)
	}
	return m, wrong, nil
}

// builtWatch is a reader that polls the views of a read model. It must never see a list with a hole,
// nor lists of two versions. Except during a rebuild in place, no list gets shorter.
type builtWatch struct {
	name  string
	all   sync.WaitGroup
	end   context.CancelFunc
	mu    sync.Mutex
	empty bool // it is being rebuilt in place
	most  map[string]int
	found verdict
	looks int
}

// watchBuilt begins to poll. The views must exist.
func (r *run) watchBuilt(name string) *builtWatch {
	ctx, cancel := context.WithCancel(r.suite.ctx)
	w := &builtWatch{name: name, end: cancel, most: map[string]int{}}
	conn, err := pgx.Connect(ctx, r.dsn)
	r.must(err)
	w.all.Go(func() {
		defer func() { _ = conn.Close(context.Background()) }()
		for ctx.Err() == nil {
			begin := time.Now()
			if err := w.look(ctx, conn); err != nil && ctx.Err() == nil {
				r.fail("the reader of %s: %v", name, err)
				return
			}
			pause(ctx, max(30*time.Millisecond, 3*time.Since(begin))) // it reads everything
		}
	})
	r.cleanup = append(r.cleanup, w.stop)
	return w
}

func (w *builtWatch) stop() { w.end(); w.all.Wait() }

// inPlace sets whether the read model is being rebuilt in place.
func (w *builtWatch) inPlace(is bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.empty = is
	clear(w.most)
}

func (w *builtWatch) look(ctx context.Context, conn *pgx.Conn) error {
	w.mu.Lock() // also during the query: its result is compared with earlier ones
	defer w.mu.Unlock()
	rows, err := conn.Query(ctx, fmt.Sprintf(`
		select coalesce(l.stream, s.stream), coalesce(l.items, '{}'), s.total is not null and l.items is not null
		from %[1]s_lists l full join %[1]s_sums s on s.stream = l.stream`, w.name))
	if err != nil {
		return err
	}
	w.looks++
	left := maps.Clone(w.most)
	v, is, stream, both := &w.found, 0, "", false
	var items []int
	_, err = pgx.ForEachRow(rows, []any{&stream, &items, &both}, func() error {
		own, version, ok := fromVersion(items)
		if is == 0 {
			is = version
		}
		if !ok || version != is {
			v.find(&v.Phantom, stream, "its list is of version %d, and others are of version %d", version, is)
		}
		if !both {
			v.find(&v.Phantom, stream, "only one of two views shows it")
		}
		for i, n := range own {
			if n != i+1 {
				v.find(&v.Misordered, stream, "item %d is %d", i+1, n)
				break
			}
		}
		if len(own) < w.most[stream] && !w.empty {
			v.find(&v.Lost, stream, "the list has %d items, and had %d", len(own), w.most[stream])
		}
		w.most[stream] = max(w.most[stream], len(own))
		delete(left, stream)
		items = nil
		return nil
	})
	if !w.empty && err == nil {
		for stream, n := range left {
			v.find(&v.Lost, stream, "it is missing, and had %d items", n)
		}
	}
	return err
}
