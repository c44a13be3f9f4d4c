package bolt

import (
	"context"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kinora-go/kinora/providers/providertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	t.Parallel()
	providertest.All(t, providertest.TierProjectors, openFile)
}

func openFile(t testing.TB, o providertest.Options) providertest.Fixture[*Tx] {
	var ahead atomic.Int64
	db, err := Open(filepath.Join(t.TempDir(), "events.db"), Config{
		Route: o.Route, MaxPayload: o.MaxPayload, RequeueWindow: o.RequeueWindow, NoSync: true,
		Clock: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) },
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return fixture(t, db, func(d time.Duration) { ahead.Add(int64(d)) })
}

func fixture(t testing.TB, db *DB, advance func(time.Duration)) providertest.Fixture[*Tx] {
	inTx := func(ctx context.Context, fn func(providertest.TxView, providertest.Add) error) error {
		return db.Transact(ctx, func(_ context.Context, tx *Tx) error {
			return fn(db.InTx(tx), func(ctx context.Context, name string, n int) error { return add(ctx, tx, name, n) })
		})
	}
	return providertest.Fixture[*Tx]{
		Provider: db, InTx: inTx, Transact: inTx, Advance: advance, Add: add,
		Total: func(name string) int {
			value, err := db.Get(context.Background(), name)
			require.NoError(t, err)
			return total(value)
		},
		// bbolt lets one process open a file, once: the new handle shares the open file, and nothing else.
		Reopen: func() providertest.Fixture[*Tx] { return fixture(t, db.file.handle(db.cfg), advance) },
	}
}

func add(_ context.Context, tx *Tx, name string, n int) error {
	value, err := tx.Get(name)
	if err != nil {
		return err
	}
	return tx.Put(name, strconv.AppendInt(nil, int64(total(value)+n), 10))
}

func total(value []byte) int {
	n, _ := strconv.Atoi(string(value)) // nothing is 0
	return n
}
