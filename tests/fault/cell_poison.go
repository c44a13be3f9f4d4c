package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

var poisonCell = &cell{
	// Promise: G6.2, G6.6, G6.8, G6.11, G6.13
	name: "poison", number: 13, summary: "handlers that panic, call runtime.Goexit, exit, or do not return, on one key each; then fixed and replayed",
	full: 45 * time.Second, short: 3 * time.Second, redelivers: true, fails: true,
	requires: []string{"exit", "held", "neighbours", "requeued"}, run: runPoison,
}

const (
	poisonN      = 5                       // this command of a stream is the poison
	poisonTries  = 3                       // attempts before a message is stuck
	poisonLimit  = 1500 * time.Millisecond // a handler's deadline, in the full form
	poisonShort  = 4 * time.Second         // and in the short form, on a machine that may be busy
	poisonStatus = 3                       // exit status of a process that a handler ends

	// openParked counts the messages that are waiting or stuck.
	openParked = `select count(*) from kinora.parked where state in ('waiting', 'stuck')`
)

// refusedStream is the stream with the message that the broker refuses.
const refusedStream = "account-16.0"

var errPoison = errors.New("poison")

// killer lists the codes of a message that ends its process.
var killer = []string{crashedCode}

// poisons maps a stream to what its handler does to one message, and to the codes with which that
// message may be parked: another poison may end the process at the same time, which counts too.
var poisons = map[string]struct {
	do    func(w *work) error
	codes []string
}{
	"account-10.0": {func(*work) error { panic(errPoison) }, []string{"panic", crashedCode}},
	"account-11.0": {func(*work) error { runtime.Goexit(); return nil }, []string{"goexit", crashedCode}},
	"account-12.0": {func(*work) error { os.Exit(poisonStatus); return nil }, killer},
	"account-13.0": {func(w *work) error { time.Sleep(w.Timeout + 500*time.Millisecond); return nil }, []string{"deadline", crashedCode}},
	// Past its deadline and the grace period.
	"account-14.0": {func(w *work) error { time.Sleep(w.Timeout + 7500*time.Millisecond); return nil }, []string{"stuck", crashedCode}},
	"account-15.0": {func(*work) error { return errPoison }, []string{"", crashedCode}},
}

func poisonous(_ context.Context, w *work, e moved, _ func(string, ...any) error) error {
	p, ok := poisons[e.Stream]
	if !ok || e.N != poisonN || w.More["mended"] != "" {
		return nil
	}
	return p.do(w)
}

func runPoison(r *run) {
	var taken atomic.Bool // true once the broker accepts the refused message
	r.server(brokerConfig{Duplicate: 0.02, RefuseOne: func(l letter) bool {
		return !taken.Load() && l.Meta[keyHeader] == refusedStream && l.Meta["kinora_version"] == strconv.Itoa(poisonN)
	}})
	limit := poisonLimit
	if r.suite.short {
		limit = poisonShort
	}
	_, _, runners := r.startAll(1, 2, func(s *settings) {
		s.Streams, s.Hot, s.Attempts, s.Timeout, s.More = 40, 0, poisonTries, limit, map[string]string{"harm": "poisonous"}
		if s.Role == relaying {
			s.Attempts *= 3 // on a slow machine, leases of entries end that nothing refuses
		}
	})
	for _, p := range runners {
		p.onEnd(func(code int) bool {
			if code == poisonStatus {
				r.inject("exit", 1)
				go func() { _ = p.begin() }()
			}
			return code == poisonStatus
		})
	}
	for key := range poisons {
		r.gauge("stuck_"+key, func() int {
			return r.countOf(`select count(*) from kinora.parked where key = $1 and state = 'stuck' and class <> 'held'`, key)
		})
		r.needs = append(r.needs, "stuck_"+key)
	}
	r.gauge("held", func() int { return r.countOf(`select count(*) from kinora.parked where class = 'held'`) })
	r.gauge("neighbours", func() int {
		return r.countOf(`select count(*) from lists where not stream = any($1)`, slices.Collect(maps.Keys(poisons)))
	})
	r.prove(func() {
		r.during(func() { r.acks(20) })
		if !taken.Load() {
			stop := r.flow()
			r.requeue(&taken)
			stop()
		}
		r.waitDrained(20 * lease)
	})
	r.isolated()
	for _, p := range runners {
		p.stop()
	}
	mended := r.child(running, func(s *settings) { s.More = map[string]string{"mended": "yes", "replay": exactName} })
	mended.awaitReady()
	r.await("all messages are replayed", func() bool {
		return r.countOf(openParked) == 0
	})
	r.waitDrained(2 * lease)
	r.parked = r.countOf(`select count(*) from kinora.parked`)
	r.judge()
}

