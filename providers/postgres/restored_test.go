package postgres_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// restorable is a database that a test copies to a backup, and restores from it.
type restorable struct {
	*testing.T
	*postgres.DB
	name   string
	config *pgxpool.Config
	server *pgx.Conn
}

func newRestorable(t *testing.T) *restorable {
	t.Helper()
	config, err := pgxpool.ParseConfig(postgrestest.DSN(t, nil, noteTables))
	require.NoError(t, err)
	config.MaxConns = 16
	r := &restorable{T: t, name: config.ConnConfig.Database, config: config}
	server := config.ConnConfig.Copy()
	server.Database = "postgres"
	r.server, err = pgx.ConnectConfig(t.Context(), server)
	require.NoError(t, err)
	t.Cleanup(func() { _ = r.server.Close(t.Context()) })
	r.open()
	return r
}

func (r *restorable) open() {
	pool, err := pgxpool.NewWithConfig(r.Context(), r.config)
	require.NoError(r, err)
	r.Cleanup(pool.Close)
	r.DB, err = postgres.New(pool, nil)
	require.NoError(r, err)
}

func (r *restorable) exec(format string, args ...any) {
	r.Helper()
	_, err := r.server.Exec(r.Context(), fmt.Sprintf(format, args...))
	require.NoError(r, err)
}

// backup copies the database. restore replaces the database by the copy: its connections end, and
// it has another oid, as after pg_restore.
func (r *restorable) backup() (restore func()) {
	r.Helper()
	r.Pool().Close()
	copied := r.name + "_backup"
	patience.Until(r.T, func() bool { // the backends of the pool may still be ending
		_, err := r.server.Exec(r.Context(), fmt.Sprintf("create database %s template %s", copied, r.name))
		return err == nil
	}, "a copy of the database")
	r.open()
	return func() {
		r.exec("drop database %s with (force)", r.name)
		r.exec("alter database %s rename to %s", copied, r.name)
	}
}

// A read model that was restored from a backup has an earlier checkpoint, and catches up. Without a
// broker, and if the broker delivers the messages again.
// Promise: G7.12
func TestARestoredReadModelCatchesUp(t *testing.T) {
	t.Parallel()
	for _, broker := range []bool{false, true} {
		t.Run(fmt.Sprint("broker ", broker), func(t *testing.T) {
			t.Parallel()
			db, log, f := newRestorable(t), logged(t), make(feed)
			run := func() (stop func() error) {
				src, cfg, o := projector.FromLog(log), projector.RunnerConfig{}, projector.Options{}
				if broker {
					src, cfg = projector.Subscribe(f, "c"), projector.RunnerConfig{Log: log, Grace: 300 * time.Millisecond}
					o = projector.Options{Markers: true}
				}
				_, stop = runListed(t, db.DB, src, cfg, listed(o))
				return stop
			}
			deliver := func() {
				for i := range 3 {
					if broker {
						f.deliver(t, messagesOf(t, log, fmt.Sprint("c-", i))...)
					}
				}
			}
			appendCounted(t, log, 1, 30)
			stop := run()
			deliver()
			awaitLists(t, db.DB, listedUpTo(30))
			require.NoError(t, stop())
			restore := db.backup()

			appendCounted(t, log, 31, 60)
			stop = run()
			deliver()
			awaitLists(t, db.DB, listedUpTo(60))
			require.NoError(t, stop())
			restore()
			db.open()
			require.Len(t, listsOf(t, db.DB)["c-0"], 10)
			stop = run()
			appendCounted(t, log, 61, 66)
			deliver()
			awaitLists(t, db.DB, listedUpTo(66))
			require.NoError(t, stop())
			require.Equal(t, listedUpTo(66), listsOf(t, db.DB))
		})
	}
}

// A log that was restored from a backup does not have the last events that were applied. Its
// readers stop, and name the positions. This holds if its head is behind the checkpoint, if new
// events have passed the checkpoint, and if the restore happens while a reader runs.
// Promise: G7.11
func TestTheReaderOfARestoredLogStops(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		again   int // events that are appended after the restore
		running bool
	}{
		"behind": {}, "at the checkpoint": {again: 20}, "past it": {again: 50},
		"behind, running": {running: true}, "past it, running": {again: 50, running: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, log := logged(t), newRestorable(t)
			appendCounted(t, log.DB, 1, 20)
			restore := log.backup()
			appendCounted(t, log.DB, 21, 40)
			// A long lease: the reader compares the log with the checkpoint every 20 seconds.
			done, stop := runListed(t, db, projector.FromLog(log.DB), projector.RunnerConfig{Lease: time.Minute}, listed(projector.Options{}))
			awaitLists(t, db, listedUpTo(40))
			if !c.running {
				require.NoError(t, stop())
			} else {
				// time must pass: the pool replaces broken connections that were idle without an error. If too little passes, the
				// reader gets an error first, and stops as well
				time.Sleep(3 * time.Second)
			}
			last := checkpointOf(t, db).Place
			restore()
			other := borrowed(t, nil, log.config.ConnString())
			for n := range c.again {
				_, err := other.Append(t.Context(), "c-0", eventstore.Any, drafts(t, 1000+n))
				require.NoError(t, err)
			}
			if !c.running {
				log.open()
				done, _ = runListed(t, db, projector.FromLog(log.DB), projector.RunnerConfig{}, listed(projector.Options{}))
			}
			err := patience.Receive(t, done, "the runner to stop")
			require.ErrorIs(t, err, projector.ErrLogChanged)
			require.ErrorContains(t, err, "positions 21 to 40 have no event")
			require.ErrorContains(t, err, last.ID)
			require.Equal(t, listedUpTo(40), listsOf(t, db), "nothing of the restored log is applied")
			require.Equal(t, last, checkpointOf(t, db).Place)
		})
	}
}

