package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// forms are the two transaction types, with a handler that adds to a total.
var forms = map[string]func(ctx context.Context, db *postgres.DB, u provider.Unit, key string) error{
	"tx": func(ctx context.Context, db *postgres.DB, u provider.Unit, key string) error {
		return do(ctx, db, u, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) { return nil, add(ctx, tx, key, 1) })
	},
	"batch": func(ctx context.Context, db *postgres.DB, u provider.Unit, key string) error {
		return queue(ctx, db, u, func(_ context.Context, b *pgx.Batch) ([]outbox.Message, error) {
			b.Queue(addSQL, key, 1)
			return nil, nil
		})
	},
}

// appliesOnce delivers a message 50 times at once.
func appliesOnce(t *testing.T, form string) {
	db := postgrestest.Open(t, nil, totals)
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			if err := forms[form](t.Context(), db, marked("m"), "k"); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	require.Equal(t, 1, count(t, db, `select n from totals where key = 'k'`))
}

func TestUnitsApplyOnce(t *testing.T) {
	t.Parallel()
	appliesOnce(t, "tx")
}

// In one round trip only an error of the marker's insert prevents the effect of the handlers'
// statements.
// Promise: G4.1
func TestBatchedUnitsApplyOnce(t *testing.T) {
	t.Parallel()
	appliesOnce(t, "batch")
}

// queued runs a unit whose message i queues statement i.
func queued(ctx context.Context, db *postgres.DB, u provider.Unit, statements [][]any) (runs []provider.Found, err error) {
	err = db.Batched().Do(ctx, u, func(_ context.Context, b *pgx.Batch, found provider.Found) (provider.Closing, error) {
		runs = append(runs, found)
		for i, s := range statements {
			if found.Begin(i); found.Fresh[i][0] && !found.Held[i] {
				b.Queue(s[0].(string), s[1:]...)
			}
		}
		return provider.Closing{}, nil
	})
	return runs, err
}

// A failed statement belongs to the message that queued it, in one round trip and in two, in
// every mode of pgx.
// Promise: G6.5
func TestAFailingStatementBelongsToItsMessage(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil, totals)
	for _, mode := range []string{"", "&default_query_exec_mode=exec", "&default_query_exec_mode=simple_protocol"} {
		db := borrowed(t, nil, dsn+mode)
		for _, once := range []bool{false, true} {
			for k := range 4 {
				for bad, of := range map[string]int{"insert into totals (key) values (null)": k, "select 1 / (select 0)": k, "insert into nowhere values (1)": k} {
					u := marked("a", "b", "c", "d")
					u.Once = once
					statements := [][]any{{addSQL, "k", 1}, {addSQL, "k", 1}, {addSQL, "k", 1}, {addSQL, "k", 1}}
					statements[k] = []any{bad}
					_, err := queued(t.Context(), db, u, statements)
					var e *provider.MessageError
					require.ErrorAs(t, err, &e, "%s %s: %v", mode, bad, err)
					require.Equal(t, of, e.Message, "%s %s: %v", mode, bad, err)
					require.NotNil(t, func() *pgconn.PgError { p, _ := errors.AsType[*pgconn.PgError](err); return p }(), "%v", err)
				}
			}
		}
	}
	require.Zero(t, count(t, borrowed(t, nil, dsn), `select (select count(*) from totals) + (select count(*) from kinora.markers)`))
}

// If several messages queued the same statement, arguments that cannot be encoded belong to none
// of them.
func TestArgumentsThatCannotBeEncoded(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	const narrow = `insert into totals values ($1, $2::int4)`
	wide := int64(1) << 40
	// the second time the statement is prepared
	for range 2 {
		_, err := queued(t.Context(), db, marked("a", "b"), [][]any{{addSQL, "k", 1}, {narrow, "k", wide}})
		var e *provider.MessageError
		require.ErrorAs(t, err, &e)
		require.Equal(t, 1, e.Message)
		require.Equal(t, provider.ClassUnknown, provider.ClassOf(err), "%v", err)
		_, err = queued(t.Context(), db, marked("a", "b"), [][]any{{narrow, "k", 1}, {narrow, "l", wide}})
		require.Error(t, err)
		require.False(t, errors.As(err, &e), "%v", err)
		require.Equal(t, provider.ClassUnknown, provider.ClassOf(err), "%v", err)
	}
	require.Zero(t, count(t, db, `select (select count(*) from totals) + (select count(*) from kinora.markers)`))
}

