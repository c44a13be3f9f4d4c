package sqlite_test

import (
	"fmt"
	"iter"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
)

// A page has at most about 4 MiB, so a reader of many large events does not hold all of them. This
// test measures the heap of the process, so it is not parallel.
func TestReadStreamReadsPagesOfLimitedBytes(t *testing.T) {
	const events, size, bound = 60, 1_000_000, 16 << 20
	db := open(t, nil)
	for i := range events {
		ds := drafts(1)
		ds[0].Data = fmt.Appendf(nil, `"%d%s"`, i, strings.Repeat("x", size))
		_, err := db.Append(t.Context(), "review-large", eventstore.Expected(i), ds)
		require.NoError(t, err)
	}
	before := liveHeap()
	check := func(stream iter.Seq2[eventstore.Raw, error]) {
		t.Helper()
		version, most := int64(0), int64(0)
		for e, err := range stream {
			require.NoError(t, err)
			version++
			require.Equal(t, version, e.Version)
			require.Greater(t, len(e.Data), size)
			if version%5 == 1 {
				most = max(most, liveHeap()-before)
			}
		}
		require.EqualValues(t, events, version)
		require.Less(t, most, int64(bound), "bytes held while the stream is read")
	}
	check(db.ReadStream(t.Context(), "review-large", 0))
	tx, err := db.SQL().Begin()
	require.NoError(t, err)
	check(db.InTx(tx).ReadStream(t.Context(), "review-large", 0))
	require.NoError(t, tx.Rollback())
}

func liveHeap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
