package sqlite_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/sqlite"
)

type tally struct{ n int }

func (a *tally) Apply(any) { a.n++ }

type posted struct{ Stars int }

var damageTypes = eventstore.NewTypes(eventstore.Type[posted]("review.posted"))

// A stream's row was deleted or set back by hand. The stream's events can be read, but no append
// succeeds until the row is restored.
func TestEventsWithoutTheirStreamRowAreErrDamaged(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	ctx := t.Context()
	for name, damage := range map[string]string{
		"deleted":  `delete from kinora_streams where stream = ?1`,
		"set back": `update kinora_streams set version = 1 where stream = ?1`,
	} {
		t.Run(name, func(t *testing.T) {
			id := map[string]string{"deleted": "o'hara", "set back": "2"}[name]
			stream := "a-" + id
			_, err := db.Append(ctx, stream, eventstore.NoStream, drafts(2))
			require.NoError(t, err)
			_, err = db.SQL().ExecContext(ctx, damage, stream)
			require.NoError(t, err)
			refused := []eventstore.Expected{eventstore.Any, 1, 2, 7}
			if name == "deleted" {
				refused = []eventstore.Expected{eventstore.Any, eventstore.NoStream, 2, 7}
			}
			for _, expected := range refused {
				for _, n := range []int{1, 2} {
					_, err := db.Append(ctx, stream, expected, drafts(n))
					damaged(t, err, stream, "expected %d", expected)
					_, err = rolledBack(t, db, func(tx *sqlite.Tx) (eventstore.Appended, error) {
						return tx.Append(ctx, stream, expected, drafts(n))
					})
					damaged(t, err, stream, "expected %d in a transaction", expected)
				}
			}
			decisions := 0
			repo, err := eventstore.NewRepository(db, damageTypes, "a", func(string) *tally { return &tally{} }, nil)
			require.NoError(t, err)
			_, err = repo.Update(ctx, id, func(a *tally) ([]any, error) {
				decisions++
				require.Equal(t, 2, a.n, "the events can be read")
				return []any{posted{5}}, nil
			})
			damaged(t, err, stream, "update")
			require.Equal(t, 1, decisions, "the error is not a conflict, so Update does not repeat the decision")
			_, repair, _ := strings.Cut(err.Error(), "restore the row: ")
			_, err = db.SQL().ExecContext(ctx, repair)
			require.NoError(t, err, repair)
			at, err := db.Append(ctx, stream, 2, drafts(1))
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
	require.ErrorContains(t, err, "restore the row: insert into kinora_streams ")
}

// rolledBack runs fn in a transaction that is rolled back.
func rolledBack[T any](t *testing.T, db *sqlite.DB, fn func(tx *sqlite.Tx) (T, error)) (v T, err error) {
	t.Helper()
	tx, err := db.SQL().BeginTx(t.Context(), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback()) }()
	return fn(db.InTx(tx))
}
