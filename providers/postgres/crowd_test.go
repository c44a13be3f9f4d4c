package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// fill inserts n entries with this number of keys, by SQL.
func fill(t *testing.T, db *postgres.DB, n, keys int) {
	t.Helper()
	_, err := db.Pool().Exec(t.Context(), `
		insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
		select g, 't', 'k' || g % $2, '', '{}', now(), now() from generate_series(1, $1) g`, n, keys)
	require.NoError(t, err)
}

// Promise: G2.1
func TestEightWorkersClaimTenThousandEntriesOnceEach(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	fill(t, db, 10_000, 500)
	barrier := make(chan struct{})
	var all sync.WaitGroup
	var mu sync.Mutex
	claimed := map[int64]int{}
	for range 8 {
		all.Go(func() {
			<-barrier
			for {
				entries, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{}, claim.Terms{Limit: 100, Lease: time.Hour})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for _, e := range entries {
					claimed[e.Seq]++
				}
				left := 10_000 - len(claimed)
				mu.Unlock()
				if left == 0 {
					return
				}
				// the others are blocked by claimed entries: publish those
				if len(entries) == 0 {
					_, err := db.Pool().Exec(t.Context(), `update kinora.outbox set status = 'published', open = false where status = 'claimed'`)
					if err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	close(barrier)
	all.Wait()
	require.Len(t, claimed, 10_000)
	for seq, n := range claimed {
		require.Equal(t, 1, n, "entry %d", seq)
	}
}

// Promise: G1.2
func TestSixteenWritersOfOneStream(t *testing.T) {
	t.Parallel()
	for name, expected := range map[string]eventstore.Expected{"any": eventstore.Any, "exact": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, &postgres.Config{Route: outbox.ByCategory})
			var all sync.WaitGroup
			for range 16 {
				all.Go(func() {
					x := expected
					for range 25 {
						for {
							_, err := db.Append(t.Context(), "a-1", x, drafts(t, 1, 2))
							var conflict *eventstore.ConflictError
							if errors.As(err, &conflict) {
								if conflict.Actual == int64(x) {
									t.Errorf("a conflict at the expected version %d", x)
								}
								x = eventstore.Expected(conflict.Actual)
								continue
							}
							if err != nil {
								t.Error(err)
								return
							}
							if x != eventstore.Any {
								x += 2
							}
							break
						}
					}
				})
			}
			all.Wait()
			require.Equal(t, 800, count(t, db, `select count(*) from kinora.events`))
			require.Equal(t, 800, count(t, db, `select max(version) from kinora.events`))
			require.Equal(t, 800, count(t, db, `select max(position) from kinora.events`), "a conflict uses no position")
			require.Equal(t, 800, count(t, db, `select count(*) from kinora.outbox o join kinora.events e on e.id::text = o.message_id
				where (o.headers ->> 'kinora_version')::bigint = e.version and o.created_at = e.recorded_at`))
		})
	}
}

// One message is delivered a hundred times at once, through two processes.
// Promise: G4.1
func TestOneMessageAHundredTimesThroughTwoProcesses(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	dsn := db.Pool().Config().ConnString()
	// holds both processes until they are ready
	gate, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = gate.Rollback(context.Background()) }()
	_, err = gate.Exec(t.Context(), `lock table totals in access exclusive mode`)
	require.NoError(t, err)
	var children []*exec.Cmd
	for range 2 {
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), "KINORA_TEST_CHILD=deliver", "KINORA_TEST_DSN="+dsn, "KINORA_TEST_TIMES=50")
		c.Stderr = os.Stderr
		require.NoError(t, c.Start())
		children = append(children, c)
	}
	patience.Until(t, func() bool {
		return count(t, db, `select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`) >= 20
	}, "many units wait for one another")
	require.NoError(t, gate.Commit(t.Context()))
	for _, c := range children {
		require.NoError(t, c.Wait(), "no delivery reports an error, except a wait that took too long")
	}
	require.Equal(t, 1, count(t, db, `select n from totals where key = 'k'`))
}

