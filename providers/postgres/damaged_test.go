package postgres_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

type tally struct{ n int }

func (a *tally) Apply(event any) { a.n += event.(counted).N }

// A stream's row was deleted or set back by hand. The stream's events can be read, but no append
// succeeds until the row is restored.
func TestEventsWithoutTheirStreamRowAreErrDamaged(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, &postgres.Config{Schema: "shop"})
	ctx := t.Context()
	for name, damage := range map[string]string{
		"deleted":  `delete from shop.streams where stream = $1`,
		"set back": `update shop.streams set version = 1 where stream = $1`,
	} {
		t.Run(name, func(t *testing.T) {
			id := map[string]string{"deleted": "o'hara", "set back": "2"}[name]
			stream := "a-" + id
			_, err := db.Append(ctx, stream, eventstore.NoStream, drafts(t, 1, 2))
			require.NoError(t, err)
			_, err = db.Pool().Exec(ctx, damage, stream)
			require.NoError(t, err)
			refused := []eventstore.Expected{eventstore.Any, 1, 2, 7}
			if name == "deleted" {
				refused = []eventstore.Expected{eventstore.Any, eventstore.NoStream, 2, 7}
			}
			for _, expected := range refused {
				for _, n := range [][]int{{3}, {3, 4}} {
					_, err := db.Append(ctx, stream, expected, drafts(t, n...))
					damaged(t, err, stream, "expected %d", expected)
					_, err = rolledBack(t, db, func(tx *postgres.Tx) (eventstore.Appended, error) {
						return tx.Append(ctx, stream, expected, drafts(t, n...))
					})
					damaged(t, err, stream, "expected %d in a transaction", expected)
				}
			}
			decisions := 0
			repo, err := eventstore.NewRepository(db, table, "a", func(string) *tally { return &tally{} }, nil)
			require.NoError(t, err)
			_, err = repo.Update(ctx, id, func(a *tally) ([]any, error) {
				decisions++
				require.Equal(t, 3, a.n, "the events can be read")
				return []any{counted{5}}, nil
			})
			damaged(t, err, stream, "update")
			require.Equal(t, 1, decisions, "the error is not a conflict, so Update does not repeat the decision")
			_, repair, _ := strings.Cut(err.Error(), "restore the row: ")
			_, err = db.Pool().Exec(ctx, repair)
			require.NoError(t, err, repair)
			at, err := db.Append(ctx, stream, 2, drafts(t, 3))
			require.NoError(t, err, "the SQL in the error restores the stream")
			require.EqualValues(t, 3, at.Version)
		})
	}
}

func damaged(t *testing.T, err error, stream, what string, args ...any) {
	t.Helper()
	require.ErrorIs(t, err, eventstore.ErrDamaged, append([]any{what}, args...)...)
	require.ErrorContains(t, err, stream)
	require.NotErrorIs(t, err, eventstore.ErrConflict)
	require.NotErrorIs(t, err, eventstore.ErrAmbiguous)
	require.ErrorContains(t, err, "restore the row: insert into shop.streams ")
}

var errRollback = errors.New("roll back")

// rolledBack runs fn in a transaction that is rolled back.
func rolledBack[T any](t *testing.T, db *postgres.DB, fn func(tx *postgres.Tx) (T, error)) (v T, err error) {
	t.Helper()
	end := pgx.BeginFunc(t.Context(), db.Pool(), func(tx pgx.Tx) error {
		v, err = fn(db.InTx(tx))
		return errRollback
	})
	require.ErrorIs(t, end, errRollback)
	return v, err
}

// beforeBeyond calls fn before the statement that looks for events past the stream's row.
type beforeBeyond struct {
	once sync.Once
	fn   func()
}

func (b *beforeBeyond) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.Contains(q.SQL, "select exists (select from kinora.events") {
		b.once.Do(b.fn)
	}
	return ctx
}

func (*beforeBeyond) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Another append commits while an append at a too high version finds out why it failed. The
// stream is healthy then.
func TestAConcurrentAppendIsNotTakenForDamage(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	other := borrowed(t, nil, dsn)
	_, err := other.Append(t.Context(), "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
	reached := false
	trace := &beforeBeyond{fn: func() {
		reached = true
		_, err := other.Append(t.Context(), "a-1", 1, drafts(t, 2))
		require.NoError(t, err)
	}}
	db := borrowed(t, nil, dsn, func(c *pgxpool.Config) { c.ConnConfig.Tracer = trace })
	_, err = db.Append(t.Context(), "a-1", 7, drafts(t, 3))
	require.True(t, reached)
	require.ErrorIs(t, err, eventstore.ErrConflict)
	require.NotErrorIs(t, err, eventstore.ErrDamaged)
}

// The SQL that restores a stream's row may run again while others append: it never sets the
// version back.
func TestRestoringAStreamDoesNotSetItsVersionBack(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, &postgres.Config{Schema: "shop"})
	ctx := t.Context()
	_, err := db.Append(ctx, "a-1", eventstore.NoStream, drafts(t, 1))
	require.NoError(t, err)
	_, err = db.Pool().Exec(ctx, `delete from shop.streams`)
	require.NoError(t, err)
	_, err = db.Append(ctx, "a-1", 1, drafts(t, 2))
	_, repair, _ := strings.Cut(err.Error(), "restore the row: ")
	_, err = db.Pool().Exec(ctx, repair)
	require.NoError(t, err)

	done := make(chan error, 1)
	err = pgx.BeginFunc(ctx, db.Pool(), func(tx pgx.Tx) error {
		if _, err := db.InTx(tx).Append(ctx, "a-1", 1, drafts(t, 2)); err != nil {
			return err
		}
		go func() {
			_, err := db.Pool().Exec(ctx, repair)
			done <- err
		}()
		waiting(t, db, 1)
		return nil
	})
	require.NoError(t, err)
	require.NoError(t, <-done)
	at, err := db.Append(ctx, "a-1", 2, drafts(t, 3))
	require.NoError(t, err)
	require.EqualValues(t, 3, at.Version)
}
