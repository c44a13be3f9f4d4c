package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

func page(t *testing.T, db provider.Log, q provider.LogQuery) provider.LogPage {
	t.Helper()
	p, err := db.LogPage(context.Background(), q)
	require.NoError(t, err)
	return p
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// A commit that appended events wakes readers of the log: also that of a unit, and that of a
// caller's transaction. A rollback does not.
func TestCommitsThatAppendWakeReaders(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	ctx := context.Background()
	appendIn := func(tx *sql.Tx) error {
		_, err := db.InTx(tx).Append(ctx, "review-1", eventstore.Any, drafts(1))
		return err
	}
	undo := errors.New("undo")
	caller := func(end error) error {
		tx, err := db.SQL().BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if err = errors.Join(appendIn(tx), end); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		return tx.Commit()
	}
	unit := func(end error) error {
		return db.Do(ctx, delivery("m"), func(_ context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
			return provider.Closing{}, errors.Join(appendIn(tx), end)
		})
	}
	same := drafts(1)
	for _, c := range []struct {
		name  string
		do    func() error
		wakes bool
	}{
		{"append", func() error { _, err := db.Append(ctx, "review-2", eventstore.NoStream, same); return err }, true},
		{"the same append again", func() error { _, err := db.Append(ctx, "review-2", eventstore.NoStream, same); return err }, false},
		{"a caller's rollback", func() error { return caller(undo) }, false},
		{"a caller's commit", func() error { return caller(nil) }, true},
		{"a unit that fails", func() error { return unit(undo) }, false},
		{"a unit", func() error { return unit(nil) }, true},
		{"a caller's commit without events", func() error {
			tx, err := db.SQL().BeginTx(ctx, nil)
			return errors.Join(err, tx.Commit())
		}, false},
	} {
		appended := db.Appended()
		if err := c.do(); err != nil {
			require.ErrorIs(t, err, undo, c.name)
		}
		require.Equal(t, c.wakes, isClosed(appended), c.name)
	}
	require.Len(t, page(t, db, provider.LogQuery{}).Events, 3)
}

// A page with a filter that selects few events covers a limited number of positions, and its end
// moves.
func TestAFilteredPageIsBounded(t *testing.T) {
	t.Parallel()
	db := openAt(t, migrated(t), nil)
	const n = 45_000
	_, err := db.SQL().Exec(`with recursive g (value) as (select 1 union all select value + 1 from g where value < ?)
		insert into kinora_streams (stream, category, version) select 'review-' || value, 'review', 1 from g`, n)
	require.NoError(t, err)
	_, err = db.SQL().Exec(`insert into kinora_events (stream, version, id, type, schema_version, data, metadata, recorded_at)
		select stream, 1, printf('00000000-0000-7000-8000-%012d', n), 'review.posted', 1, '{}', '{}', 0 from (select stream, row_number() over () n from kinora_streams)`)
	require.NoError(t, err)
	q, pages := provider.LogQuery{Filter: eventstore.LogFilter{Types: []string{"other"}}}, 0
	for more := true; more; pages++ {
		p := page(t, db, q)
		require.Empty(t, p.Events)
		require.Greater(t, p.End.Position, q.After)
		require.LessOrEqual(t, p.End.Position-q.After, int64(provider.LogPageScan))
		q.After, more = p.End.Position, p.More
	}
	require.Equal(t, []int64{n, 3}, []int64{q.After, int64(pages)})
}
