package postgres_test

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/pgtest"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// opened begins a transaction in the database of a connection string, runs a statement or append,
// and keeps the transaction open until the test ends it or ends.
func opened(t *testing.T, dsn string, in func(ctx context.Context, tx pgx.Tx) error) (pgx.Tx, int) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, in(t.Context(), tx))
	return tx, int(conn.PgConn().PID())
}

// openAppend leaves an append to a stream open, and returns the pid of its backend.
func openAppend(t *testing.T, db *postgres.DB, stream string) (pgx.Tx, int) {
	t.Helper()
	return opened(t, db.Pool().Config().ConnString(), func(ctx context.Context, tx pgx.Tx) error {
		_, err := db.InTx(tx).Append(ctx, stream, eventstore.Any, drafts(t, 1))
		return err
	})
}

func page(t *testing.T, db *postgres.DB, q provider.LogQuery) provider.LogPage {
	t.Helper()
	p, err := db.LogPage(t.Context(), q)
	require.NoError(t, err)
	return p
}

func streamsOf(p provider.LogPage) (all []string) {
	for _, e := range p.Events {
		all = append(all, e.Stream)
	}
	return all
}

func waitsFor(p provider.LogPage) (all []string) {
	for _, o := range p.Waiting {
		all = append(all, o.Backend)
	}
	return all
}

// An event is not read before those of an open append with a lower position. The page names this
// append, and no other transaction.
// Promise: G7.2
func TestAPageWaitsForAnOpenAppendOnly(t *testing.T) {
	t.Parallel()
	for _, order := range []string{"commit", "rollback"} {
		t.Run(order, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, totals)
			appendOne(t, db, "a-1")
			before := time.Now().Add(-time.Minute)
			opened(t, db.Pool().Config().ConnString(), func(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, "k", 1) })
			tx, pid := openAppend(t, db, "a-2")
			appendOne(t, db, "a-3")

			p := page(t, db, provider.LogQuery{})
			require.Equal(t, []string{"a-1"}, streamsOf(p))
			require.Equal(t, p.Events[0].ID, p.End.ID)
			require.True(t, p.More)
			require.Equal(t, []string{fmt.Sprint(pid)}, waitsFor(p))
			// The server and this test may have different clocks.
			require.WithinRange(t, p.Waiting[0].Since, before, time.Now().Add(time.Minute))
			p = page(t, db, provider.LogQuery{Unsettled: true})
			require.Equal(t, []string{"a-1", "a-3"}, streamsOf(p))
			require.Equal(t, "a-1", p.Events[0].Stream)
			require.Equal(t, p.Events[0].Position, p.End.Position, "visible events do not move the end")
			p = page(t, db, provider.LogQuery{After: p.End.Position})
			require.Equal(t, provider.LogPlace{Position: p.End.Position}, p.End)

			want := []string{"a-1", "a-3"}
			if order == "commit" {
				require.NoError(t, tx.Commit(t.Context()))
				want = []string{"a-1", "a-2", "a-3"}
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
			}
			p = page(t, db, provider.LogQuery{})
			require.Equal(t, want, streamsOf(p))
			require.False(t, p.More)
			require.Empty(t, p.Waiting)
		})
	}
}

// Transactions that append nothing do not delay a reader, in this database and in others. An open
// append in another database does not either, nor one in another schema.
// Promise: G7.2
func TestAPageDoesNotWaitForOtherTransactions(t *testing.T) {
	t.Parallel()
	db, other := postgrestest.OpenBusy(t, nil, totals), postgrestest.OpenBusy(t, nil, totals)
	ours, theirs := db.Pool().Config().ConnString(), other.Pool().Config().ConnString()
	require.NotEqual(t, ours, theirs)
	schema := "second"
	second, err := postgres.New(db.Pool(), &postgres.Config{Schema: schema})
	require.NoError(t, err)
	require.NoError(t, second.Migrate(t.Context()))
	write := func(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, "k", 1) }
	opened(t, ours, write)
	opened(t, theirs, write)
	openAppend(t, other, "b-1")
	openAppend(t, second, "c-1")
	_, err = db.Pool().Exec(t.Context(), `select nextval('kinora.events_position_seq') from generate_series(1, 10000)`)
	require.NoError(t, err)
	appendOne(t, db, "a-1")
	p := page(t, db, provider.LogQuery{})
	require.Equal(t, []string{"a-1"}, streamsOf(p))
	require.Empty(t, p.Waiting)
	require.False(t, p.More)
}