// requeue publishes the abandoned entry once the broker accepts it. All entries behind it are held
// until then.
func (r *run) requeue(taken *atomic.Bool) {
	db, err := postgres.New(r.pool, nil)
	r.must(err)
	r.await("the refused message is abandoned", func() bool {
		return r.countOf(`select count(*) from kinora.outbox where status = 'abandoned'`) > 0
	})
	r.inject("behind_abandoned", r.countOf(`select count(*) from kinora.outbox where status <> 'abandoned' and key = '`+refusedStream+`'`))
	taken.Store(true)
	n, err := db.Requeue(r.suite.ctx, outbox.Filter{Status: []outbox.Status{outbox.Abandoned}})
	r.must(err)
	r.inject("requeued", n)
}

func (r *run) countOf(sql string, args ...any) (n int) {
	r.must(r.pool.QueryRow(r.suite.ctx, sql, args...).Scan(&n))
	return n
}

// isolated checks that each poison is stuck after its budget, that only the messages behind it are
// held, and that all other streams are exact.
//
// A killer may take one start more per runner than its budget: if a runner dies before it has
// recorded the message as in flight, the first death blames nothing. Other poisons fail first in a
// unit of several messages, which is not counted, once for each runner that has a copy; and each
// process that a killer ends may have been processing them. A handler that does not return is tried
// once.
// Only the full form limits starts, and requires the codes. In the short form, a slow or busy machine may also make other
// messages stuck.
func (r *run) isolated() {
	db, err := postgres.New(r.pool, nil)
	r.must(err)
	list, err := db.Parked(r.suite.ctx, projector.ParkedFilter{Limit: 1_000_000})
	r.must(err)
	starts, err := countStarts(r.dir)
	r.must(err)
	found := map[string]int{}
	busy := map[string]bool{} // streams of messages that a slow or busy machine made stuck
	runners := len(r.of(running))
	for _, p := range list {
		kind, ok := poisons[p.Key]
		most := poisonTries + runners
		if !slices.Equal(kind.codes, killer) {
			most = poisonTries + 2*runners + r.kinds()["exit"]
		}
		switch {
		case !ok && p.Projector == exactName && r.suite.short && (busy[p.Key] || p.Code == provider.CodeDeadline || p.Code == crashedCode):
			busy[p.Key] = true
			r.inject("late_innocents", 1)
			continue
		case !ok || p.Projector != exactName:
			r.fail("%s of %s is also parked: %s, %s %s, attempts %d, %s", p.MessageID, p.Key, p.State, p.Class, p.Code, p.Attempts, p.Projector)
		case p.Class == provider.ClassHeld:
			continue
		case !r.suite.short && (!slices.Contains(kind.codes, p.Code) || starts[p.MessageID] > most) || p.State != projector.StateStuck ||
			p.Attempts != poisonTries && p.Code != "stuck":
			r.fail("%s is %s as %s %q after %d attempts, %d starts of at most %d", p.Key, p.State, p.Class, p.Code, p.Attempts, starts[p.MessageID], most)
		default:
			r.inject("parked_as_"+p.Code, 1)
			r.inject("starts_of_"+p.Code, starts[p.MessageID])
		}
		found[p.Key]++
	}
	for key := range poisons {
		if found[key] != 1 {
			r.fail("%s has %d stuck poison messages", key, found[key])
		}
	}
	r.neighbours(busy)
}

// neighbours judges the streams without poison, except some.
func (r *run) neighbours(except map[string]bool) {
	ledger, err := readLedgers(r.dir)
	r.must(err)
	events, err := readEvents(r.suite.ctx, r.pool)
	r.must(err)
	m, err := readModel(r.suite.ctx, r.pool, "")
	r.must(err)
	var v verdict
	h := judgeLog(ledger, events, &v)
	for key := range poisons {
		if got := fmt.Sprint(m.Lists[key]); got != "[1 2 3 4]" {
			r.fail("%s: %s, want [1 2 3 4], the messages before its poison", key, got)
		}
		delete(h, key)
		delete(m.Lists, key)
		delete(m.Totals, key)
	}
	for key := range except {
		delete(h, key)
		delete(m.Lists, key)
		delete(m.Totals, key)
	}
	judgeModel(h, m, &v)
	if !v.ok() {
		r.fail("neighbours: lost %d, doubled %d, phantom %d, misordered %d: %s", v.Lost, v.Doubled, v.Phantom, v.Misordered, v.reasons[0])
	}
}
