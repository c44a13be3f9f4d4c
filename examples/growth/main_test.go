package main

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/testserver"
	"github.com/kinora-go/kinora/projector"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestDemo: the whole example. It fails if a read model is not exact.
func TestDemo(t *testing.T) {
	t.Parallel()
	testserver.Skip(t, "postgres")
	var out bytes.Buffer
	require.Zero(t, command([]string{"-events", "400", "-limit", patience.Limit().String()}, &out), out.String())
	require.Contains(t, out.String(), "totals, charts and billing are exact")
	require.NotContains(t, out.String(), " and 0 appends", "no append was under way when its server crashed")
}

func testDemo(t *testing.T) (context.Context, *demo) {
	t.Helper()
	testserver.Skip(t, "postgres")
	ctx := patience.Context(t)
	d, err := newDemo(ctx, slog.New(slog.DiscardHandler), &bytes.Buffer{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.close()) })
	return ctx, d
}

type apply = func(context.Context, pgx.Tx, string, eventstore.Event[Rated]) error

// crashing returns a handler that once crashes the server of the read models after it has written,
// so before its unit commits.
func crashing(d *demo, write apply) apply {
	var calls atomic.Int64
	return func(ctx context.Context, tx pgx.Tx, store string, e eventstore.Event[Rated]) error {
		if err := write(ctx, tx, store, e); err != nil {
			return err
		}
		if calls.Add(1) == 20 {
			return d.read.crash(ctx)
		}
		return nil
	}
}

// TestAServerThatStartsIsCrashed: two units may crash it at once, and then it gets the signal before it knows it.
func TestAServerThatStartsIsCrashed(t *testing.T) {
	t.Parallel()
	s, err := startServer(t.Context(), nil)
	require.NoError(t, err)
	for i := range 20 {
		_, err = io.WriteString(s.life, "crash\n")
		require.NoError(t, err)
		time.Sleep(time.Duration(i) * 2 * time.Millisecond) // so that some signals come while it starts
	}
	require.NoError(t, s.stop())
}

// TestReadModels: what the page of the guide says about read models in databases of their own.
// Promise: G7.6
func TestReadModels(t *testing.T) {
	t.Parallel()
	ctx, d := testDemo(t)
	d.totals.apply = crashing(d, d.totals.apply)
	inside := d.charts.apply
	d.charts.apply = crashing(d, func(ctx context.Context, _ pgx.Tx, store string, e eventstore.Event[Rated]) error {
		return pgx.BeginFunc(ctx, d.charts.db.Pool(), func(tx pgx.Tx) error { return inside(ctx, tx, store, e) })
	})
	require.NoError(t, d.start(ctx))
	ctx, cancel := d.whileRunning(ctx)
	defer cancel()
	d.crashInsideAUnit(ctx, t)
	d.rebuildOnePart(ctx, t)
	d.readAStandby(ctx, t)
	require.NoError(t, d.stopServices())
	d.readAnotherLog(ctx, t)
}

// The server of the read models crashes while a unit has written, and has not committed. The totals,
// whose rows are in the transaction of the checkpoint, are exact. The charts are the control arm:
// they write the same rows in transactions of their own, and count events twice.
func (d *demo) crashInsideAUnit(ctx context.Context, t *testing.T) {
	t.Helper()
	require.NoError(t, d.append(ctx, 200, []string{"t0", "t1"}, closed()))
	require.NoError(t, d.settle(ctx))
	require.True(t, d.onlyChartsAreWrong(ctx, t), "the crash was inside a unit")
}

// The part of one store is rebuilt, and the part of the other one stays.
func (d *demo) rebuildOnePart(ctx context.Context, t *testing.T) {
	t.Helper()
	_, err := d.totals.db.Pool().Exec(ctx, `update totals set stars = stars + 1 where store = 'store1'`) // a mistake of a handler
	require.NoError(t, err)
	number, err := projector.RequestRebuild(ctx, d.totals.db, "totals-store1", projector.Rebuild{
		How: projector.InPlace, Decision: projector.Decision{By: "ann", Reason: "the stars are wrong"},
	})
	require.NoError(t, err)
	require.NoError(t, d.append(ctx, 100, []string{"t0", "t1"}, closed()))
	s := d.fleet.store("store1")
	patience.Until(t, func() bool {
		all, err := s.projectors[d.totals].Generations(ctx, projector.StateOf(d.totals.db, s.db))
		require.NoError(t, err)
		last := all[len(all)-1]
		return last.Number == number && last.State == "live" && last.CaughtUp
	}, "the rebuild")
	require.NoError(t, d.settle(ctx))
	d.onlyChartsAreWrong(ctx, t)
}

// A projector cannot go on with another log.
func (d *demo) readAnotherLog(ctx context.Context, t *testing.T) {
	t.Helper()
	db, err := d.two.open(ctx, "store2", nil)
	require.NoError(t, err)
	defer db.Close()
	r, err := projector.NewRunner(d.totals.db, projector.FromLog(db), projector.RunnerConfig{Logger: d.logger}, d.totals.of("store1"))
	require.NoError(t, err)
	require.ErrorIs(t, r.Run(ctx), projector.ErrLogChanged)
}

// A standby shows what the primary has, once it has replayed it. It is no log: it does not show which
// appends are open on the primary.
func (d *demo) readAStandby(ctx context.Context, t *testing.T) {
	t.Helper()
	replica, end, err := d.standby(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, end()) }()
	for _, err := range replica.ReadLog(ctx, eventstore.From{}, eventstore.LogFilter{}) {
		require.ErrorIs(t, err, eventstore.ErrUnsafeLog)
	}
	_, err = replica.Pool().Exec(ctx, `select pg_wal_replay_pause()`)
	require.NoError(t, err)
	patience.Until(t, func() bool {
		var state string
		require.NoError(t, replica.Pool().QueryRow(ctx, `select pg_get_wal_replay_pause_state()`).Scan(&state))
		return state == "paused"
	}, "the standby to pause")
	p := product{"t0", "p0"}
	at, err := d.rate(ctx, d.fleet, p, 5)
	require.NoError(t, err)
	require.NoError(t, d.fleet.wait(ctx, d.totals, d.totals.db, p.tenant, at))
	for _, wait := range []func(context.Context) error{
		func(ctx context.Context) error { return d.fleet.wait(ctx, d.totals, replica, p.tenant, at) },
		func(ctx context.Context) error { return awaitStandby(ctx, d.totals.db.Pool(), replica.Pool()) },
	} {
		short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		require.ErrorIs(t, wait(short), context.DeadlineExceeded)
		cancel()
	}
	_, err = replica.Pool().Exec(ctx, `select pg_wal_replay_resume()`)
	require.NoError(t, err)
	require.NoError(t, d.readOwn(ctx, replica))
	require.NoError(t, awaitStandby(ctx, d.totals.db.Pool(), replica.Pool()))
}

// onlyChartsAreWrong fails if another read model differs from what was appended. It returns whether
// the charts do.
func (d *demo) onlyChartsAreWrong(ctx context.Context, t *testing.T) bool {
	t.Helper()
	wrong, err := d.differences(ctx, d.totals.db, d.charts.db, d.billing)
	require.NoError(t, err)
	for _, what := range wrong {
		require.True(t, strings.HasPrefix(what, "chart "), what)
	}
	return len(wrong) > 0
}

func closed() chan struct{} {
	over := make(chan struct{})
	close(over)
	return over
}