// The log and the read model are restored together while a runner runs, as by a failover that loses the
// last transactions. The read model has the effects of no other events: the runner goes on, and applies
// what is appended now.
// Promise: G7.12
func TestALogAndAReadModelThatGoBackTogether(t *testing.T) {
	t.Parallel()
	for _, segments := range []int{0, 3} {
		t.Run(fmt.Sprint("segments ", segments), func(t *testing.T) {
			t.Parallel()
			db := newRestorable(t)
			appendCounted(t, db.DB, 1, 20)
			run := func() (<-chan error, func() error) {
				return runListed(t, db.DB, projector.FromLog(db.DB), projector.RunnerConfig{Lease: time.Minute}, listed(projector.Options{Segments: segments}))
			}
			_, stop := run()
			awaitLists(t, db.DB, listedUpTo(20))
			require.NoError(t, stop())
			restore := db.backup()
			done, stop := run()
			appendCounted(t, db.DB, 21, 40)
			awaitLists(t, db.DB, listedUpTo(40))
			restore()
			other := &restorable{T: t, name: db.name, config: db.config, server: db.server}
			other.open()
			appendCounted(t, other.DB, 21, 23)
			awaitLists(t, other.DB, listedUpTo(23))
			appendCounted(t, other.DB, 24, 50)
			awaitLists(t, other.DB, listedUpTo(50))
			select {
			case err := <-done:
				require.NoError(t, err)
			default:
			}
			require.NoError(t, stop())
		})
	}
}

// The log and the read model are restored together. The broker has messages of events that were
// lost: they are parked, and nothing is applied for them.
// Promise: G7.11
func TestMessagesOfLostEventsAreParked(t *testing.T) {
	t.Parallel()
	db, f := newRestorable(t), make(feed)
	run := func() (stop func() error) {
		_, stop = runListed(t, db.DB, projector.Subscribe(f, "c"), projector.RunnerConfig{Grace: 300 * time.Millisecond},
			listed(projector.Options{Markers: true}))
		return stop
	}
	appendCounted(t, db.DB, 1, 30)
	stop := run()
	awaitLists(t, db.DB, listedUpTo(30))
	require.NoError(t, stop())
	restore := db.backup()
	_, err := db.Append(t.Context(), "lost-1", eventstore.Any, drafts(t, 1, 2))
	require.NoError(t, err)
	appendCounted(t, db.DB, 31, 33)
	stop = run()
	lost := messagesOf(t, db.DB, "lost-1")
	before := messagesOf(t, db.DB, "c-0")
	f.deliver(t, lost...)
	awaitLists(t, db.DB, func() map[string][]int {
		lists := listedUpTo(33)
		lists["lost-1"] = []int{1, 2}
		return lists
	}())
	require.NoError(t, stop())

	restore()
	db.open()
	require.Len(t, listsOf(t, db.DB), 3)
	stop = run()
	f.deliver(t, lost...)
	f.deliver(t, before...)         // one of them is lost as well
	appendCounted(t, db.DB, 31, 36) // at the positions of the lost events
	f.deliver(t, messagesOf(t, db.DB, "c-1")...)
	want := listedUpTo(36)
	want["c-0"] = listedUpTo(30)["c-0"] // the rest of the stream waits for a decision
	awaitLists(t, db.DB, want)
	// The second lost event of a stream waits behind the first one. It is not applied either.
	for _, ids := range [][]string{{lost[0].UUID, before[10].UUID}, {lost[1].UUID}} {
		stuck := projector.ParkedFilter{States: []projector.ParkedState{projector.StateStuck}}
		var list []provider.Parked
		patience.Until(t, func() bool {
			var err error
			list, err = db.Parked(context.Background(), stuck)
			return err == nil && len(list) == len(ids)
		}, "%d stuck messages", len(ids))
		for _, p := range list {
			require.Contains(t, ids, p.MessageID)
			require.Equal(t, []any{"no_event", projector.ClassPermanent}, []any{p.Code, p.Class})
		}
		_, err = projector.Skip(t.Context(), db.DB, stuck, projector.Decision{By: "test", Reason: "lost"})
		require.NoError(t, err)
	}
	awaitLists(t, db.DB, listedUpTo(36))
	require.NoError(t, stop())
	require.Equal(t, listedUpTo(36), listsOf(t, db.DB))
	require.Equal(t, provider.ModeLive, checkpointOf(t, db.DB).Mode)
}
