package postgres

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// grace is how long a handler has to return after its context ended.
const grace = time.Second

func (db *DB) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	pooled, err := db.pool.Acquire(ctx)
	if err != nil {
		return nil, ofOwn(ctx, fmt.Errorf("acquire a connection: %w", err))
	}
	return pooled, nil
}

// attended calls handler. If that does not return within a grace after the end of ctx, its transaction is broken off, and its later
// result is ignored: the server undoes the transaction, and the pool can make another connection. Of the connection only the network
// is touched, since the handler may be using it.
func attended(ctx context.Context, pooled *pgxpool.Conn, handler func() error) (err error) {
	conn, lost := pooled.Conn(), false
	returned, watched := make(chan struct{}), make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(watched)
		select {
		case <-returned:
		case <-time.After(grace):
			lost = true
			pooled.Hijack()
			_ = conn.PgConn().Conn().Close()
			// In the middle of a statement, the server would notice at its end only.
			limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			_ = conn.PgConn().CancelRequest(limit)
		}
	})
	defer func() { // also after a panic
		close(returned)
		if stop() {
			return
		}
		if <-watched; lost {
			shut(ctx, conn)
			err = &provider.Error{Class: provider.ClassUnknown, Code: provider.CodeDeadline,
				Err: fmt.Errorf("the handler did not return, and its transaction was broken off: %w", ctx.Err())}
		}
	}()
	return handler()
}

// rollback gives up after five seconds, and the driver closes the connection: a server that does not answer
// must not keep a runner from stopping.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = tx.Rollback(ctx)
}

// ErrHeld is what Commit and Rollback of a handler's transaction return: its unit ends it.
var ErrHeld = errors.New("the unit ends this transaction")

// heldTx is a transaction that only its unit ends.
type heldTx struct{ pgx.Tx }

func (heldTx) Commit(context.Context) error   { return ErrHeld }
func (heldTx) Rollback(context.Context) error { return ErrHeld }

// Exec refuses statements that end the transaction. Through Conn, or behind a comment, they get past it. The unit then
// notices that its transaction is gone, unless another one was begun in its place.
func (t heldTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if endsTx(sql) {
		return pgconn.CommandTag{}, ErrHeld
	}
	return t.Tx.Exec(ctx, sql, args...)
}

var (
	ends   = regexp.MustCompile(`(?i)^\s*(commit|end|abort|rollback|prepare\s+transaction)\b`)
	goesTo = regexp.MustCompile(`(?i)^\s*rollback\s+((work|transaction)\s+)?to\b`)
	begins = regexp.MustCompile(`(?i)^\s*(begin|start\s+transaction)\b`)
)

// endsTx reports whether a statement ends the transaction. Going back to a savepoint does not.
func endsTx(sql string) bool { return ends.MatchString(sql) && !goesTo.MatchString(sql) }

// errEnded is the error of a unit whose transaction its handlers ended.
func errEnded() error {
	return &provider.Error{Class: provider.ClassPermanent, Code: "tx_ended", Err: errors.New("a handler ended the transaction")}
}

// commit commits, and gives the error a class if that fails.
func commit(ctx context.Context, tx pgx.Tx) error {
	crash.Point("commit: before")
	err := tx.Commit(ctx)
	crash.Point("commit: after")
	switch {
	case err == nil:
		return nil
	case inDoubt(err):
		return &provider.Error{Class: provider.ClassAmbiguous, Code: "commit", Err: fmt.Errorf("commit: %w", err)}
	}
	return class(fmt.Errorf("commit: %w", err))
}

// patient watches ctx while a trip is sent without it, which also costs less. At the end of ctx it asks the server to break off,
// again and again, since a request that comes too early is lost; after a grace it closes the connection. The caller calls answered
// when all is answered. It closes the connection if the server was asked, since a late request may hit the next statement.
func patient(ctx context.Context, conn *pgx.Conn) (answered func()) {
	done, asked := make(chan struct{}), make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(asked)
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
		defer cancel()
		for {
			_ = conn.PgConn().CancelRequest(limit)
			select {
			case <-done:
				return
			case <-limit.Done():
				_ = conn.PgConn().Conn().Close()
				return
			case <-time.After(grace / 10):
			}
		}
	})
	return func() {
		close(done)
		if !stop() {
			<-asked
			shut(ctx, conn)
		}
	}
}