// If ctx ends while ReadLog waits, the error names the open append.
// Promise: G7.2
func TestReadLogNamesWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	tx, pid := openAppend(t, db, "a-1")
	appendOne(t, db, "a-2")
	names, limit := regexp.MustCompile(fmt.Sprintf(`waited [\dms.]+ for the open appends of %d \(since `, pid)), 50*time.Millisecond
	patience.Until(t, func() (named bool) {
		limit *= 2 // the context may end before the first page
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		n := 0
		for e, err := range db.ReadLog(ctx, eventstore.From{}, eventstore.LogFilter{}) {
			n++
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Zero(t, e)
			named = names.MatchString(err.Error())
		}
		require.Equal(t, 1, n)
		return named
	}, "an error with the open append")
	// it goes on when the append has ended
	read := make(chan []string)
	go func() {
		var all []string
		for e, err := range db.ReadLog(t.Context(), eventstore.From{}, eventstore.LogFilter{}) {
			if err != nil {
				all = append(all, err.Error())
			}
			all = append(all, e.Stream)
		}
		read <- all
	}()
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, []string{"a-1", "a-2"}, <-read)
}

// If a reader has read the head, an append that begins later adds events only behind that head. It
// does not delay earlier events, even if positions are missing there.
// Promise: G7.2
func TestAnAppendDelaysOnlyWhatIsBehindIt(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	appendOne(t, db, "a-1")
	rollBack, _ := openAppend(t, db, "a-2")
	require.NoError(t, rollBack.Rollback(t.Context()))
	appendOne(t, db, "a-3")
	page(t, db, provider.LogQuery{Limit: 1}) // looks at the log
	_, pid := openAppend(t, db, "a-4")
	appendOne(t, db, "a-5")
	p := page(t, db, provider.LogQuery{})
	require.Equal(t, []string{"a-1", "a-3"}, streamsOf(p))
	require.Equal(t, []string{fmt.Sprint(pid)}, waitsFor(p))
	require.Equal(t, []string{"a-3"}, streamsOf(page(t, db, provider.LogQuery{After: p.Events[0].Position})))
}

// Without a missing position, no open append can be before the visible events.
// Promise: G7.2
func TestAPageDoesNotWaitIfNothingIsMissing(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	appendOne(t, db, "a-1")
	appendOne(t, db, "a-2")
	openAppend(t, db, "a-3")
	p := page(t, db, provider.LogQuery{})
	require.Equal(t, []string{"a-1", "a-2"}, streamsOf(p))
	require.Empty(t, p.Waiting)
}

// A prepared transaction holds its positions without a backend.
// Promise: G7.2
func TestAPageWaitsForAPreparedAppend(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	if count(t, db, `select current_setting('max_prepared_transactions')::int`) == 0 {
		t.Skip("the server of KINORA_POSTGRES has max_prepared_transactions = 0")
	}
	id := "log-" + strings.ToLower(t.Name())
	tx, _ := openAppend(t, db, "a-1")
	_, err := tx.Exec(t.Context(), "prepare transaction '"+id+"'")
	require.NoError(t, err)
	appendOne(t, db, "a-2")
	p := page(t, db, provider.LogQuery{})
	require.Empty(t, p.Events)
	require.Equal(t, []string{"prepared transaction " + id}, waitsFor(p))
	require.False(t, p.Waiting[0].Since.IsZero())
	_, err = db.Pool().Exec(t.Context(), "commit prepared '"+id+"'")
	require.NoError(t, err)
	require.Equal(t, []string{"a-1", "a-2"}, streamsOf(page(t, db, provider.LogQuery{})))
}

// A Listener wakes readers of the log when another process appends events, also without entries.
func TestNotificationsWakeReadersOfOtherProcesses(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	here := notifying(t, dsn, false)
	there, err := postgres.Open(t.Context(), dsn, &postgres.Config{Notify: true})
	require.NoError(t, err)
	t.Cleanup(there.Close)
	listen(t, here, nil, true)
	for range 3 {
		appended := here.Appended()
		appendOne(t, there, "a-1")
		patience.Receive(t, appended, "the append of another process")
		require.NotEmpty(t, page(t, here, provider.LogQuery{}).Events)
	}
}

// If a database cannot show which events are missing, reading is refused, with the remedy.
// Promise: G7.3
func TestAnUnsafeLogIsRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ spoil, says, remedy string }{
		"cache":     {`alter sequence kinora.events_position_seq cache 20`, "set cache 1", `alter table kinora.events alter position set cache 1 set increment 1 set no cycle`},
		"increment": {`alter sequence kinora.events_position_seq increment 2`, "set increment 1", `alter table kinora.events alter position set cache 1 set increment 1 set no cycle`},
		"trigger":   {`alter table kinora.events disable trigger hold_gap`, "enable always trigger hold_gap", `alter table kinora.events enable always trigger hold_gap`},
		"subscription": {`set allow_system_table_mods = on; insert into pg_subscription_rel values (4294967295, 'kinora.events'::regclass, 'r', null)`,
			"read the log on the publisher", `set allow_system_table_mods = on; delete from pg_subscription_rel where srsubid = 4294967295`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil)
			appendOne(t, db, "a-1")
			require.Len(t, page(t, db, provider.LogQuery{}).Events, 1)
			exec := func(sql string) {
				conn, err := pgx.Connect(t.Context(), db.Pool().Config().ConnString())
				require.NoError(t, err)
				defer func() { _ = conn.Close(context.Background()) }()
				_, err = conn.Exec(t.Context(), sql)
				require.NoError(t, err)
			}
			exec(c.spoil)
			_, err := db.LogPage(t.Context(), provider.LogQuery{})
			require.ErrorIs(t, err, eventstore.ErrUnsafeLog)
			require.ErrorContains(t, err, c.says)
			for _, err := range db.ReadLog(t.Context(), eventstore.From{}, eventstore.LogFilter{}) {
				require.ErrorIs(t, err, eventstore.ErrUnsafeLog)
			}
			exec(c.remedy)
			require.Len(t, page(t, db, provider.LogQuery{}).Events, 1)
		})
	}
}

