package main

import (
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

var taskTransferCell = &cell{
	// Promise: T4.1, T7.1
	name: "task-transfer", number: 34,
	summary: "transfers between 200 accounts, a third refused, under kill -9 of workers, projectors and relays: the sum of money at every read",
	full:    75 * time.Second, short: 3 * time.Second, redelivers: true,
	requires: []string{"kill_worker", "kill_runner", "money_read"}, requiresLong: []string{"kill_relay"}, run: runTaskTransfer,
}

const (
	transfersFull = 10_000
	transfersFew  = 400
)

func runTaskTransfer(r *run) {
	r.server(brokerConfig{Duplicate: 0.05})
	_, err := r.pool.Exec(r.suite.ctx, fmt.Sprintf(bankTables, balance, accounts-1))
	r.must(err)
	enough := int64(transfersFull)
	if r.suite.short {
		enough = transfersFew
	}
	change := func(s *settings) {
		s.Batched, s.Control, s.Rate = false, s.Role == running, 250
		s.More = map[string]string{"transfers": "yes"}
	}
	_, relays, runners := r.startAll(2, 2, change)
	o := r.systems() // nothing calls it
	var workers []*process
	for range 2 {
		workers = append(workers, r.worker(o, "bank", nil))
	}
	for _, p := range workers {
		p.awaitReady()
	}
	r.control = r.controlArm
	r.gauge("control_accounts_wrong", r.controlAccounts)
	r.needs = append(r.needs, "control_accounts_wrong")
	stop := r.watchMoney()
	r.prove(func() {
		r.during(func() {
			r.sleep(r.between(100*time.Millisecond, 500*time.Millisecond))
			switch r.intn(5) {
			case 0:
				relays[r.intn(2)].restart()
			case 1:
				runners[r.intn(2)].restart()
			default:
				workers[r.intn(2)].restart()
			}
		})
		resume := r.flow()
		r.await("enough transfers", func() bool { return r.sum(producing, wordAcked) >= enough })
		resume()
		r.waitDrained(4 * lease)
		r.awaitEnded()
	})
	stop()
	r.stopWorkers()
	r.judge()
	r.judgeMoney()
}

// watchMoney reads all money again and again, and fails the cell if some is missing or made up.
func (r *run) watchMoney() (stop func()) {
	done := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		for ; !isClosed(done); pause(r.suite.ctx, 10*time.Millisecond) {
			var money int64
			if err := r.pool.QueryRow(r.suite.ctx, moneySQL).Scan(&money); err != nil {
				continue
			}
			r.inject("money_read", 1)
			if money != bankMoney {
				r.fail("lost %d, doubled 0, phantom 0, misordered 0: of all money", bankMoney-money)
				return
			}
		}
	})
	return func() { close(done); all.Wait() }
}

// judgeMoney compares each account with the transfers of all events, and each transfer's end with the
// rule.
func (r *run) judgeMoney() {
	events, err := readEvents(r.suite.ctx, r.pool)
	r.must(err)
	want := accountsAfter(events)
	tasks := r.taskRows()
	var v verdict
	for _, e := range events {
		end := "done"
		if transferOf(e.ID, e.Amount).refused() {
			end = "undone"
			r.inject("refused", 1)
		}
		if got := tasks[e.ID].Status; got != end {
			v.find(&v.Lost, e.ID, "its transfer is %q, want %q", got, end)
		}
	}
	got := r.balances("accounts")
	for i := range want {
		if got[i] != want[i] {
			v.find(&v.Doubled, fmt.Sprint("account ", i), "has %d, want %d", got[i], want[i])
		}
	}
	if n := r.countOf(`select count(*) from transit`); n > 0 {
		v.find(&v.Lost, "transit", "%d transfers have money in transit", n)
	}
	if len(tasks) != 2*len(events) {
		v.find(&v.Phantom, "tasks", "%d for %d events", len(tasks), len(events))
	}
	if !v.ok() {
		r.fail("lost %d, doubled %d, phantom %d, misordered %d: %s", v.Lost, v.Doubled, v.Phantom, v.Misordered, v.reasons[0])
	}
}

// accountsAfter returns the balances after the transfers of events.
func accountsAfter(events []stored) []int64 {
	want := make([]int64, accounts)
	for i := range want {
		want[i] = balance
	}
	for _, e := range events {
		if t := transferOf(e.ID, e.Amount); !t.refused() {
			want[t.From] -= t.Amount
			want[t.To] += t.Amount
		}
	}
	return want
}

// balances reads the balances of a table of accounts.
func (r *run) balances(table string) []int64 {
	rows, err := r.pool.Query(r.suite.ctx, `select balance from `+table+` order by id`)
	r.must(err)
	list, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	r.must(err)
	return list
}

// controlAccounts counts the accounts that are wrong after the transfers without steps.
func (r *run) controlAccounts() (wrong int) {
	events, err := readEvents(r.suite.ctx, r.pool)
	r.must(err)
	want := accountsAfter(events)
	for i, got := range r.balances("control_accounts") {
		if got != want[i] {
			wrong++
		}
	}
	return wrong
}
