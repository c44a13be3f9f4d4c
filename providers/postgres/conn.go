package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/provider"
)

// grace is how long a handler has to return after its context ended.
const grace = time.Second

// lease is a unit's connection from the pool. A handler that does not return loses it.
type lease struct {
	mu     sync.Mutex
	pooled *pgxpool.Conn
	conn   *pgx.Conn
	over   bool // the handler has returned, or lost the connection
	lost   bool
}

func (db *DB) acquire(ctx context.Context) (*lease, error) {
	pooled, err := db.pool.Acquire(ctx)
	if err != nil {
		return nil, ofOwn(ctx, fmt.Errorf("acquire a connection: %w", err))
	}
	return &lease{pooled: pooled, conn: pooled.Conn()}, nil
}

// run calls handler. If that does not return in time, its transaction is broken off, and its later result is ignored.
func (l *lease) run(ctx context.Context, handler func() error) (err error) {
	returned := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		t := time.NewTimer(grace)
		defer t.Stop()
		select {
		case <-returned:
		case <-t.C:
			l.breakOff()
		}
	})
	defer func() { // also after a panic
		stop()
		close(returned)
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.over = true; l.lost {
			err = &provider.Error{Class: provider.ClassUnknown, Code: provider.CodeDeadline,
				Err: fmt.Errorf("the handler did not return, and its transaction was broken off: %w", ctx.Err())}
		}
	}()
	return handler()
}

// breakOff closes the connection under the handler: the server undoes the transaction, and the pool can make another connection.
// It touches nothing else of the connection, since the handler may be using it.
func (l *lease) breakOff() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return
	}
	l.over, l.lost = true, true
	l.pooled.Hijack()
	_ = l.conn.PgConn().Conn().Close()
	// In the middle of a statement, the server would notice at its end only.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = l.conn.PgConn().CancelRequest(ctx)
}

// end gives the connection back, unless it is lost.
func (l *lease) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = l.conn.Close(ctx)
		return
	}
	l.pooled.Release()
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

// endsTx reports whether a statement ends the transaction. Going back to a savepoint does not.
func endsTx(sql string) bool {
	switch first, second, third := words(sql, "cearpCEARP"); first {
	case "commit", "end", "abort":
		return true
	case "prepare":
		return second == "transaction"
	case "rollback":
		return second != "to" && (second != "work" && second != "transaction" || third != "to")
	}
	return false
}

// beginsTx reports whether a statement begins a transaction.
func beginsTx(sql string) bool {
	first, second, _ := words(sql, "bsBS")
	return first == "begin" || first == "start" && second == "transaction"
}

// words are the first three words of a statement in lower case, if it begins with one of these letters.
func words(sql, letters string) (first, second, third string) {
	sql = strings.TrimLeft(sql, " \t\r\n")
	if sql == "" || strings.IndexByte(letters, sql[0]) < 0 {
		return "", "", ""
	}
	all := strings.FieldsFunc(strings.ToLower(sql[:min(len(sql), 100)]), func(r rune) bool { return r <= ' ' || r == ';' })
	all = append(all, "", "", "")
	return all[0], all[1], all[2]
}

// errEnded is the error of a unit whose transaction its handlers ended.
func errEnded() error {
	return &provider.Error{Class: provider.ClassPermanent, Code: "tx_ended", Err: errors.New("a handler ended the transaction")}
}

// commit commits, and gives the error a class if that fails.
func commit(ctx context.Context, tx pgx.Tx) error {
	if tx.Conn().PgConn().TxStatus() == 'I' {
		return errEnded()
	}
	crash.Point("commit: before")
	err := tx.Commit(ctx)
	crash.Point("commit: after")
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return errWentOn(err)
	case inDoubt(err):
		return &provider.Error{Class: provider.ClassAmbiguous, Code: "commit", Err: fmt.Errorf("commit: %w", err)}
	}
	return class(fmt.Errorf("commit: %w", err))
}

// errWentOn is the error of a unit whose handler ignored the error of a statement.
func errWentOn(err error) error {
	return &provider.Error{Class: provider.ClassUnknown, Code: inFailedTransaction, Err: fmt.Errorf("a handler went on after an SQL error: %w", err)}
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
