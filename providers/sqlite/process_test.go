package sqlite_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// childHoldsLock holds the file's write lock until its parent sends a line.
func childHoldsLock(path string) error {
	db, err := sqlite.Open(context.Background(), path, nil)
	if err != nil {
		return err
	}
	tx, err := db.SQL().Begin()
	if err != nil {
		return err
	}
	fmt.Println("held")
	awaitLine()
	return errors.Join(tx.Rollback(), db.Close())
}

// The lock is held until all callers wait for it, and longer than the pauses between their tries.
func TestWritesWaitForABusyDatabase(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	db := openAt(t, path, routed())
	ctx := patience.Context(t)
	_, err := db.Append(ctx, "order-1", eventstore.NoStream, drafts(1)) // something to claim
	require.NoError(t, err)
	other := start(t, "hold-lock", path)
	require.Equal(t, "held", other.line())

	done := make(chan error, 4)
	go func() {
		_, err := db.Append(ctx, "review-1", eventstore.NoStream, drafts(1))
		done <- err
	}()
	go func() { done <- db.Do(ctx, delivery("m1"), adds("p1")) }()
	go func() {
		_, err := db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{})
		done <- err
	}()
	go func() {
		_, err := db.MarkEntries(ctx, []outbox.Mark{{Seq: 1, To: outbox.Published}})
		done <- err
	}()
	// Readers do not wait.
	require.Equal(t, 1, count(t, db.SQL(), "kinora_events"))
	for range db.ReadStream(ctx, "review-1", 0) {
		t.Fatal("no event is committed yet")
	}
	select {
	case err := <-done:
		t.Fatalf("did not wait for the other process: %v", err)
	case <-time.After(300 * time.Millisecond): // a longer wait would prove no more
	}
	other.send("release")
	for range cap(done) {
		require.NoError(t, <-done)
	}
	other.wait()
	require.Equal(t, 1, total(t, db.SQL(), "p1"))
}

func TestBusyDatabaseIsReportedWhenTheContextEnds(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	db := openAt(t, path, nil)
	other := start(t, "hold-lock", path)
	require.Equal(t, "held", other.line())

	_, err := db.Append(within(t, 20*time.Millisecond), "review-1", eventstore.NoStream, drafts(1))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	err = db.Do(within(t, 20*time.Millisecond), delivery("m1"), adds("p1"))
	requireClass(t, err, "transient", "SQLITE_BUSY")
	require.ErrorIs(t, err, context.DeadlineExceeded)

	other.send("release")
	other.wait()
	require.NoError(t, db.Do(context.Background(), delivery("m1"), adds("p1")))
}

// childStalls applies the message "m1" and never returns from the handler.
func childStalls(path string) error {
	db, err := sqlite.Open(context.Background(), path, nil)
	if err != nil {
		return err
	}
	return db.Do(context.Background(), delivery("m1"), func(ctx context.Context, tx *sql.Tx, _ provider.Found) (provider.Closing, error) {
		if err := add(ctx, tx, "p1"); err != nil {
			return provider.Closing{}, err
		}
		fmt.Println("applied")
		select {}
	})
}

// Promise: G4.1
func TestKilledBetweenHandlerAndCommit(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	db := openAt(t, path, nil)
	other := start(t, "stall", path)
	require.Equal(t, "applied", other.line())
	require.NoError(t, other.cmd.Process.Kill()) // SIGKILL
	_ = other.cmd.Wait()

	require.Equal(t, 0, count(t, db.SQL(), "kinora_markers"))
	require.Equal(t, 0, total(t, db.SQL(), "p1"))
	for range 2 {
		require.NoError(t, db.Do(context.Background(), delivery("m1"), adds("p1")))
	}
	require.Equal(t, 1, total(t, db.SQL(), "p1"))
}

const deliveries = 50 // of each message, in each of two processes

func deliver(db *sqlite.DB) error {
	var wg sync.WaitGroup
	errs := make(chan error, 2*deliveries)
	for i := range 2 * deliveries {
		message := fmt.Sprintf("m%d", i%2)
		wg.Go(func() { errs <- db.Do(context.Background(), delivery(message), adds(message)) })
	}
	wg.Wait()
	close(errs)
	var all error
	for err := range errs {
		all = errors.Join(all, err)
	}
	return all
}

func childDelivers(path string) error {
	db, err := sqlite.Open(context.Background(), path, nil)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	awaitLine()
	return errors.Join(deliver(db), db.Close())
}

