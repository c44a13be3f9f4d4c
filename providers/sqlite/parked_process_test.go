package sqlite_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// inOrderDDL is the table of applied messages n of keys k. Its ids are the order of the commits.
const inOrderDDL = `create table applied (id integer primary key autoincrement, k integer not null, n integer not null) strict`

const (
	orderKeys = 12
	orderEach = 25
)

func orderID(k, n int) string { return fmt.Sprintf("%d-%d", k, n) }

// drainOnce applies due messages, each lane in a separate unit, and returns their number. As in a
// runner, a failed message is tried alone, and held ones run in one unit.
func drainOnce(ctx context.Context, db *sqlite.DB) (n int, err error) {
	listed, err := db.Due(ctx, provider.DueFilter{Builds: []provider.Build{totals}, Keys: 5, Each: 4})
	for err == nil && len(listed) > 0 {
		end := slices.IndexFunc(listed, func(p provider.Parked) bool { return p.Lane != listed[0].Lane })
		if end < 0 {
			end = len(listed)
		}
		lane := listed[:end]
		listed = listed[end:]
		if lane[0].Class != provider.ClassHeld {
			tried, tryErr := db.Try(ctx, lane[0], -1, time.Minute)
			if err = tryErr; !tried {
				continue
			}
			lane[0].Attempts++
		}
		err = db.Do(ctx, ofParked(lane...), func(ctx context.Context, tx *sql.Tx, found provider.Found) (provider.Closing, error) {
			for i, live := range found.Live {
				if !live {
					continue
				}
				n++
				if err := apply(ctx, tx, lane[i].MessageID); err != nil {
					return provider.Closing{}, err
				}
			}
			return provider.Closing{}, nil
		})
	}
	return n, err
}

func apply(ctx context.Context, tx *sql.Tx, id string) error {
	var k, n int
	if _, err := fmt.Sscanf(id, "%d-%d", &k, &n); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `insert into applied (k, n) values (?, ?)`, k, n)
	return err
}

// childDrains applies due messages until its parent sends a line.
func childDrains(path string) error {
	ctx := context.Background()
	db, err := sqlite.Open(ctx, path, nil)
	if err != nil {
		return err
	}
	stop := make(chan struct{})
	go func() {
		defer close(stop)
		awaitLine()
	}()
	fmt.Println("ready")
	for applied := 0; ; {
		n, err := drainOnce(ctx, db)
		if err != nil {
			return err
		}
		applied += n
		select {
		case <-stop:
			fmt.Println(applied)
			return db.Close()
		default:
		}
	}
}

// One process receives messages. Some fail, and later ones of their keys are parked behind them.
// Two other processes apply the parked messages. Each message takes effect once, and those of a
// key in order.
func TestOrderBetweenDeliveriesAndReplaysOfOtherProcesses(t *testing.T) {
	t.Parallel()
	ctx := patience.Context(t)
	path := migrated(t)
	db := openAt(t, path, nil)
	_, err := db.SQL().Exec(inOrderDDL)
	require.NoError(t, err)
	others := []*proc{start(t, "drain", path), start(t, "drain", path)}
	for _, o := range others {
		require.Equal(t, "ready", o.line())
	}
	behind := 0
	for n := range orderEach {
		var ids []string
		for k := range orderKeys {
			ids = append(ids, orderID(k, n))
		}
		u := delivery(ids...)
		for k := range orderKeys {
			u.Messages[k].Lane = provider.LaneOfKey(fmt.Sprint(k))
		}
		fails, waits := asides(u, provider.ClassUnknown, 0), asides(u, provider.ClassHeld, 0)
		require.NoError(t, db.Do(ctx, u, func(ctx context.Context, tx *sql.Tx, found provider.Found) (c provider.Closing, err error) {
			for k, held := range found.Held {
				require.Equal(t, []bool{true}, found.Fresh[k])
				switch {
				case held:
					behind++
					c.Park = append(c.Park, waits[k])
				case (n+k)%5 == 0:
					c.Park = append(c.Park, fails[k])
				default:
					err = errors.Join(err, apply(ctx, tx, ids[k]))
				}
			}
			return c, err
		}))
		// lets the others apply some messages before the next ones
		for left := int64(orderKeys); left >= orderKeys; {
			left, err = db.ParkedCount(ctx, "totals")
			require.NoError(t, err)
		}
	}
	there := 0
	for _, o := range others {
		o.send("stop")
		var n int
		_, err := fmt.Sscan(o.line(), &n)
		require.NoError(t, err)
		o.wait()
		there += n
	}
	for left := 1; left > 0; {
		left, err = drainOnce(ctx, db)
		require.NoError(t, err)
	}
	require.Empty(t, rows(t, db), "no message is parked any more")
	t.Logf("%d messages waited behind others, %d were applied by the other processes", behind, there)

	list, err := db.SQL().Query(`select k, n from applied order by id`)
	require.NoError(t, err)
	defer list.Close()
	order := map[int][]int{}
	for list.Next() {
		var k, n int
		require.NoError(t, list.Scan(&k, &n))
		order[k] = append(order[k], n)
	}
	for k := range orderKeys {
		require.Len(t, order[k], orderEach, "key %d: each message once: %v", k, order[k])
		require.True(t, slices.IsSorted(order[k]), "key %d: %v", k, order[k])
	}
}

