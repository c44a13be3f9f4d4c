package transfers_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/kinora-go/kinora/task"

	"github.com/kinora-go/kinora/examples/processes/transfers"
)

// bank is a bank with three accounts: ann and ben have 100.00 each, and that of cy is closed.
func bank(t *testing.T) (*sqlite.DB, *transfers.Bank) {
	t.Helper()
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "bank.db"), nil)
	check(t, err)
	t.Cleanup(func() { check(t, db.Close()) })
	check(t, db.Migrate(t.Context()))
	b, err := transfers.NewBank(db)
	check(t, err)
	for _, account := range []string{"ann", "ben"} {
		check(t, b.Do(t.Context(), account, func(a *transfers.Account) ([]any, error) { return a.Deposit("opening", 100_00) }))
	}
	check(t, b.Do(t.Context(), "cy", (*transfers.Account).Close))
	return db, b
}

// balances requires the money of ann and ben.
func balances(t *testing.T, b *transfers.Bank, want ...int64) {
	t.Helper()
	for i, account := range []string{"ann", "ben"} {
		got, err := b.Balance(t.Context(), account)
		check(t, err)
		if got != want[i] {
			t.Errorf("%s has %d, want %d", account, got, want[i])
		}
	}
}

func TestMoveIsAllOrNothing(t *testing.T) {
	t.Parallel()
	_, b := bank(t)
	move := func(id, from, to string, cents int64) error {
		return b.Move(t.Context(), transfers.Transfer{ID: id, From: from, To: to, Cents: cents})
	}
	check(t, move("1", "ann", "ben", 70_00))
	check(t, move("1", "ann", "ben", 70_00)) // again: nothing changes
	if err := move("2", "ann", "ben", 70_00); !errors.Is(err, transfers.ErrFunds) {
		t.Errorf("got %v", err)
	}
	if err := move("3", "ben", "cy", 70_00); !errors.Is(err, transfers.ErrClosed) { // after the withdrawal
		t.Errorf("got %v", err)
	}
	balances(t, b, 30_00, 170_00)
}

func TestProcess(t *testing.T) {
	t.Parallel()
	db, b := bank(t)
	work(t, b)
	for i, c := range []struct {
		from, to string
		cents    int64
		want     task.Status
		why      string
	}{
		{"ann", "ben", 70_00, task.Done, ""},
		{"ann", "ben", 70_00, task.Undone, "funds"},
		{"ben", "cy", 70_00, task.Undone, "closed"}, // after the withdrawal
		{"cy", "ben", 70_00, task.Undone, "closed"},
	} {
		id := fmt.Sprint("transfer-", i)
		for range 2 { // the second start changes nothing
			check(t, b.Start(t.Context(), transfers.Transfer{ID: id, From: c.from, To: c.to, Cents: c.cents}))
		}
		if got := wait(t, db, id, task.Done, task.Undone); got.Status != c.want || got.Why != c.why {
			t.Errorf("%s is %s %s, want %s %s", id, got.Status, got.Why, c.want, c.why)
		}
	}
	balances(t, b, 30_00, 170_00)
}

// A person checks a large transfer. The money is in transit meanwhile.
func TestVerdict(t *testing.T) {
	t.Parallel()
	db, b := bank(t)
	work(t, b)
	check(t, b.Do(t.Context(), "ann", func(a *transfers.Account) ([]any, error) { return a.Deposit("win", 20_000_00) }))
	for i, ok := range []bool{true, false} {
		id := fmt.Sprint("large-", i)
		check(t, b.Start(t.Context(), transfers.Transfer{ID: id, From: "ann", To: "ben", Cents: 10_000_00}))
		wait(t, db, id, task.Waiting)
		balances(t, b, 10_100_00-int64(i)*10_000_00, 100_00+int64(i)*10_000_00)
		for _, want := range []task.Outcome{task.Taken, task.Again} {
			if got, err := b.Check(t.Context(), id, "request-7", ok); got != want {
				t.Errorf("got %s, %v, want %s", got, err, want)
			}
		}
		wait(t, db, id, task.Done, task.Undone)
		if got, err := b.Check(t.Context(), id, "request-8", !ok); got != task.Late {
			t.Errorf("got %s, %v, want %s", got, err, task.Late)
		}
	}
	balances(t, b, 10_100_00, 10_100_00)
}

// Many transfers at the same time keep the sum, and a transfer that is undone leaves no trace in it.
// The oracle is the log: each withdrawal has exactly one deposit or one return.
// Promise: T7.1
func TestNoMoneyIsLost(t *testing.T) {
	t.Parallel()
	db, b := bank(t)
	accounts := []string{"ann", "ben", "cy"}
	const n = 60
	for i := range n {
		check(t, b.Start(t.Context(), transfers.Transfer{
			ID: fmt.Sprint("t", i), From: accounts[i%2], To: accounts[(i%2+1+i/2%2)%3], Cents: int64(1 + i%7*10_00)}))
	}
	work(t, b)
	work(t, b) // a second worker
	for i := range n {
		wait(t, db, fmt.Sprint("t", i), task.Done, task.Undone)
	}
	out, in := map[string]int{}, map[string]int{}
	sum := int64(0)
	for e, err := range db.ReadLog(t.Context(), eventstore.From{}, eventstore.LogFilter{}) {
		check(t, err)
		decoded, err := eventstore.Decode[any](transfers.Types, e)
		check(t, err)
		switch d := decoded.Data.(type) {
		case transfers.Withdrawn:
			out[d.Transfer]++
			sum -= d.Cents
		case transfers.Deposited:
			in[d.Transfer]++
			sum += d.Cents
		case transfers.Returned:
			in[d.Transfer]++
			sum += d.Cents
		}
	}
	delete(in, "opening")
	if len(out) == 0 || sum != 200_00 {
		t.Errorf("%d withdrawals, and the sum is %d, want %d", len(out), sum, 200_00)
	}
	for id, times := range out {
		if times != 1 || in[id] != 1 {
			t.Errorf("%s: %d withdrawals and %d deposits or returns, want 1 and 1", id, times, in[id])
		}
	}
}

// work runs a worker until the test ends.
func work(t *testing.T, b *transfers.Bank) {
	t.Helper()
	w, err := b.Worker(task.WorkerConfig{})
	check(t, err)
	group, err := kinora.Start(t.Context(), w)
	check(t, err)
	t.Cleanup(func() { check(t, group.Stop()) })
}

// wait returns the task when it has one of these statuses.
func wait(t *testing.T, db task.Inspector, id string, statuses ...task.Status) task.Task {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	for ctx.Err() == nil {
		found, err := db.Tasks(ctx, task.Filter{IDs: []string{id}, Status: statuses})
		check(t, err)
		if len(found) == 1 {
			return found[0]
		}
		time.Sleep(5 * time.Millisecond) // between two polls
	}
	t.Fatalf("%s has not become %v", id, statuses)
	return task.Task{}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