// Each message is delivered 100 times at once, half of them in another process. No duplicate gets
// an error.
// Promise: G4.1
func TestMessageDeliveredManyTimesAtOnceAppliesOnce(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	db := openAt(t, path, nil)
	other := start(t, "deliver", path)
	require.Equal(t, "ready", other.line())
	other.send("go")
	require.NoError(t, deliver(db))
	other.wait()
	require.Equal(t, 1, total(t, db.SQL(), "m0"))
	require.Equal(t, 1, total(t, db.SQL(), "m1"))
	require.Equal(t, 2, count(t, db.SQL(), "kinora_markers"))
}

// appendAndTake appends to streams to which the other process also appends. It claims and
// publishes entries until stopped reports true and no entry is left. It returns the published
// entries.
func appendAndTake(db *sqlite.DB, appends int, stopped func() bool) (seqs []int64, err error) {
	ctx := context.Background()
	for i := 0; ; i++ {
		if i < appends {
			if _, err := db.Append(ctx, fmt.Sprint("review-", i%7), eventstore.Any, drafts(1+i%3)); err != nil {
				return nil, err
			}
		}
		last := i >= appends && stopped()
		entries, err := db.ClaimEntries(ctx, provider.EntryQuery{}, claim.Terms{Limit: 7})
		if err != nil {
			return nil, err
		}
		marks := make([]outbox.Mark, len(entries))
		for j, e := range entries {
			seqs = append(seqs, e.Seq)
			marks[j] = outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published}
		}
		late, err := db.MarkEntries(ctx, marks)
		if err != nil || len(late) > 0 {
			return nil, fmt.Errorf("late %v: %w", late, err)
		}
		if last && len(entries) == 0 {
			return seqs, nil
		}
	}
}

const appendsEach = 100

func childAppendsAndTakes(path string) error {
	db, err := sqlite.Open(context.Background(), path, routed())
	if err != nil {
		return err
	}
	fmt.Println("ready")
	awaitLine()
	seqs, err := appendAndTake(db, appendsEach, func() bool { return true })
	if err != nil {
		return err
	}
	return errors.Join(json.NewEncoder(os.Stdout).Encode(seqs), db.Close())
}

// Promise: G2.1
func TestTwoProcessesPublishEachEntryOnce(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	db := openAt(t, path, routed())
	other := start(t, "append-and-take", path)
	require.Equal(t, "ready", other.line())
	other.send("go")
	gone := make(chan struct{})
	var theirs []int64
	go func() {
		defer close(gone)
		line, err := other.out.ReadString('\n')
		if err == nil || errors.Is(err, io.EOF) {
			_ = json.Unmarshal([]byte(line), &theirs)
		}
	}()
	ours, err := appendAndTake(db, appendsEach, func() bool {
		select {
		case <-gone:
			return true
		default:
			return false
		}
	})
	require.NoError(t, err)
	other.wait()
	t.Logf("published: %d here, %d there", len(ours), len(theirs))

	published := map[int64]int{}
	for _, seq := range append(ours, theirs...) {
		published[seq]++
	}
	entries := count(t, db.SQL(), "kinora_outbox")
	require.Len(t, published, entries, "every entry is published")
	for seq, n := range published {
		require.Equal(t, 1, n, "entry %d", seq)
	}
	require.Equal(t, entries, count(t, db.SQL(), "kinora_events"))
	require.Equal(t, entries, count(t, db.SQL(), "kinora_outbox where status = 'published'"))
}

// hammer appends to a stream until it and the stream of another process have some events.
func hammer(db *sqlite.DB, stream, other string) (n int, err error) {
	limit, both := time.Now().Add(patience.Limit()), false
	for ; !both; n++ {
		if _, err := db.Append(context.Background(), stream, eventstore.Any, drafts(1)); err != nil {
			return n, err
		}
		err := db.SQL().QueryRow(`select count(*) = 2 from kinora_streams where stream in (?, ?) and version >= 50`, stream, other).Scan(&both)
		if err != nil || time.Now().After(limit) {
			return n, errors.Join(err, fmt.Errorf("after %d appends to %s, %s has too few", n, stream, other))
		}
	}
	return n, nil
}

func childHammers(path string) error {
	db, err := sqlite.Open(context.Background(), path, routed())
	if err != nil {
		return err
	}
	fmt.Println("ready")
	awaitLine()
	n, err := hammer(db, "review-theirs", "review-ours")
	fmt.Println(n)
	return errors.Join(err, db.Close())
}

func TestTwoProcessesBothProgress(t *testing.T) {
	t.Parallel()
	path := migrated(t)
	db := openAt(t, path, routed())
	other := start(t, "hammer", path)
	require.Equal(t, "ready", other.line())
	other.send("go")
	ours, err := hammer(db, "review-ours", "review-theirs")
	require.NoError(t, err)
	var theirs int
	_, err = fmt.Sscan(other.line(), &theirs)
	require.NoError(t, err)
	other.wait()
	t.Logf("appends: %d here, %d there", ours, theirs)
}