// childTries tries all parked messages when its parent sends a line, and reports how many it may
// run.
func childTries(path string) error {
	db, err := sqlite.Open(context.Background(), path, nil)
	if err != nil {
		return err
	}
	listed, err := db.Parked(context.Background(), provider.ParkedFilter{Limit: 1000})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	awaitLine()
	n, err := tryAll(db, listed)
	fmt.Println(n)
	return errors.Join(err, db.Close())
}

func tryAll(db *sqlite.DB, listed []provider.Parked) (n int, err error) {
	for _, p := range listed {
		tried, err := db.Try(context.Background(), p, 5, time.Hour)
		if err != nil {
			return n, err
		}
		if tried {
			n++
		}
	}
	return n, nil
}

// If several processes try a message at once, one of them may run it, and the try is counted
// once.
func TestTriesOfSeveralProcesses(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	db := openAt(t, path, nil)
	const n = 100
	for i := range n {
		park(t, db, keyed(fmt.Sprint(i), fmt.Sprint("m", i)), 0)
	}
	listed := rows(t, db)
	others := []*proc{start(t, "try", path), start(t, "try", path)}
	for _, o := range others {
		require.Equal(t, "ready", o.line())
	}
	for _, o := range others {
		o.send("go")
	}
	tried, err := tryAll(db, listed)
	require.NoError(t, err)
	for _, o := range others {
		var theirs int
		_, err := fmt.Sscan(o.line(), &theirs)
		require.NoError(t, err)
		o.wait()
		tried += theirs
	}
	require.Equal(t, n, tried)
	for _, p := range rows(t, db) {
		require.Equal(t, 2, p.Attempts, "the failure that parked it, and one try")
		require.WithinDuration(t, clock(t, db.SQL()).Add(time.Hour), p.DueAt, patience.Limit())
	}
}

// childDies renews a lease, records its messages in flight, tries a due message, and never
// returns from its handler.
func childDies(path string) error {
	ctx := context.Background()
	db, err := sqlite.Open(ctx, path, nil)
	if err != nil {
		return err
	}
	w := provider.Worker{Runner: "child", Number: 1}
	_, beat := db.Beat(ctx, w.Runner, time.Hour, time.Hour)
	recorded := errors.Join(db.InFlight(ctx, totals, w, []string{"old"}), db.InFlight(ctx, totals, w, []string{"m1"}))
	done := delivery("m3")
	done.Careful = &provider.Worker{Runner: "child", Number: 2} // its commit deletes its own rows
	recorded = errors.Join(recorded, db.InFlight(ctx, totals, *done.Careful, []string{"m3"}), db.Do(ctx, done, adds("p2")))
	listed, err := db.Due(ctx, provider.DueFilter{Builds: []provider.Build{totals}, Keys: 1, Each: 1})
	if err = errors.Join(beat, recorded, err); err != nil {
		return err
	}
	if _, err := db.Try(ctx, listed[0], 5, time.Minute); err != nil {
		return err
	}
	listed[0].Attempts++
	return db.Do(ctx, ofParked(listed...), func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
		fmt.Println("running", add(ctx, tx, "p1"))
		select {}
	})
}

