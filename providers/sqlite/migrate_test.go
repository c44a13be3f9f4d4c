package sqlite_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	moderncsqlite "modernc.org/sqlite"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

func childMigrates(path string) error {
	fmt.Println("ready")
	awaitLine()
	return migrateOnce(path)
}

func migrateOnce(path string) error {
	db, err := sqlite.Open(context.Background(), path, nil)
	if err != nil {
		return err
	}
	return errors.Join(db.Migrate(context.Background()), db.Close())
}

// Several migrators run at once on a file that does not exist yet, two of them in other
// processes. All succeed.
func TestMigratorsAtOnce(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "new.db")
	others := []*proc{start(t, "migrate", path), start(t, "migrate", path)}
	for _, o := range others {
		require.Equal(t, "ready", o.line())
	}
	errs := make(chan error)
	for range 6 {
		go func() { errs <- migrateOnce(path) }()
	}
	for _, o := range others {
		o.send("go")
	}
	for range 6 {
		require.NoError(t, <-errs)
	}
	for _, o := range others {
		o.wait()
	}
	db := openAt(t, path, routed())
	require.Equal(t, 1, count(t, db.SQL(), "kinora_migrations where version_id = 1"))
	_, err := db.Append(context.Background(), "review-1", eventstore.NoStream, drafts(2))
	require.NoError(t, err)
	require.NoError(t, db.Migrate(context.Background()), "a second migration changes nothing")
	require.Equal(t, 2, count(t, db.SQL(), "kinora_outbox"))
}

// A migrator that waits for another writer says so, and ends by its context.
func TestMigrateSaysThatItWaits(t *testing.T) {
	path := filepath.Join(t.TempDir(), "busy.db")
	db, err := sqlite.Open(t.Context(), path, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, db.Close()) }()
	hung, err := db.SQL().BeginTx(t.Context(), nil) // as a migrator that hangs: writes are immediate
	require.NoError(t, err)
	defer func() { require.NoError(t, hung.Rollback()) }()
	_, err = hung.ExecContext(t.Context(), `create table mine (n int) strict`)
	require.NoError(t, err)
	other, err := sqlite.Open(t.Context(), path, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, other.Close()) }()
	text, writer := make(chan string, 10), slog.Default()
	defer slog.SetDefault(writer)
	slog.SetDefault(slog.New(slog.NewTextHandler(lines(text), nil)))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- other.Migrate(ctx) }()
	require.Contains(t, patience.Receive(t, text, "a line of the log"), "the migration waits for the write lock of the file")
	stop()
	require.ErrorIs(t, patience.Receive(t, ended, "the migrator to end"), context.Canceled)
}

type lines chan string

func (l lines) Write(line []byte) (int, error) {
	l <- string(line)
	return len(line), nil
}

func TestMigrateLeavesTheUsersTablesAlone(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "app.db")
	db, err := sqlite.Open(context.Background(), path, nil)
	require.NoError(t, err)
	_, err = db.SQL().Exec(`create table streams (id text); insert into streams values ('mine')`)
	require.NoError(t, err)
	require.NoError(t, db.Migrate(context.Background()))
	require.Equal(t, 1, count(t, db.SQL(), "streams"))
	const foreign = `sqlite_schema where name not like 'kinora_%' and name not like 'sqlite_%' and name <> 'streams'`
	require.Equal(t, 0, count(t, db.SQL(), foreign), "the name of every table of Kinora begins with kinora_")
	require.NoError(t, db.Close())
}

