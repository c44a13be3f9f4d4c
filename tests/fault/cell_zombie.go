package main

import (
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

var zombieCell = &cell{
	// Promise: G2.1, G2.4, G3.1, G4.1
	name: "zombie", number: 3, summary: "relays and runners stopped past their leases and resumed after peers have finished their work",
	full: 100 * time.Second, short: 4 * time.Second, redelivers: true, byFault: true,
	requires: []string{"zombie_relay", "zombie_runner", "late_mark"}, requiresLong: []string{"late_mark_met_a_claim"}, run: runZombie,
}

// idleLimit is the time after which the server ends the transaction of a stopped process, as
// operators are advised to set it. Without it, peers wait for that transaction.
const idleLimit = "idle_in_transaction_session_timeout=1500"

func runZombie(r *run) {
	r.server(brokerConfig{Duplicate: 0.02, Slow: 60 * time.Millisecond}, idleLimit)
	_, relays, runners := r.startAll(2, 2, nil)
	r.prove(func() {
		r.during(func() {
			relay, runner := relays[r.intn(2)], runners[r.intn(2)]
			var both sync.WaitGroup
			both.Go(func() { r.guard(func() { stopRelay(r, relay) }) })
			both.Go(func() { r.guard(func() { stopRunner(r, runner) }) })
			both.Wait()
			r.sleep(r.between(100*time.Millisecond, 500*time.Millisecond))
		})
		r.waitDrained(2 * lease)
	})
	r.judge()
}

// stopRelay stops a relay that holds entries until its lease has expired and another relay has
// published all of them. Sometimes it resumes as soon as another relay has claimed some, so that
// late marks meet a live claim.
func stopRelay(r *run, p *process) {
	if !p.stopBusy() {
		return
	}
	rows, err := r.pool.Query(r.suite.ctx, `select id from kinora.outbox where claimed_by = $1 and status = 'claimed'`, p.Name)
	r.must(err)
	had, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	r.must(err)
	early := r.intn(2) == 0
	finished := r.awaitOr(r.suite.patience(), func() bool {
		var left, here int
		err := r.pool.QueryRow(r.suite.ctx, `select count(*), count(*) filter (where claimed_by = $2) from kinora.outbox where id = any($1)`, had, p.Name).Scan(&left, &here)
		return err == nil && (left == 0 || early && here < len(had))
	})
	if early && finished {
		p.signal(syscall.SIGCONT)
		r.inject("woken_early", 1)
		return
	}
	r.wake(p, len(had), finished)
}

// stopRunner stops a runner while its handlers run. After a while the broker disconnects it, and
// another runner handles all its messages.
func stopRunner(r *run, p *process) {
	if !p.stopBusy() {
		return
	}
	had := r.broker.unacked(p.Name)
	r.sleep(lease)
	r.broker.disconnect(p.Name)
	finished := r.awaitOr(r.suite.patience(), func() bool { return r.broker.areAcked(had) })
	r.wake(p, len(had), finished)
}

// stopBusy sends SIGSTOP at a moment when the process has work in hand, and reports whether that
// happened soon.
func (p *process) stopBusy() bool {
	if !p.awaitBusy() {
		p.r.inject("stopped_idle", 1)
		return false
	}
	p.signal(syscall.SIGSTOP)
	p.awaitStopped()
	p.r.trace.printf("stopped %s open %d", p.Name, p.status.get(wordOpen))
	return true
}

// awaitBusy waits for a moment when the process has work in hand, and reports whether it came soon.
func (p *process) awaitBusy() bool {
	for limit := time.Now().Add(time.Second); !p.open(); {
		if time.Now().After(limit) {
			return false
		}
		time.Sleep(100 * time.Microsecond)
	}
	time.Sleep(time.Duration(p.r.intn(2000)) * time.Microsecond)
	return true
}

// wake resumes the process. It was a zombie if it had work in hand and others finished all of it.
func (r *run) wake(p *process, had int, finished bool) {
	open := p.open()
	r.trace.printf("wakes %s open %d had %d finished %t", p.Name, p.status.get(wordOpen), had, finished)
	p.signal(syscall.SIGCONT)
	switch {
	case !finished:
		r.fail("no process finished the work that %s had when it was stopped", p.Name)
	case open && had > 0:
		r.inject("zombie_"+string(p.Role), 1)
	default:
		r.inject("stopped_idle", 1)
	}
}
