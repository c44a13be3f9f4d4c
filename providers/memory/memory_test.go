package memory_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/providertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	providertest.All(t, providertest.TierOperations, open, providertest.Volatile)
}

// clock is a clock ahead of the real time.
type clock struct {
	mu    sync.Mutex
	ahead time.Duration
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.ahead)
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ahead += d
}

func open(t testing.TB, o providertest.Options) providertest.Fixture[*memory.Model] {
	c := &clock{}
	db, err := memory.New(&memory.Config{Route: o.Route, MaxPayload: o.MaxPayload, RequeueWindow: o.RequeueWindow, Clock: c.now})
	require.NoError(t, err)
	inTx := func(ctx context.Context, fn func(providertest.TxView, providertest.Add) error) error {
		return db.Transact(ctx, func(_ context.Context, tx *memory.Model) error {
			return fn(db.InTx(tx), func(ctx context.Context, key string, n int) error { return add(ctx, tx, key, n) })
		})
	}
	return providertest.Fixture[*memory.Model]{
		Provider: db,
		InTx:     inTx,
		Owned: func(ctx context.Context, fn func(tx *memory.Model) error) error {
			return db.Transact(ctx, func(_ context.Context, tx *memory.Model) error { return fn(tx) })
		},
		Transact: inTx,
		Advance:  c.advance,
		Add:      add,
		Tables:   tables(db),
		Total: func(key string) (total int) {
			db.View(func(m *memory.Model) { total = totalOf(m, key) })
			return total
		},
	}
}

// tables returns tables whose values are providertest.Row. They exist while they have rows.
func tables(db *memory.DB) *providertest.Tables[*memory.Model] {
	return &providertest.Tables[*memory.Model]{
		Create: func(context.Context, *memory.Model, string) error { return nil },
		Put: func(_ context.Context, tx *memory.Model, table string, row providertest.Row) error {
			tx.Put(table, row.Key, row)
			return nil
		},
		Delete: func(_ context.Context, tx *memory.Model, table, key string) error {
			tx.Delete(table, key)
			return nil
		},
		Rows: func(_ context.Context, table string) (rows []providertest.Row, err error) {
			db.View(func(m *memory.Model) {
				for _, row := range m.All(table) {
					rows = append(rows, row.(providertest.Row))
				}
			})
			return rows, nil
		},
	}
}

func add(_ context.Context, tx *memory.Model, key string, n int) error {
	tx.Put("totals", key, totalOf(tx, key)+n)
	return nil
}

func totalOf(m *memory.Model, key string) int {
	v, ok := m.Get("totals", key)
	if !ok {
		return 0
	}
	return v.(int)
}
