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

// attend calls f, which uses the connection, and reports whether it was lost. If f has not returned within a grace after the end of
// ctx, the connection is closed under it: the server undoes the transaction, and the pool can make another connection. Nothing but the
// network is touched, since f may be using the connection. If f only waits for the server, hasten asks that to break off from the end
// of ctx on, again and again, since a request that comes too early is lost. A late one may hit the next statement, so the
// connection is closed then as well.
func attend(ctx context.Context, pooled *pgxpool.Conn, hasten bool, f func()) (lost bool) {
	conn, broken := pooled.Conn(), false
	returned, watched := make(chan struct{}), make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(watched)
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
		defer cancel()
		for limit.Err() == nil {
			if hasten {
				_ = conn.PgConn().CancelRequest(limit)
			}
			select {
			case <-returned:
				return
			case <-limit.Done():
			case <-time.After(grace / 10):
			}
		}
		broken = true
		pooled.Hijack()
		_ = conn.PgConn().Conn().Close()
		limit, cancel = context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = conn.PgConn().CancelRequest(limit) // in the middle of a statement, the server would notice at its end only
	})
	defer func() { // also after a panic
		close(returned)
		if stop() {
			return
		}
		<-watched
		if lost = broken; lost || hasten {
			shut(ctx, conn)
		}
	}()
	f()
	return false
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
	if err == nil {
		return nil
	}
	if err = fmt.Errorf("commit: %w", err); inDoubt(err) {
		return &provider.Error{Class: provider.ClassAmbiguous, Code: "commit", Err: err}
	}
	return class(err)
}
