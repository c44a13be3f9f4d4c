package postgres_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/stretchr/testify/require"
)

// feed is a broker that delivers what a test gives to it.
type feed chan *message.Message

func (f feed) Subscribe(context.Context, string) (<-chan *message.Message, error) { return f, nil }
func (feed) Close() error                                                         { return nil }

// deliver delivers messages one after another, each until it is acked.
func (f feed) deliver(t *testing.T, msgs ...*message.Message) {
	t.Helper()
	for _, m := range msgs {
		m = m.Copy()
		f <- m
		patience.Receive(t, m.Acked(), "the ack of %s", m.UUID)
	}
}

// messagesOf returns the messages that a relay publishes for the events of a stream.
func messagesOf(t *testing.T, db *postgres.DB, stream string) (msgs []*message.Message) {
	t.Helper()
	id, err := db.LogID(t.Context())
	require.NoError(t, err)
	for e, err := range db.ReadStream(t.Context(), stream, 0) {
		require.NoError(t, err)
		m := message.NewMessage(e.ID, e.Data)
		m.Metadata = provider.FromEvent(stream, e.Version, eventstore.Draft{ID: e.ID, Type: e.Type, Schema: e.Schema}, "").Headers
		m.Metadata[outbox.HeaderKey] = stream
		m.Metadata[provider.HeaderPosition] = strconv.FormatInt(e.Position, 10)
		m.Metadata[provider.HeaderLog] = id.String()
		m.Metadata[provider.HeaderRecordedAt] = e.RecordedAt.UTC().Format(time.RFC3339Nano)
		msgs = append(msgs, m)
	}
	return msgs
}

// listed returns a projector that appends the number of each event to the list of its stream.
func listed(o projector.Options) *projector.Projector[pgx.Tx] {
	return projector.Define("listed", table, o, projector.On("list", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[counted]) error {
		_, err := tx.Exec(ctx, `insert into lists as l (key, items) values ($1, array[$2::int])
			on conflict (key) do update set items = l.items || excluded.items`, e.Stream, e.Data.N)
		return err
	}))
}

// runListed runs a projector until stop is called, which returns the runner's error.
func runListed[Tx any](t *testing.T, db provider.Units[Tx], src projector.Source, cfg projector.RunnerConfig, p *projector.Projector[Tx]) (done <-chan error, stop func() error) {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Lease == 0 {
		cfg.Lease = time.Second
	}
	runner, err := projector.NewRunner(db, src, cfg, p)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended, result := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(ended)
		result <- runner.Run(ctx)
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return result, func() error {
		cancel()
		return <-result
	}
}

// appendCounted appends the numbers from first to last, each with one append, in turn to the streams c-0
// to c-2, so that stream c-i has the numbers i+1, i+4 and so on.
func appendCounted(t *testing.T, db *postgres.DB, first, last int) {
	t.Helper()
	for n := first; n <= last; n++ {
		_, err := db.Append(t.Context(), fmt.Sprint("c-", (n-1)%3), eventstore.Any, drafts(t, n))
		require.NoError(t, err)
	}
}

// listedUpTo returns the lists after the events of appendCounted up to n.
func listedUpTo(n int) map[string][]int {
	lists := map[string][]int{}
	for i := 1; i <= n; i++ {
		key := fmt.Sprint("c-", (i-1)%3)
		lists[key] = append(lists[key], i)
	}
	return lists
}

func listsOf(t *testing.T, db *postgres.DB) map[string][]int {
	t.Helper()
	rows, err := db.Pool().Query(t.Context(), `select key, items from lists`)
	require.NoError(t, err)
	lists := map[string][]int{}
	var key string
	var items []int
	_, err = pgx.ForEachRow(rows, []any{&key, &items}, func() error {
		lists[key] = slices.Clone(items)
		return nil
	})
	require.NoError(t, err)
	return lists
}

// awaitLists waits until the lists are these. Lists never have an item too many.
func awaitLists(t *testing.T, db *postgres.DB, want map[string][]int) {
	t.Helper()
	patience.Until(t, func() bool {
		got := listsOf(t, db)
		for key := range got {
			require.LessOrEqual(t, len(got[key]), len(want[key]), "%v", got)
		}
		text, _ := json.Marshal(got)
		wanted, _ := json.Marshal(want)
		return string(text) == string(wanted)
	}, "want %v", want)
}

func logged(t *testing.T) *postgres.DB {
	t.Helper()
	return postgrestest.OpenBusy(t, nil, noteTables)
}

func checkpointOf(t *testing.T, db *postgres.DB) provider.Checkpoint {
	t.Helper()
	c, err := db.Checkpoint(t.Context(), provider.Build{Projector: "listed"})
	require.NoError(t, err)
	return c
}