// If a process is killed, its messages in flight are suspect, its try is counted, and the lane is
// due later.
func TestKilledProcessLeavesSuspects(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	path := migrated(t)
	db := openAt(t, path, nil)
	park(t, db, keyed("a", "parked"), 0)
	other := start(t, "die", path)
	require.Equal(t, "running <nil>", other.line())
	require.NoError(t, other.cmd.Process.Kill()) // SIGKILL
	_ = other.cmd.Wait()

	require.Equal(t, 0, total(t, db.SQL(), "p1"))
	require.Empty(t, due(t, db))
	require.Equal(t, 2, rows(t, db)[0].Attempts)

	suspects := func(runner string) (found []bool) {
		u := delivery("m1", "m3", "old")
		u.Careful = &provider.Worker{Runner: runner, Number: 1}
		require.NoError(t, db.InFlight(ctx, totals, *u.Careful, []string{"m1", "m3"}), "a runner's own messages in flight do not count")
		require.NoError(t, db.Do(ctx, u, func(_ context.Context, _ *sql.Tx, f provider.Found) (provider.Closing, error) {
			found = f.Suspect
			return provider.Closing{}, nil
		}))
		return found
	}
	crashed := func() time.Time {
		h, err := db.Beat(ctx, "here", time.Minute, 2*time.Hour)
		require.NoError(t, err)
		require.WithinDuration(t, clock(t, db.SQL()), h.Now, patience.Limit())
		return h.Crashed
	}
	require.Zero(t, crashed(), "its lease has not ended")
	require.Equal(t, []bool{true, false, false}, suspects("here"))
	require.NoError(t, shiftBack(db.SQL(), 2*time.Hour))
	require.Equal(t, []string{"parked"}, due(t, db))
	require.WithinDuration(t, clock(t, db.SQL()).Add(-time.Hour), crashed(), patience.Limit())
	require.Equal(t, []bool{true, false, false}, suspects("here"))
	require.NoError(t, shiftBack(db.SQL(), 2*time.Hour))
	require.Zero(t, crashed(), "its record is deleted")
	require.Equal(t, []bool{false, false, false}, suspects("here"))
	require.Equal(t, 0, count(t, db.SQL(), "kinora_in_flight"))
}

// A unit of another process waits for a unit with Switch that retires its generation, and then
// fails.
func TestSwitchBetweenProcesses(t *testing.T) {
	t.Parallel()
	ctx := patience.Context(t)
	path := migrated(t)
	// two DBs do not share a write lock in the process
	db, other := openAt(t, path, nil), openAt(t, path, nil)
	require.NoError(t, db.Do(ctx, delivery("m1"), adds("p1")))
	inside, release, switched, done := make(chan struct{}), make(chan struct{}), make(chan error, 1), make(chan error, 1)
	u := switching(build(1, provider.GenerationRetired), build(2, provider.GenerationLive))
	u.Switch.Reset = []string{"totals"}
	go func() {
		switched <- other.Do(ctx, u, func(context.Context, *sql.Tx, provider.Found) (provider.Closing, error) {
			close(inside)
			<-release
			return provider.Closing{}, nil
		})
	}()
	<-inside
	go func() { done <- db.Do(ctx, delivery("m2"), adds("p1")) }()
	require.Equal(t, 1, total(t, db.SQL(), "p1"), "readers do not wait")
	close(release)
	require.NoError(t, <-switched)
	require.ErrorIs(t, <-done, provider.ErrEnded)
	require.Equal(t, 0, total(t, db.SQL(), "p1"))
	next := delivery("m1")
	next.Generation = 2
	require.NoError(t, db.Do(ctx, next, adds("p1")))
	require.Equal(t, 1, total(t, db.SQL(), "p1"))
	require.Equal(t, 2, count(t, db.SQL(), "kinora_markers"), "one of each generation")

	boom := errors.New("boom")
	for _, fails := range []func(tx *sql.Tx) error{
		func(*sql.Tx) error { return boom },
		func(tx *sql.Tx) error { _ = tx.Commit(); return nil },
		func(tx *sql.Tx) error { _, _ = tx.Exec(`commit`); return nil },
	} {
		err := db.Do(ctx, switching(build(3, provider.GenerationBuilding)), func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
			require.NoError(t, add(ctx, tx, "p1"))
			return provider.Closing{}, fails(tx)
		})
		var e *provider.Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, 1, total(t, db.SQL(), "p1"))
		require.Equal(t, 2, count(t, db.SQL(), "kinora_generations"))
	}
}