func child(role string) int {
	switch role {
	case "relay":
		return relayChild()
	case "project":
		return untilStopped(project)
	case "deliver":
	default:
		return 2
	}
	ctx := context.Background()
	times, _ := strconv.Atoi(os.Getenv("KINORA_TEST_TIMES"))
	db, err := postgres.Open(ctx, os.Getenv("KINORA_TEST_DSN")+"&pool_max_conns=50", nil)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer db.Close()
	var all sync.WaitGroup
	failed := make(chan error, times)
	for range times {
		all.Go(func() {
			// otherwise they would wait for each other in this process
			own, err := postgres.New(db.Pool(), nil)
			for err == nil {
				err := deliver(ctx, own)
				if err == nil || provider.ClassOf(err) != provider.ClassTransient {
					failed <- err
					return
				}
			}
		})
	}
	all.Wait()
	close(failed)
	for err := range failed {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return 0
}

func deliver(ctx context.Context, db *postgres.DB) error {
	work := marked("m")
	return do(ctx, db, work, func(ctx context.Context, tx pgx.Tx) ([]outbox.Message, error) {
		return nil, add(ctx, tx, "k", 1)
	})
}

// claimIn claims with the same statement in a transaction that the test holds open, like a relay
// whose statement is in flight.
func claimIn(t *testing.T, tx pgx.Tx, limit int) []int64 {
	t.Helper()
	token := claim.NewToken()
	rows, err := tx.Query(t.Context(), constants(t)["claimEntriesSQL"], token[:], time.Hour.Microseconds(), limit, 8, "a", 0, 0)
	require.NoError(t, err)
	seqs, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (int64, error) {
		values, err := row.Values()
		return values[0].(int64), err
	})
	require.NoError(t, err)
	return seqs
}

// Another relay's claim is in flight and has locked the first entry of the key. The entries
// behind it cannot be claimed, although the status is unchanged.
// Promise: G3.1
func TestClaimStatementsThatOverlapDoNotSplitAKey(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	fill(t, db, 3, 1)
	other, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = other.Rollback(context.Background()) }()
	require.Len(t, claimIn(t, other, 1), 1)
	for _, near := range []bool{false, true} {
		entries, err := db.ClaimEntries(t.Context(), provider.EntryQuery{Near: near}, terms(t))
		require.NoError(t, err)
		require.Empty(t, entries)
	}
	require.NoError(t, other.Rollback(t.Context()))
	entries, err := db.ClaimEntries(t.Context(), provider.EntryQuery{}, terms(t))
	require.NoError(t, err)
	require.Len(t, entries, 3)
}

// A relay that was thought to have crashed renews its lease while another claims.
// Promise: G3.1
func TestARenewalInFlightKeepsItsKeyTogether(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	fill(t, db, 3, 1)
	_, err := db.Pool().Exec(t.Context(), `update kinora.outbox set status = 'claimed', token = gen_random_uuid(),
		next_attempt_at = clock_timestamp() - interval '1 ms' where message_id = '1'`)
	require.NoError(t, err)
	zombie, err := db.Pool().Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = zombie.Rollback(context.Background()) }()
	_, err = zombie.Exec(t.Context(), `update kinora.outbox set next_attempt_at = clock_timestamp() + interval '1 hour' where message_id = '1'`)
	require.NoError(t, err)
	entries, err := db.ClaimEntries(t.Context(), provider.EntryQuery{}, terms(t))
	require.NoError(t, err)
	require.Empty(t, entries)
	require.NoError(t, zombie.Commit(t.Context()))
}

func terms(t *testing.T) claim.Terms {
	t.Helper()
	terms, err := claim.Terms{Lease: time.Hour, Limit: 50}.WithDefaults()
	require.NoError(t, err)
	return terms
}