// In a transaction, the error of a statement belongs to the message that began last, even if its
// handler ignored the error and the handlers of later messages get the failed transaction.
func TestAFailingStatementInATransactionBelongsToItsMessage(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	ignores := func(last func(ctx context.Context, tx pgx.Tx) error) error {
		return db.Do(t.Context(), marked("a", "b", "c"), func(ctx context.Context, tx pgx.Tx, found provider.Found) (provider.Closing, error) {
			found.Begin(0)
			require.NoError(t, add(ctx, tx, "k", 1))
			found.Begin(1)
			_, _ = tx.Exec(ctx, `select 1 / 0`)
			found.Begin(2)
			return provider.Closing{}, last(ctx, tx)
		})
	}
	for name, c := range map[string]struct {
		err  error
		code string
	}{
		"returned": {db.Do(t.Context(), marked("a", "b"), func(ctx context.Context, tx pgx.Tx, found provider.Found) (provider.Closing, error) {
			found.Begin(0)
			found.Begin(1)
			_, err := tx.Exec(ctx, `select 1 / 0`)
			return provider.Closing{}, fmt.Errorf("divide: %w", err)
		}), "22012"},
		"ignored": {ignores(func(context.Context, pgx.Tx) error { return nil }), "25P02"},
		"ignored, then returned by the next statement": {ignores(func(ctx context.Context, tx pgx.Tx) error { return add(ctx, tx, "k", 1) }), "25P02"},
	} {
		var e *provider.MessageError
		require.ErrorAs(t, c.err, &e, name)
		require.Equal(t, 1, e.Message, name)
		require.Equal(t, c.code, provider.CodeOf(c.err), "%s: %v", name, c.err)
	}
	require.Zero(t, count(t, db, `select (select count(*) from totals) + (select count(*) from kinora.markers)`))
}

// A unit of one message or of many takes one round trip. If a marker exists or a lane is held, it
// takes a second one: nothing of the first was committed, and the handlers run again.
func TestWhichUnitsTakeASecondTrip(t *testing.T) {
	t.Parallel()
	proxy, db, direct := throughProxy(t)
	park(t, direct, "held", "parked")
	n := 0
	unit := func(size int) provider.Unit {
		var ids []string
		for range size {
			n++
			ids = append(ids, fmt.Sprint("m", n))
		}
		return marked(ids...)
	}
	known := unit(1)
	adds := func(n int) (s [][]any) {
		for range n {
			s = append(s, []any{addSQL, "k", 1})
		}
		return s
	}
	_, err := queued(t.Context(), db, known, adds(1))
	require.NoError(t, err)
	_, err = queued(t.Context(), db, unit(2), adds(2)) // prepares the statements
	require.NoError(t, err)
	total := 3
	for _, c := range []struct {
		name    string
		size    int
		change  func(u *provider.Unit)
		trips   int
		runs    int
		applies int
	}{
		{"one message", 1, func(*provider.Unit) {}, 1, 1, 1},
		{"many", 32, func(*provider.Unit) {}, 1, 1, 32},
		{"very many", 500, func(*provider.Unit) {}, 1, 1, 500},
		{"serial", 2, func(u *provider.Unit) { u.Serial = true }, 1, 1, 2},
		{"without a marker", 1, func(u *provider.Unit) { u.Messages[0].Mark = false }, 1, 1, 1},
		{"once", 2, func(u *provider.Unit) { u.Once = true }, 2, 1, 2},
		{"careful", 2, func(u *provider.Unit) { u.Careful = &provider.Worker{Runner: "me"} }, 2, 1, 2},
		{"a marker exists", 3, func(u *provider.Unit) { u.Messages[1] = known.Messages[0] }, 3, 2, 2},
		{"a lane is held", 3, func(u *provider.Unit) { u.Messages[1].Lane = provider.LaneOfKey("held") }, 3, 2, 2},
		{"a lane is held, without a marker", 1, func(u *provider.Unit) {
			u.Messages[0].Lane, u.Messages[0].Mark = provider.LaneOfKey("held"), false
		}, 3, 2, 0},
	} {
		for _, prepared := range []bool{false, true} {
			u := unit(c.size)
			c.change(&u)
			before := proxy.RoundTrips()
			runs, err := queued(t.Context(), db, u, adds(c.size))
			require.NoError(t, err, c.name)
			require.Len(t, runs, c.runs, c.name)
			total += c.applies
			require.Equal(t, total, count(t, direct, `select n from totals where key = 'k'`), c.name)
			if prepared && c.runs == 1 {
				require.Equal(t, c.trips, proxy.RoundTrips()-before, c.name)
			}
		}
	}
}

