package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/postgres"
)

// product is the key of a stream, and of a row of the totals.
type product struct{ tenant, name string }

func (p product) stream() string {
	return eventstore.StreamName(category, eventstore.JoinID(p.tenant, p.name))
}

// ledger remembers in this process the stars of the ratings that it has appended. It decides whether
// a read model is exact: it reads none of Kinora's tables.
type ledger struct {
	mu      sync.Mutex
	ratings map[product][]int64
	events  int
	failed  atomic.Int64 // appends that returned an error, and were tried again
}

// rate appends ratings to a product until they are stored. Only one goroutine rates a product.
func (l *ledger) rate(ctx context.Context, f *fleet, p product, stars ...int64) (at eventstore.Appended, err error) {
	var events []any
	for _, n := range stars {
		events = append(events, Rated{p.tenant, p.name, n})
	}
	drafts, err := types.Encode(ctx, events...)
	if err != nil {
		return at, err
	}
	l.mu.Lock()
	version := eventstore.Expected(len(l.ratings[p]))
	l.mu.Unlock()
	for {
		// After an error the events may be stored. Appending them again is safe: see eventstore.Store.
		s, err := f.of(ctx, p.tenant)
		if err == nil {
			at, err = s.db.Append(ctx, p.stream(), version, drafts)
		}
		if err == nil {
			break
		}
		l.failed.Add(1)
		if !pause(ctx) {
			return at, fmt.Errorf("rate: %w", err)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ratings[p] = append(l.ratings[p], stars...)
	l.events += len(stars)
	return at, nil
}

// pause waits before another attempt. It returns false if ctx has ended.
func pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(20 * time.Millisecond):
		return true
	}
}

// differences compares the read models with the ledger. Nothing is returned if all of them are exact.
func (l *ledger) differences(ctx context.Context, totals, charts, billing *postgres.DB) (all []string, err error) {
	want := map[string]int64{}
	for p, ratings := range l.ratings {
		for i, stars := range ratings {
			want[fmt.Sprintf("total %s/%s: ratings", p.tenant, p.name)]++
			want[fmt.Sprintf("total %s/%s: stars", p.tenant, p.name)] += stars
			want[fmt.Sprintf("total %s/%s: event %d", p.tenant, p.name, i+1)] = int64(i + 1)
			want[fmt.Sprintf("chart %s: %d stars", p.tenant, stars)]++
			want[fmt.Sprintf("bill %s", p.tenant)]++
		}
	}
	got := map[string]int64{}
	var tenant, name string
	var n, stars int64
	var versions []int64
	err = each(ctx, totals, `select tenant, product, ratings, stars, versions from totals`, []any{&tenant, &name, &n, &stars, &versions}, func() {
		got[fmt.Sprintf("total %s/%s: ratings", tenant, name)] += n
		got[fmt.Sprintf("total %s/%s: stars", tenant, name)] += stars
		for i, version := range versions {
			got[fmt.Sprintf("total %s/%s: event %d", tenant, name, i+1)] += version
		}
	})
	if err == nil {
		err = each(ctx, charts, `select tenant, stars, ratings from charts`, []any{&tenant, &stars, &n}, func() {
			got[fmt.Sprintf("chart %s: %d stars", tenant, stars)] += n
		})
	}
	if err == nil {
		err = each(ctx, billing, `select tenant, ratings from billing`, []any{&tenant, &n}, func() {
			got[fmt.Sprintf("bill %s", tenant)] += n
		})
	}
	for what, n := range want {
		if got[what] != n {
			all = append(all, fmt.Sprintf("%s: %d, not %d", what, got[what], n))
		}
		delete(got, what)
	}
	for what := range maps.Keys(got) {
		all = append(all, what+": was never appended")
	}
	slices.Sort(all)
	return all, err
}

// each calls fn for each row of a query, after it has set the values.
func each(ctx context.Context, db *postgres.DB, query string, values []any, fn func()) error {
	rows, err := db.Pool().Query(ctx, query)
	if err != nil {
		return err
	}
	_, err = pgx.ForEachRow(rows, values, func() error { fn(); return nil })
	return err
}
