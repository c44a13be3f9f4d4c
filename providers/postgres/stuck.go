package postgres

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/projector"
)

// grace is how long a handler has to return after its context ended.
const grace = time.Second

// seat is what a unit has while it is under way: a connection of the pool, and its turns. A handler that does not
// return loses it to others.
type seat struct {
	mu     sync.Mutex
	pooled *pgxpool.Conn
	conn   *pgx.Conn
	leave  func()
	over   bool // the handler has returned, or lost it
	lost   bool
}

func newSeat(pooled *pgxpool.Conn, leave func()) *seat {
	return &seat{pooled: pooled, conn: pooled.Conn(), leave: leave}
}

// run runs a handler. Where it does not return in time, its transaction is broken off at once, and what it returns in the end
// counts for nothing.
func (s *seat) run(ctx context.Context, handler func() error) (err error) {
	returned := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		t := time.NewTimer(grace)
		defer t.Stop()
		select {
		case <-returned:
		case <-t.C:
			s.breakOff()
		}
	})
	defer func() { // also after a panic
		stop()
		close(returned)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.over = true; s.lost {
			err = &projector.Error{Class: projector.UnknownClass, Err: fmt.Errorf("the handler did not return, and was broken off: %w", ctx.Err())}
		}
	}()
	return handler()
}

// breakOff closes the connection under the handler: the server undoes the transaction, and the pool has its place back.
// Nothing else of the connection is touched, since the handler may be using it.
func (s *seat) breakOff() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over {
		return
	}
	s.over, s.lost = true, true
	s.pooled.Hijack()
	_ = s.conn.PgConn().Conn().Close()
	s.leave()
	// A server in the midst of a statement would not notice before its end.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = s.conn.PgConn().CancelRequest(ctx)
}

// end gives back what was not lost.
func (s *seat) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = s.conn.Close(ctx)
		return
	}
	s.pooled.Release()
	s.leave()
}
