package postgres_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/stretchr/testify/require"
)

// A writing transaction that appends nothing does not delay a reader, in this database and in
// another one, nor does an open append in another one.
// Promise: G7.2
func TestOtherTransactionsDelayNoReader(t *testing.T) {
	t.Parallel()
	db, other := logged(t), logged(t)
	var out logs
	_, stop := runListed(t, db, projector.FromLog(db), projector.RunnerConfig{Logger: out.logger()}, listed(projector.Options{}))
	appendCounted(t, db, 1, 3)
	awaitLists(t, db, listedUpTo(3))
	write := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into sums values ('k', 1)`)
		return err
	}
	opened(t, db.Pool().Config().ConnString(), write)
	opened(t, other.Pool().Config().ConnString(), write)
	openAppend(t, other, "c-0")
	for n := 4; n <= 12; n++ {
		appendCounted(t, db, n, n)
		awaitLists(t, db, listedUpTo(n)) // while the other transactions are open
	}
	require.NoError(t, stop())
	require.Zero(t, out.count("delays the reading"))
}

// A reader waits for an open append whose event may come before visible ones, logs its backend, and
// then applies all of them in order.
// Promise: G7.2
func TestAReaderWaitsForAnOpenAppendAndNamesIt(t *testing.T) {
	t.Parallel()
	for _, commits := range []bool{true, false} {
		t.Run(fmt.Sprint("commits ", commits), func(t *testing.T) {
			t.Parallel()
			db := logged(t)
			var out logs
			_, stop := runListed(t, db, projector.FromLog(db), projector.RunnerConfig{Logger: out.logger()}, listed(projector.Options{}))
			appendCounted(t, db, 1, 3)
			awaitLists(t, db, listedUpTo(3))
			tx, pid := openAppend(t, db, "late-1")
			appendCounted(t, db, 4, 6)
			warning := fmt.Sprintf("an open append delays the reading of the log\" projector=listed backend=%d since=", pid)
			patience.Until(t, func() bool { return out.count(warning) > 0 }, "the warning")
			require.Equal(t, listedUpTo(3), listsOf(t, db))
			want := listedUpTo(6)
			if commits {
				require.NoError(t, tx.Commit(t.Context()))
				want["late-1"] = []int{1}
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
			}
			awaitLists(t, db, want)
			require.NoError(t, stop())
		})
	}
}

// While an append is open, deliveries of a live projector are applied, and events that are not
// delivered are completed after the grace. The checkpoint waits.
// Promise: G7.2
func TestALiveProjectorDoesNotWaitForAnOpenAppend(t *testing.T) {
	t.Parallel()
	db, f := logged(t), make(feed)
	var out logs
	cfg := projector.RunnerConfig{Grace: 300 * time.Millisecond, Logger: out.logger()}
	_, stop := runListed(t, db, projector.Subscribe(f, "c"), cfg, listed(projector.Options{Markers: true}))
	appendCounted(t, db, 1, 3)
	awaitLists(t, db, listedUpTo(3))
	patience.Until(t, func() bool {
		c := checkpointOf(t, db)
		return c.Mode == provider.ModeLive && c.Place.Position == 3
	}, "the projector to be live")
	tx, pid := openAppend(t, db, "late-1")
	appendCounted(t, db, 4, 4)
	began := time.Now()
	f.deliver(t, messagesOf(t, db, "c-0")...)
	awaitLists(t, db, listedUpTo(4))
	appendCounted(t, db, 5, 9) // the broker loses these
	awaitLists(t, db, listedUpTo(9))
	require.EqualValues(t, 3, checkpointOf(t, db).Place.Position)
	patience.Until(t, func() bool {
		return out.count(fmt.Sprintf("an open append delays the reading of the log\" projector=listed backend=%d ", pid)) > 0
	}, "the warning")
	t.Logf("completed %s after the append was opened", time.Since(began).Round(time.Millisecond))
	require.NoError(t, tx.Commit(t.Context()))
	want := listedUpTo(9)
	want["late-1"] = []int{1}
	awaitLists(t, db, want)
	patience.Until(t, func() bool { return checkpointOf(t, db).Place.Position == 10 }, "position 10")
	for _, stream := range []string{"c-0", "c-1", "c-2", "late-1"} {
		f.deliver(t, messagesOf(t, db, stream)...)
	}
	require.NoError(t, stop())
	require.Equal(t, want, listsOf(t, db))
}

// A new projector goes live while an append is open, and applies the event of that append after it
// has committed.
// Promise: G7.2
func TestANewProjectorGoesLiveWhileAnAppendIsOpen(t *testing.T) {
	t.Parallel()
	db, f := logged(t), make(feed)
	appendCounted(t, db, 1, 30)
	tx, _ := openAppend(t, db, "late-1")
	appendCounted(t, db, 31, 60)
	_, stop := runListed(t, db, projector.Subscribe(f, "c"), projector.RunnerConfig{Grace: 300 * time.Millisecond},
		listed(projector.Options{Markers: true}))
	patience.Until(t, func() bool { return checkpointOf(t, db).Mode == provider.ModeLive }, "the projector to be live")
	require.Equal(t, listedUpTo(60), listsOf(t, db))
	require.EqualValues(t, 30, checkpointOf(t, db).Place.Position)
	appendCounted(t, db, 61, 63)
	for i := range 3 {
		f.deliver(t, messagesOf(t, db, fmt.Sprint("c-", i))...)
	}
	awaitLists(t, db, listedUpTo(63))
	require.NoError(t, tx.Commit(t.Context()))
	want := listedUpTo(63)
	want["late-1"] = []int{1}
	awaitLists(t, db, want)
	require.NoError(t, stop())
	require.Equal(t, want, listsOf(t, db))
}

// From.Now begins at a settled position: an append that was open then is not missed.
// Promise: G7.4
func TestFromNowMissesNoOpenAppend(t *testing.T) {
	t.Parallel()
	db := logged(t)
	appendCounted(t, db, 1, 3)
	tx, _ := openAppend(t, db, "late-1")
	appendCounted(t, db, 4, 6)
	_, stop := runListed(t, db, projector.FromLog(db), projector.RunnerConfig{}, listed(projector.Options{From: eventstore.From{Now: true}}))
	patience.Until(t, func() bool { return checkpointOf(t, db).Mode != 0 }, "a checkpoint")
	require.NoError(t, tx.Commit(t.Context()))
	want := map[string][]int{"late-1": {1}, "c-0": {4}, "c-1": {5}, "c-2": {6}}
	awaitLists(t, db, want)
	require.NoError(t, stop())
}

// pollTimes is a log that reports when each question of a reader began: for a page, or for the end of the log.
type pollTimes struct {
	*postgres.DB
	began chan time.Time
	end   chan struct{} // closed: it reports no more
}

func (l *pollTimes) report(ctx context.Context, at time.Time) {
	select {
	case l.began <- at:
	case <-l.end:
	case <-ctx.Done():
	}
}

func (l *pollTimes) LogPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	defer l.report(ctx, time.Now())
	return l.DB.LogPage(ctx, q)
}

func (l *pollTimes) LogPosition(ctx context.Context, from eventstore.From) (int64, error) {
	defer l.report(ctx, time.Now())
	return l.DB.LogPosition(ctx, from)
}

// An append through the same DB, or a notification of another process, wakes the reader. Without
// that, an idle reader finds the event when it next polls, after a second.
func TestAReaderAppliesAnEventSoonAfterItsAppend(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ other, notifies, listens bool }{
		"this process":      {},
		"notified":          {other: true, notifies: true, listens: true},
		"another, by polls": {other: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := logged(t)
			from := db
			if c.other {
				from = notifying(t, db.Pool().Config().ConnString(), c.notifies)
			}
			if c.listens {
				listen(t, db, nil, true)
			}
			log := &pollTimes{db, make(chan time.Time), make(chan struct{})}
			_, stop := runListed(t, db, projector.FromLog(log), projector.RunnerConfig{}, listed(projector.Options{}))
			n := 0
			pause := func() time.Duration { // from the last poll before an append to the next one
				last := patience.Receive(t, log.began, "a poll")
				for idle := time.Duration(0); idle < 640*time.Millisecond; { // its pauses double, so the next one is a second
					next := patience.Receive(t, log.began, "a poll")
					last, idle = next, next.Sub(last)
				}
				n++
				appendCounted(t, from, n, n)
				return patience.Receive(t, log.began, "the poll after the append").Sub(last)
			}
			// On a busy machine a pause may take longer, and then the one after it is shorter than a second.
			polls := c.other && !c.listens // otherwise this test shows nothing
			patience.Until(t, func() bool { return pause() >= time.Second == polls }, "a reader that polls, or is woken")
			close(log.end)
			awaitLists(t, db, listedUpTo(n))
			require.NoError(t, stop())
		})
	}
}