// The SQL of MigrationSQL makes the same tables.
func TestMigrationSQL(t *testing.T) {
	t.Parallel()
	schema := func(db *sql.DB) (all []string) {
		rows, err := db.Query(`select sql from sqlite_schema where name like 'kinora_%' and tbl_name <> 'kinora_migrations' order by name`)
		require.NoError(t, err)
		defer rows.Close()
		for rows.Next() {
			var s string
			require.NoError(t, rows.Scan(&s))
			all = append(all, s)
		}
		return all
	}
	path := filepath.Join(t.TempDir(), "by-hand.db")
	db, err := sql.Open("sqlite", path)
	require.NoError(t, err)
	defer db.Close()
	_, err = db.Exec(sqlite.MigrationSQL())
	require.NoError(t, err)
	require.Equal(t, schema(open(t, nil).SQL()), schema(db))
	require.NotEmpty(t, schema(db))

	byHand, err := sqlite.Open(context.Background(), path, nil)
	require.NoError(t, err)
	require.NoError(t, byHand.Ready(context.Background()))
	require.NoError(t, byHand.Close())
}

// A file of an older version, which lacks a table, a column or an index, can be opened and
// migrated.
func TestAFileOfAnOlderVersionIsOpened(t *testing.T) {
	t.Parallel()
	for _, older := range []string{
		`drop table kinora_parked`, `alter table kinora_outbox rename column last_error to error`, `drop index kinora_outbox_held`,
	} {
		path := migrated(t)
		raw, err := sql.Open("sqlite", path)
		require.NoError(t, err)
		_, err = raw.Exec(older)
		require.NoError(t, err, older)
		require.NoError(t, raw.Close())
		db, err := sqlite.Open(t.Context(), path, nil)
		require.NoError(t, err, older)
		require.ErrorIs(t, db.Ready(t.Context()), sqlite.ErrNotMigrated, older)
		require.NoError(t, db.Close())
	}
}

func TestNotMigrated(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, err := sqlite.Open(ctx, filepath.Join(t.TempDir(), "empty.db"), routed())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })

	tx, err := db.SQL().Begin()
	require.NoError(t, err)
	_, inTx := db.InTx(tx).Append(ctx, "review-1", eventstore.Any, drafts(1))
	enqueue := db.InTx(tx).Enqueue(ctx, outbox.Message{Topic: "review"})
	require.NoError(t, tx.Rollback())
	_, append1 := db.Append(ctx, "review-1", eventstore.Any, drafts(1))
	_, candidates := db.EntryCandidates(ctx, provider.EntryQuery{}, 1)
	_, claims := db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{})
	_, entries := db.Entries(ctx, outbox.Filter{})
	_, counts := db.StatusCounts(ctx)
	_, skip := db.Skip(ctx, outbox.Filter{})
	_, parked := db.Parked(ctx, provider.ParkedFilter{})
	_, outcomes := db.Outcomes(ctx, []provider.Question{{Handler: handler, MessageID: "m"}})
	do := db.Do(ctx, delivery("m"), adds("p"))
	requireClass(t, do, "transient", "not_migrated")
	var read error
	for _, err := range db.ReadStream(ctx, "review-1", 0) {
		read = err
	}
	for what, err := range map[string]error{
		"append in tx": inTx, "enqueue": enqueue, "append": append1, "candidates": candidates, "claim": claims,
		"ready": db.Ready(ctx), "entries": entries, "counts": counts, "skip": skip, "parked": parked, "outcomes": outcomes, "do": do, "read": read,
	} {
		require.ErrorIs(t, err, sqlite.ErrNotMigrated, what)
		require.ErrorContains(t, err, "Migrate", what)
		var cause *moderncsqlite.Error
		require.ErrorAs(t, err, &cause, what)
	}

	_, err = db.SQL().Exec(`create table kinora_streams (stream text)`)
	require.NoError(t, err)
	require.ErrorIs(t, db.Ready(ctx), sqlite.ErrNotMigrated, "tables of another version")
	_, err = db.SQL().Exec(`drop table kinora_streams`)
	require.NoError(t, err)

	require.NoError(t, db.Migrate(ctx))
	require.NoError(t, db.Ready(ctx))
	_, err = db.Append(ctx, "review-1", eventstore.Any, drafts(1))
	require.NoError(t, err, "the same DB works after the migration")
}