// After an unsynced commit, the connection syncs the next one.
func TestUnsyncedCommitsLeaveTheOthersSynced(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := open(t, nil)
	w := provider.Worker{Runner: "r1", Number: 1}
	synced := func() (level int) {
		err := db.Do(ctx, provider.Unit{Projector: "totals"}, func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
			return provider.Closing{}, tx.QueryRowContext(ctx, `pragma synchronous`).Scan(&level)
		})
		require.NoError(t, err)
		return level
	}
	const full = 2
	require.Equal(t, full, synced())
	require.NoError(t, db.InFlight(ctx, totals, w, []string{"m1"}))
	_, err := db.Beat(ctx, w.Runner, time.Minute, time.Minute)
	require.NoError(t, err)
	require.Equal(t, full, synced())
	ended, cancel := context.WithCancel(ctx)
	cancel()
	require.ErrorIs(t, db.InFlight(ended, totals, w, []string{"m2"}), context.Canceled)
	require.Equal(t, full, synced())
	for range 50 { // the context ends at a random place
		ctx, cancel := context.WithCancel(ctx)
		go cancel()
		_ = db.InFlight(ctx, totals, w, []string{"m3"})
		require.Equal(t, full, synced())
	}
}

// After an unsynced commit, a loss of power may leave a part of it in the log, or garbage.
// Earlier commits survive.
func TestTornLogAfterAnUnsyncedCommit(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	path := migrated(t)
	db := openAt(t, path, nil)
	log := func() []byte {
		b, err := os.ReadFile(path + "-wal")
		require.NoError(t, err)
		return b
	}
	require.NoError(t, db.Do(ctx, delivery("m1"), adds("a")))
	synced := len(log())
	require.NoError(t, db.InFlight(ctx, totals, provider.Worker{Runner: "r1", Number: 1}, []string{"m2", "m3"}))
	whole := log()
	require.Greater(t, len(whole), synced)
	file, err := os.ReadFile(path)
	require.NoError(t, err)
	for i := range 20 {
		torn := bytes.Clone(whole)
		at := synced + i*(len(whole)-synced)/19
		if i%2 == 0 {
			torn = torn[:at]
		} else {
			clear(torn[at:min(at+1000, len(torn))])
		}
		copied := filepath.Join(t.TempDir(), "kinora.db")
		require.NoError(t, os.WriteFile(copied, file, 0o600))
		require.NoError(t, os.WriteFile(copied+"-wal", torn, 0o600))
		left := openAt(t, copied, nil)
		require.Equal(t, 1, total(t, left.SQL(), "a"))
		require.Equal(t, 1, count(t, left.SQL(), "kinora_markers"))
		require.Contains(t, []int{0, 2}, count(t, left.SQL(), "kinora_in_flight"))
		require.NoError(t, left.Do(ctx, delivery("m2"), adds("a")))
	}
}

// Methods that write wait for another process. Methods that only read do not.
func TestParkingWaitsForABusyDatabase(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	db := openAt(t, path, nil)
	ctx := patience.Context(t)
	park(t, db, keyed("a", "a1"), 0)
	park(t, db, keyed("b", "b1"), -1)
	first := rows(t, db)[0]
	other := start(t, "hold-lock", path)
	require.Equal(t, "held", other.line())

	writes := []func() error{
		func() error { _, err := db.Try(ctx, first, 5, time.Minute); return err },
		func() error {
			_, err := db.Decide(ctx, provider.ParkedFilter{Seqs: []int64{2}}, provider.StateSkipped, decided)
			return err
		},
		func() error { _, err := db.Beat(ctx, "r1", time.Minute, time.Minute); return err },
		func() error { return db.InFlight(ctx, totals, provider.Worker{Runner: "r1"}, []string{"m1"}) },
		func() error { _, err := db.SetGeneration(ctx, build(2, provider.GenerationRequested)); return err },
	}
	done := make(chan error, len(writes))
	var begun sync.WaitGroup
	for _, write := range writes {
		begun.Add(1)
		go func() {
			begun.Done()
			done <- write()
		}()
	}
	begun.Wait()
	require.Equal(t, []string{"a1"}, due(t, db))
	require.Len(t, rows(t, db), 2)
	_, err := db.Outcomes(ctx, make([]provider.Question, 10))
	require.NoError(t, err)
	n, err := db.Prune(ctx, "totals", []string{handler}, time.Hour, 10)
	require.NoError(t, err, "Prune does not write if it finds no rows to delete")
	require.Zero(t, n)
	select {
	case err := <-done:
		t.Fatalf("did not wait for the other process: %v", err)
	case <-time.After(300 * time.Millisecond): // a longer wait would prove no more
	}
	other.send("release")
	for range writes {
		require.NoError(t, <-done)
	}
	other.wait()
}
