package bank

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/projector/projectortest"
	"github.com/kinora-go/kinora/providers/sqlite"
)

func open(t testing.TB) *sqlite.DB {
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "bank.db"), nil)
	check(t, err)
	t.Cleanup(func() { check(t, db.Close()) })
	check(t, db.Migrate(t.Context()))
	return db
}

// Four clients send each transfer twice, at once or later. The oracle adds up the transfers that were not refused.
func TestStatements(t *testing.T) {
	t.Parallel()
	db := open(t)
	bank, err := New(db)
	check(t, err)
	runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, Statements)
	check(t, err)
	service, err := kinora.Start(t.Context(), runner)
	check(t, err)
	t.Cleanup(func() { check(t, service.Stop()) })

	accounts, months := []string{"ann", "ben", "cy"}, []string{"2026-10", "2026-11"}
	want := map[string]map[string]*Statement{}
	for _, a := range accounts {
		want[a] = map[string]*Statement{}
		for _, m := range months {
			want[a][m] = &Statement{}
		}
		_, err := bank.Deposit(t.Context(), "open-"+a, a, Entry{100_00, "2026-10-01"})
		check(t, err)
		want[a]["2026-10"].Received = 100_00
	}
	var mu sync.Mutex
	var all []eventstore.Appended
	var clients sync.WaitGroup
	for client := range 4 {
		clients.Go(func() {
			var repeat []func() error
			for i := range 25 {
				id := fmt.Sprintf("%d-%d", client, i)
				from := rand.N(3)
				to := (from + 1 + rand.N(2)) % 3
				month, cents := months[rand.N(2)], int64(1+rand.N(60_00))
				send := func() (eventstore.Appended, error) {
					return bank.Transfer(t.Context(), id, accounts[from], accounts[to], Entry{cents, month + "-15"})
				}
				at, err := send()
				if errors.Is(err, ErrFunds) {
					continue
				} else if err != nil {
					t.Errorf("%s: %v", id, err)
					return
				}
				again := func() error {
					second, err := send()
					if err == nil && (second.Version != at.Version || !second.Replayed) {
						err = fmt.Errorf("%s was applied again: %+v", id, second)
					}
					return err
				}
				if i%2 == 0 {
					if err := again(); err != nil {
						t.Error(err)
					}
				} else {
					repeat = append(repeat, again)
				}
				mu.Lock()
				all = append(all, at)
				want[accounts[from]][month].Spent += cents
				want[accounts[to]][month].Received += cents
				mu.Unlock()
			}
			for _, again := range repeat {
				if err := again(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	clients.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	for _, at := range all {
		check(t, Statements.Wait(ctx, db, at))
	}
	sum := int64(0)
	for _, a := range accounts {
		opening := int64(0)
		for _, m := range months {
			w := want[a][m]
			w.Opening, w.Closing = opening, opening+w.Received-w.Spent
			opening = w.Closing
			got, err := bank.Statement(ctx, a, m)
			check(t, err)
			if got != *w {
				t.Errorf("%s in %s: got %+v, want %+v", a, m, got, *w)
			}
		}
		sum += opening
	}
	if sum != 300_00 || len(all) == 0 {
		t.Errorf("the sum is %d after %d transfers", sum, len(all))
	}
}

func TestExactlyOnce(t *testing.T) {
	t.Parallel()
	kit := projectortest.New(open, Statements, func(ctx context.Context, db *sqlite.DB) ([]string, error) {
		return projectortest.Rows(ctx, db.SQL().QueryContext, `select account, month, received, spent from statements order by 1, 2`)
	})
	events := []projectortest.Event{
		projectortest.In("account-ann", Entry{100, "2026-10-31"}),
		projectortest.In("account-ben", Entry{30, "2026-11-01"}),
		projectortest.In("account-ann", Entry{-30, "2026-11-01"}),
		projectortest.In("account-ann", Entry{5, "2026-11-02"}),
	}
	kit.Given(t, events...).Redeliver().Then("account-ann | 2026-10 | 100 | 0", "account-ann | 2026-11 | 5 | 30", "account-ben | 2026-11 | 30 | 0")
	kit.ExactlyOnce(t, events...)
	kit.Commutes(t, events...)
}

func TestBook(t *testing.T) {
	t.Parallel()
	projectortest.Given(t, func(string) *Account { return &Account{} }, Entry{100, "2026-10-31"}).
		When(func(a *Account) ([]any, error) { return a.Book(Entry{-101, "2026-11-01"}) }).Then(ErrFunds)
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