// The backoffs of many first entries end while the claim walks over them. If it read the clock
// for every row, the first entry of a key could count as too early and, rows later, no longer
// block the second.
// Promise: G8.1
func TestAClaimReadsTheClockOnce(t *testing.T) {
	t.Parallel()
	// Keys are looked up one by one, as in a large backlog.
	nested, err := pgxpool.New(t.Context(), postgrestest.DSN(t, nil)+"&enable_hashjoin=off&enable_mergejoin=off")
	require.NoError(t, err)
	defer nested.Close()
	db, err := postgres.New(nested, nil)
	require.NoError(t, err)
	const keys = 2000
	// entry n+keys is behind entry n
	fill(t, db, 2*keys, keys)
	for i := range 8 {
		_, err := db.Pool().Exec(t.Context(), `update kinora.outbox set status = 'pending', token = null, attempts = 0, suspect = false,
			next_attempt_at = clock_timestamp() + case when id <= $1 then interval '60 ms' else interval '0' end`, keys)
		require.NoError(t, err)
		if i == 0 {
			_, err = db.Pool().Exec(t.Context(), "vacuum analyze kinora.outbox")
			require.NoError(t, err)
		}
		// The claim begins a little before the backoffs end, earlier each time.
		_, err = db.Pool().Exec(t.Context(), `select pg_sleep(greatest(0, extract(epoch from
			(select min(next_attempt_at) from kinora.outbox where id <= $1) - clock_timestamp()) - $2))`, keys, 0.002*float64(i))
		require.NoError(t, err)
		at := terms(t)
		at.Limit = 100_000
		entries, err := db.ClaimEntries(t.Context(), provider.EntryQuery{}, at)
		require.NoError(t, err)
		got := map[int64]bool{}
		for _, e := range entries {
			got[e.Seq] = true
			require.Equal(t, entries[0].LastAttemptedAt, e.LastAttemptedAt, "one claim has one time")
			require.Equal(t, e.LastAttemptedAt.Add(time.Hour), e.NextAttemptAt)
		}
		for _, e := range entries {
			if e.Seq > keys {
				require.True(t, got[e.Seq-keys], "the second entry of a key was claimed without its first")
			}
		}
	}
}

// A unit with Switch waits for open units. Units wait for it.
// Promise: G4.1, R1.1
func TestUnitsAndASwitchOfGenerationsWaitForEachOther(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	require.NoError(t, do(t.Context(), db, marked("old"), nil))
	inside, resume, done := make(chan struct{}), make(chan struct{}), make(chan error, 3)
	go func() {
		done <- do(t.Context(), db, marked("open"), func(context.Context, pgx.Tx) ([]outbox.Message, error) {
			close(inside)
			<-resume
			return nil, nil
		})
	}()
	<-inside
	switching, switched := make(chan struct{}), make(chan struct{})
	go func() {
		for {
			err := db.Do(t.Context(), switchTo(2, 1), func(ctx context.Context, tx pgx.Tx, _ provider.Found) (provider.Closing, error) {
				if count(t, db, `select count(*) from kinora.markers where message_id = 'open'`) != 1 {
					t.Error("the open unit has not committed")
				}
				close(switching)
				<-switched
				return provider.Closing{}, add(ctx, tx, "switched", 1)
			})
			if e, ok := errors.AsType[*provider.Error](err); !ok || e.Code != provider.CodeBusy {
				done <- err
				return
			}
		}
	}()
	waiting(t, db, 1)
	close(resume)
	<-switching
	require.NoError(t, <-done)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // it may end before they wait
	defer cancel()
	require.Equal(t, provider.ClassTransient, provider.ClassOf(do(ctx, db, marked("while switching"), nil)))
	require.Equal(t, provider.ClassTransient, provider.ClassOf(queue(ctx, db, marked("while switching"), nil)))
	go func() { done <- do(t.Context(), db, marked("new"), nil) }()
	go func() { done <- queue(t.Context(), db, marked("new, queued"), nil) }()
	waiting(t, db, 2)
	close(switched)
	for range 3 {
		require.NoError(t, <-done)
	}
	require.Equal(t, 1, count(t, db, `select count(*) from totals where key = 'switched'`))
	require.Zero(t, count(t, db, `select count(*) from kinora.markers where message_id = 'while switching'`))
	require.Equal(t, 2, count(t, db, `select generation from kinora.generations where projector = 'p' and state = 'live'`))
	require.ErrorIs(t, db.Do(t.Context(), provider.Unit{Projector: "p", Generation: 1, Once: true, Switch: &provider.Switch{}},
		func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
			return provider.Closing{}, errBroken
		}), errBroken)
}

// switchTo returns a unit that makes a generation live, and another one, which was, a standby. Both
// have no rows yet.
func switchTo(next, was int) provider.Unit {
	return provider.Unit{Projector: "p", Generation: next, Once: true, Switch: &provider.Switch{Set: []provider.Generation{
		{Build: provider.Build{Projector: "p", Generation: next}, State: provider.GenerationLive},
		{Build: provider.Build{Projector: "p", Generation: was}, State: provider.GenerationStandby},
	}}}
}

var errBroken = errors.New("broken")