// park parks a message with this id in the lane of a key, due now, and returns it.
func park(t *testing.T, db *postgres.DB, key, id string) provider.Parked {
	t.Helper()
	m := delivery(id)
	m.Lane = provider.LaneOfKey(key)
	u := provider.Unit{Projector: "p", Messages: []provider.Message{m}}
	p := provider.Parked{Projector: "p", Handler: "p/a", Handlers: []string{"p/a"}, MessageID: id, Key: key, Lane: m.Lane, Attempts: 1, Headers: map[string]string{}}
	require.NoError(t, db.Do(t.Context(), u, func(_ context.Context, _ pgx.Tx, found provider.Found) (provider.Closing, error) {
		if found.Held[0] {
			p.Class, p.Attempts = provider.ClassHeld, 0
		}
		return provider.Closing{Park: []provider.Aside{{Parked: p}}}, nil
	}))
	list, err := db.Parked(t.Context(), provider.ParkedFilter{Key: key})
	require.NoError(t, err)
	return list[len(list)-1]
}

// again returns a unit of parked messages.
func again(ps ...provider.Parked) provider.Unit {
	u := provider.Unit{Projector: "p"}
	for _, p := range ps {
		var hs []provider.Handler
		for _, h := range p.Handlers {
			hs = append(hs, provider.Handler{Name: h})
		}
		u.Messages = append(u.Messages, provider.Message{ID: p.MessageID, Lane: p.Lane, Handlers: hs, Parked: &p})
	}
	return u
}

// A queued statement that ends or begins the transaction, or has a callback, is refused before a
// statement is sent.
func TestWhichStatementsMayNotBeQueued(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	for _, once := range []bool{false, true} {
		for _, sql := range []string{"commit", " Rollback", "end;", "abort work", "BEGIN", "begin;", "start transaction", "prepare transaction 'x'", "rollback and chain"} {
			u := marked("m", "n")
			u.Once = once
			_, err := queued(t.Context(), db, u, [][]any{{addSQL, "k", 1}, {sql}})
			require.Equal(t, provider.ClassPermanent, provider.ClassOf(err), "%s: %v", sql, err)
			var e *provider.MessageError
			require.ErrorAs(t, err, &e, sql)
			require.Equal(t, 1, e.Message, sql)
		}
		u := marked("m")
		u.Once = once
		err := db.Batched().Do(t.Context(), u, func(_ context.Context, b *pgx.Batch, _ provider.Found) (provider.Closing, error) {
			b.Queue(addSQL, "k", 1).Exec(func(pgconn.CommandTag) error { return errBroken })
			return provider.Closing{}, nil
		})
		require.Equal(t, provider.ClassPermanent, provider.ClassOf(err), "%v", err)
		for _, hidden := range []string{"/* */ begin", "/* */ begin; -- "} {
			u = marked("hidden" + hidden)
			u.Once = once
			_, err = queued(t.Context(), db, u, [][]any{{hidden}})
			if !once {
				require.Equal(t, provider.ClassPermanent, provider.ClassOf(err), "%v", err)
			}
		}
	}
	require.Zero(t, count(t, db, `select count(*) from totals`))
	require.Zero(t, count(t, db, `select count(*) from kinora.markers where message_id in ('m', 'n')`))
	for _, fine := range []string{"select 'commit'", "delete from totals", "create temp table x (a int)", "select set_config('x.y', 'begin', true)"} {
		_, err := queued(t.Context(), db, marked(fine), [][]any{{fine}})
		require.NoError(t, err, fine)
	}
}

// Serial units run one after another, also with several messages. Other units do not wait for
// them.
func TestSerialUnitsFollowOneAnother(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	inside, resume, done := make(chan struct{}), make(chan struct{}), make(chan error, 2)
	serial := func(ids ...string) provider.Unit { u := marked(ids...); u.Serial = true; return u }
	go func() {
		done <- do(t.Context(), db, serial("a", "b"), func(context.Context, pgx.Tx) ([]outbox.Message, error) {
			close(inside)
			<-resume
			return nil, nil
		})
	}()
	<-inside
	for name, apply := range forms {
		require.NoError(t, apply(t.Context(), db, marked("not serial "+name), "k"))
		other := serial("another projector's " + name)
		other.Projector = "q"
		require.NoError(t, apply(t.Context(), db, other, "k"))
	}
	for name, apply := range forms {
		go func() { done <- apply(t.Context(), db, serial("c "+name, "d "+name), "serial") }()
	}
	waiting(t, db, 2)
	require.Zero(t, count(t, db, `select count(*) from totals where key = 'serial'`))
	close(resume)
	for range 3 {
		require.NoError(t, <-done)
	}
	require.Equal(t, 2, count(t, db, `select n from totals where key = 'serial'`))
}