// Without the right to see others' transactions, an open append is named without its time.
func TestAnOpenAppendOfAnotherRoleIsNamed(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	for _, sql := range []string{script(t, postgres.RolesSQL, "kinora"), script(t, postgres.GrantsSQL, "kinora")} {
		_, err := db.Pool().Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	_, pid := openAppend(t, db, "a-1")
	appendOne(t, db, "a-2")
	p := page(t, as(t, db, "kinora_projector"), provider.LogQuery{})
	require.Equal(t, []provider.OpenAppend{{Backend: fmt.Sprint(pid)}}, p.Waiting)
}

// A settled position counts for one server only. Here the table goes back behind that position, as
// after a restore from a backup, and the sequence goes on from there.
// Promise: G7.3
func TestARestartBeginsTheProofAgain(t *testing.T) {
	t.Parallel()
	server := pgtest.Private(t, "fsync=on")
	db, err := postgres.Open(t.Context(), server.DSN, nil)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	require.NoError(t, db.Migrate(t.Context()))
	for _, stream := range []string{"a-1", "a-2", "a-3"} {
		appendOne(t, db, stream)
	}
	require.Len(t, page(t, db, provider.LogQuery{}).Events, 3)
	_, err = db.Pool().Exec(t.Context(), `delete from kinora.events where position > 1; delete from kinora.streams where stream <> 'a-1'; alter sequence kinora.events_position_seq restart 2`)
	require.NoError(t, err)
	require.NoError(t, server.Restart("INT"))
	patience.Until(t, func() bool { return db.Pool().Ping(t.Context()) == nil }, "the server")
	_, pid := openAppend(t, db, "a-2")
	appendOne(t, db, "a-3")
	var p provider.LogPage
	patience.Until(t, func() bool { // connections of the pool may be broken
		p, err = db.LogPage(t.Context(), provider.LogQuery{})
		return err == nil
	}, "a page of the log")
	require.Equal(t, []string{"a-1"}, streamsOf(p))
	require.Equal(t, []string{fmt.Sprint(pid)}, waitsFor(p))
}

// A replica does not show the locks of the primary. Once it is promoted, it is another branch of the
// same log.
// Promise: G7.3
func TestAReplicaIsRefusedUntilItIsPromoted(t *testing.T) {
	t.Parallel()
	primary := pgtest.Private(t)
	db, err := postgres.Open(t.Context(), primary.DSN, nil)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	require.NoError(t, db.Migrate(t.Context()))
	appendOne(t, db, "a-1")
	standby := primary.Standby(t)
	replica, err := postgres.Open(t.Context(), standby.DSN, nil)
	require.NoError(t, err)
	t.Cleanup(replica.Close)
	_, err = replica.LogPage(t.Context(), provider.LogQuery{})
	require.ErrorIs(t, err, eventstore.ErrUnsafeLog)
	require.ErrorContains(t, err, "connect to the primary")

	// A statement that waits for the promotion, or any other, may be in the way of what the standby replays, and is canceled.
	patience.NoError(t, func() error {
		_, err := replica.Pool().Exec(t.Context(), `select pg_promote(wait => false)`)
		return err
	})
	patience.Until(t, func() bool {
		var standby bool
		err := replica.Pool().QueryRow(t.Context(), `select pg_is_in_recovery()`).Scan(&standby)
		return err == nil && !standby
	}, "the promotion")
	require.Equal(t, []string{"a-1"}, streamsOf(page(t, replica, provider.LogQuery{})))
	before, err := db.LogID(t.Context())
	require.NoError(t, err)
	after, err := replica.LogID(t.Context())
	require.NoError(t, err)
	require.Equal(t, before.Lineage, after.Lineage)
	require.NotEqual(t, before.Branch, after.Branch, "two servers with one lineage")
	again, err := db.LogID(t.Context())
	require.NoError(t, err)
	require.Equal(t, before, again)
}