// The log may be in another database than the read model. Every event is applied, once and in
// order, from the log alone, and if a broker delivers some of the events.
// Promise: G7.6
func TestTheLogOfAnotherDatabase(t *testing.T) {
	t.Parallel()
	t.Run("from the log", func(t *testing.T) {
		t.Parallel()
		db, log := logged(t), logged(t)
		appendCounted(t, log, 1, 30)
		appendCounted(t, db, 1, 3) // of another log: not read
		_, stop := runListed(t, db, projector.FromLog(log), projector.RunnerConfig{}, listed(projector.Options{}))
		awaitLists(t, db, listedUpTo(30))
		appendCounted(t, log, 31, 60)
		awaitLists(t, db, listedUpTo(60))
		require.NoError(t, stop())
		c := checkpointOf(t, db)
		id, err := log.LogID(t.Context())
		require.NoError(t, err)
		require.Equal(t, []any{int64(60), id.Lineage}, []any{c.Place.Position, c.Lineage})
		require.Empty(t, listsOf(t, log))
		require.Zero(t, count(t, log, `select count(*) from kinora.checkpoints`))
	})
	t.Run("from a broker", func(t *testing.T) {
		t.Parallel()
		db, log, f := logged(t), logged(t), make(feed)
		appendCounted(t, log, 1, 30)
		cfg := projector.RunnerConfig{Log: log, Grace: 300 * time.Millisecond}
		_, stop := runListed(t, db, projector.Subscribe(f, "c"), cfg, listed(projector.Options{Markers: true, Ordered: true}))
		patience.Until(t, func() bool { return checkpointOf(t, db).Mode == provider.ModeLive }, "the projector to be live")
		appendCounted(t, log, 31, 90)
		for i := range 3 {
			all := messagesOf(t, log, fmt.Sprint("c-", i))
			for j, m := range all {
				if j%5 > 0 { // the broker loses a fifth, and delivers some of the past again
					f.deliver(t, m)
				}
			}
		}
		awaitLists(t, db, listedUpTo(90))
		patience.Until(t, func() bool { return checkpointOf(t, db).Place.Position == 90 }, "position 90")
		f.deliver(t, messagesOf(t, log, "c-0")...)
		require.NoError(t, stop())
		require.Equal(t, listedUpTo(90), listsOf(t, db))
	})
}

// The same with a read model in SQLite.
// Promise: G7.6
func TestTheLogOfAReadModelInSQLite(t *testing.T) {
	t.Parallel()
	for _, broker := range []bool{false, true} {
		t.Run(fmt.Sprint("broker ", broker), func(t *testing.T) {
			t.Parallel()
			log, f := logged(t), make(feed)
			db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "read.db"), nil)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, db.Close()) })
			require.NoError(t, db.Migrate(t.Context()))
			_, err = db.SQL().Exec(`create table items (seq integer primary key autoincrement, key text not null, n int not null)`)
			require.NoError(t, err)
			p := projector.Define("listed", table, projector.Options{Markers: broker}, projector.On("list",
				func(ctx context.Context, tx *sql.Tx, e eventstore.Event[counted]) error {
					_, err := tx.ExecContext(ctx, `insert into items (key, n) values (?1, ?2)`, e.Stream, e.Data.N)
					return err
				}))
			lists := func() map[string][]int {
				rows, err := db.SQL().Query(`select key, n from items order by seq`)
				require.NoError(t, err)
				defer func() { require.NoError(t, rows.Close()) }()
				all := map[string][]int{}
				for rows.Next() {
					var key string
					var n int
					require.NoError(t, rows.Scan(&key, &n))
					all[key] = append(all[key], n)
				}
				require.NoError(t, rows.Err())
				return all
			}
			position := func() int64 {
				c, err := db.Checkpoint(t.Context(), provider.Build{Projector: "listed"})
				require.NoError(t, err)
				return c.Place.Position
			}
			appendCounted(t, log, 1, 30)
			src, cfg := projector.FromLog(log), projector.RunnerConfig{}
			if broker {
				src, cfg = projector.Subscribe(f, "c"), projector.RunnerConfig{Log: log, Grace: 300 * time.Millisecond}
			}
			_, stop := runListed(t, db, src, cfg, p)
			patience.Until(t, func() bool { return position() == 30 }, "position 30")
			appendCounted(t, log, 31, 60)
			if broker {
				f.deliver(t, messagesOf(t, log, "c-0")...) // and loses the others
			}
			patience.Until(t, func() bool { return position() == 60 }, "position 60")
			if broker {
				f.deliver(t, messagesOf(t, log, "c-1")...)
			}
			require.NoError(t, stop())
			require.Equal(t, listedUpTo(60), lists())
		})
	}
}
