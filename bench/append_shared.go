package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// limitCall is an append that waits for a transaction of the limit.
type limitCall struct {
	stream string
	at     int64
	done   chan error
}

// limitShared is a limit whose appends share commits: two goroutines each take the appends that wait, and
// send them in one transaction.
func limitShared(workers int) work {
	return func(ctx context.Context, b *bed) (int64, error) {
		in := make(chan *limitCall, workers)
		defer close(in)
		for range 2 {
			go func() {
				for first := range in {
					b.commit(first, in)
				}
			}()
		}
		return many(ctx, workers, 1, func(_ context.Context, worker string, i int64) error {
			c := &limitCall{fmt.Sprintf("review-%s-%d", worker, i/perStream), i % perStream, make(chan error, 1)}
			in <- c
			return <-c.done
		})
	}
}

// commit appends first, and the calls that wait behind it.
func (b *bed) commit(first *limitCall, in chan *limitCall) {
	calls := []*limitCall{first}
	for waits := true; waits && len(calls) < 64; {
		select {
		case c := <-in:
			if waits = c != nil; waits {
				calls = append(calls, c)
			}
		default:
			waits = false
		}
	}
	slices.SortFunc(calls, func(a, b *limitCall) int { return cmp.Compare(a.stream, b.stream) }) // one order of locks
	batch := &pgx.Batch{}
	for _, c := range calls {
		batch.Queue(limitOne, c.stream, c.at, uuid.Must(uuid.NewV7()), []byte(payload), []byte(payload), []byte(headers))
	}
	err := b.pool.SendBatch(context.Background(), batch).Close()
	for _, c := range calls {
		c.done <- err
	}
}