// Ids that are not text, or too long for an index, have distinct markers and rows of messages in
// flight too.
func TestMarkersOfAnyID(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	ids := []string{"plain", "nul\x00", "nul\uFFFD", "no \xff text", "no \xfe text", strings.Repeat("long ", 2000), strings.Repeat("long ", 2000) + "x"}
	w := &provider.Worker{Runner: "me"}
	require.NoError(t, db.InFlight(t.Context(), provider.Build{Projector: "p"}, provider.Worker{Runner: "other"}, ids[1:3]))
	for range 2 {
		for name, apply := range forms {
			for _, id := range ids {
				require.NoError(t, apply(t.Context(), db, marked(name+id), "k"))
			}
			require.NoError(t, apply(t.Context(), db, marked(ids...), "k"))
		}
	}
	require.Equal(t, 2*len(ids)+1, count(t, db, `select n from totals where key = 'k'`))
	require.NoError(t, db.InFlight(t.Context(), provider.Build{Projector: "p"}, *w, ids))
	u := marked(ids...)
	u.Careful = w
	require.NoError(t, db.Do(t.Context(), u, func(_ context.Context, _ pgx.Tx, found provider.Found) (provider.Closing, error) {
		require.Equal(t, []bool{false, true, true, false, false, false, false}, found.Suspect)
		return provider.Closing{}, nil
	}))
	require.Equal(t, 2, count(t, db, `select count(*) from kinora.in_flight`), "the commit has deleted the worker's rows")
	for _, id := range ids {
		got, err := db.Outcomes(t.Context(), []provider.Question{question("p/a", id)})
		require.NoError(t, err)
		require.Equal(t, []provider.Outcome{provider.OutcomeApplied}, got)
	}
}

// A unit whose ctx ends while it waits for another one is not counted, and leaves no effect.
func TestAWaitIsNotCounted(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	inside, resume, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- do(t.Context(), db, marked("m"), func(context.Context, pgx.Tx) ([]outbox.Message, error) {
			close(inside)
			<-resume
			return nil, nil
		})
	}()
	<-inside
	waits := func(ctx context.Context, end func(), apply func(context.Context, *postgres.DB, provider.Unit, string) error) error {
		ended := make(chan error, 1)
		go func() { ended <- apply(ctx, db, marked("m"), "k") }()
		waiting(t, db, 1)
		end()
		return <-ended
	}
	for name, apply := range forms {
		ctx, end := patience.Deadline(t)
		err := waits(ctx, end, apply)
		require.Equal(t, provider.ClassTransient, provider.ClassOf(err), "%s: %v", name, err)
		waiting(t, db, 0)
		ctx, end = context.WithCancel(t.Context())
		err = waits(ctx, end, apply)
		require.Contains(t, []provider.Class{provider.ClassTransient, provider.ClassShutdown}, provider.ClassOf(err), "%s: %v", name, err)
		waiting(t, db, 0)
	}
	close(resume)
	require.NoError(t, <-done)
	require.Zero(t, count(t, db, `select count(*) from totals`))
	patience.Until(t, func() bool {
		return count(t, db, `select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())`) == 0
	}, "the end of all advisory locks")
}

// Without Options.Markers, no statement reads or writes markers: their table need not exist.
func TestWithoutMarkersTheirTableIsNotTouched(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, totals)
	_, err := db.Pool().Exec(t.Context(), `drop table kinora.markers`)
	require.NoError(t, err)
	unmarked := marked("m")
	unmarked.Messages[0].Mark = false
	require.NoError(t, do(t.Context(), db, unmarked, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
		return nil, add(ctx, tx, "k", 1)
	}))
	require.NoError(t, queue(t.Context(), db, unmarked, func(_ context.Context, b *pgx.Batch) ([]outbox.Message, error) {
		b.Queue(addSQL, "k", 1)
		return nil, nil
	}))
	require.Equal(t, 2, count(t, db, `select n from totals where key = 'k'`))
	require.Error(t, do(t.Context(), db, marked("m"), nil), "as a control: with markers the table is missing")
}

// A runner applies deliveries without Options.Markers although there is no table of markers.
func TestUnitsOfARunnerWithoutMarkersDoNotTouchTheirTable(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil, noteTables)
	_, err := db.Pool().Exec(t.Context(), `alter table kinora.markers rename to markers_gone;
		insert into broker (consumer, id, key, n) values (0, 'm', 'k', 1), (0, 'n', 'k', 1)`) // in one unit, a repeated id would count once
	require.NoError(t, err)
	p := projector.Define("noted", notes, projector.Options{}, projector.On("noted", sum))
	cfg := projector.RunnerConfig{Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), LogErrors: true}
	runner, err := projector.NewRunner(db, projector.Subscribe(&tableBroker{pool: db.Pool()}, "notes"), cfg, p)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- runner.Run(ctx) }()
	patience.Until(t, func() bool { return count(t, db, `select coalesce(sum(n), 0) from sums`) == 2 }, "both deliveries to be applied")
	stop()
	require.NoError(t, patience.Receive(t, ended, "the runner to stop"))
}
