package postgres_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

func question(handler, id string) provider.Question {
	return provider.Question{Handler: handler, MessageID: id}
}

// isQueue checks lanes at rest: each has messages, and each unresolved message has a lane. A lane
// whose first message is stuck waits for a person.
func isQueue(t *testing.T, db *postgres.DB) {
	t.Helper()
	require.Zero(t, count(t, db, `select count(*) from kinora.holds h full join (
		select distinct on (projector, generation, lane) projector, generation, lane, state from kinora.parked
		where state in ('waiting', 'stuck') order by projector, generation, lane, id) p using (projector, generation, lane)
		where h.due_at is null or p.state is null or (p.state = 'stuck') <> (h.due_at = 'infinity')`), "holds and parked messages disagree")
}

// paused runs a unit that waits until end is called. end returns the unit's error.
func paused(t *testing.T, db *postgres.DB, u provider.Unit, closing func(found provider.Found) provider.Closing) (end func() error) {
	t.Helper()
	inside, resume, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		done <- db.Do(t.Context(), u, func(_ context.Context, _ pgx.Tx, found provider.Found) (provider.Closing, error) {
			close(inside)
			<-resume
			return closing(found), nil
		})
	}()
	select {
	case <-inside:
	case err := <-done:
		require.NoError(t, err)
	}
	return func() error {
		close(resume)
		return <-done
	}
}

func nothing(provider.Found) provider.Closing { return provider.Closing{} }

// asides parks the messages of a unit of deliveries.
func asides(u provider.Unit) func(provider.Found) provider.Closing {
	return func(found provider.Found) (c provider.Closing) {
		for i, m := range u.Messages {
			p := provider.Parked{Projector: u.Projector, Handlers: []string{"p/a"}, MessageID: m.ID, Lane: m.Lane, Attempts: 1}
			if found.Held[i] {
				p.Class, p.Attempts = provider.ClassHeld, 0
			}
			c.Park = append(c.Park, provider.Aside{Message: i, Parked: p})
		}
		return c
	}
}

// A unit that waited for the marker of one message finds the hold that the other unit has left,
// in both forms. One of many lanes looks them up in a round trip of its own.
// Promise: G6.8
func TestHoldsAreReadAfterTheWaitForMarkers(t *testing.T) {
	t.Parallel()
	for name, others := range map[string]int{"tx": 0, "tx of many lanes": 20, "batch": 0} {
		batched := name == "batch"
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.OpenBusy(t, nil, totals)
			lane := provider.LaneOfKey("k")
			one, both := marked("first"), marked("first", "second")
			one.Messages[0].Lane, both.Messages[0].Lane, both.Messages[1].Lane = lane, lane, lane
			for i := range others {
				id := fmt.Sprint("other ", i)
				both.Messages = append(both.Messages, provider.Message{ID: id, Lane: provider.LaneOfKey(id)})
			}
			end := paused(t, db, one, asides(one))
			found, done := make(chan provider.Found, 10), make(chan error, 1)
			go func() {
				if batched {
					done <- db.Batched().Do(t.Context(), both, func(_ context.Context, _ *pgx.Batch, f provider.Found) (provider.Closing, error) {
						found <- f
						return provider.Closing{}, nil
					})
					return
				}
				done <- db.Do(t.Context(), both, func(_ context.Context, _ pgx.Tx, f provider.Found) (provider.Closing, error) {
					found <- f
					return provider.Closing{}, nil
				})
			}()
			waiting(t, db, 1)
			require.NoError(t, end())
			require.NoError(t, <-done)
			if batched {
				<-found // before a statement was sent
			}
			f := <-found
			require.Equal(t, [][]bool{{false}, {true}}, f.Fresh[:2])
			require.Equal(t, append([]bool{true, true}, make([]bool, others)...), f.Held)
		})
	}
}

// A message that is parked while the lane's last message is applied gets a hold, even if it found
// none before.
func TestAParkedMessageIsNeverWithoutAHold(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	lane := provider.LaneOfKey("k")
	late := marked("late")
	late.Messages[0].Lane = lane
	parks := paused(t, db, late, asides(late)) // it has found no hold
	first := park(t, db, "k", "first")
	applies := paused(t, db, again(first), nothing)
	done := make(chan error, 1)
	go func() { done <- parks() }()
	waiting(t, db, 1) // for the lane
	require.NoError(t, applies())
	require.NoError(t, <-done)
	isQueue(t, db)
	list, err := db.Due(t.Context(), provider.DueFilter{Builds: []provider.Build{{Projector: "p"}}, Keys: 10, Each: 10})
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, "late", list[0].MessageID)
	require.NoError(t, do(t.Context(), db, again(list[0]), nil))
	require.Zero(t, count(t, db, `select (select count(*) from kinora.holds) + (select count(*) from kinora.parked)`))
}

// While a unit parks behind another message, no unit runs that one. While a unit runs that one, a
// unit that parks behind it waits.
// Promise: G6.8
func TestADeliveryAndAParkedMessageOfOneLaneFollowOneAnother(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	first := park(t, db, "k", "first")
	_, err := db.Pool().Exec(t.Context(), `update kinora.parked set attempts = 0`)
	require.NoError(t, err)
	first.Attempts = 0
	behind := marked("behind")
	behind.Messages[0].Lane = first.Lane
	end := paused(t, db, behind, asides(behind))
	require.NoError(t, db.Do(t.Context(), again(first), func(_ context.Context, _ pgx.Tx, found provider.Found) (provider.Closing, error) {
		require.Equal(t, [][]bool{{false}}, found.Fresh, "another unit has its lane")
		require.Equal(t, []bool{false}, found.Live)
		return provider.Closing{}, nil
	}), "it does not wait, because it has no counted attempt")
	ok, err := db.Try(t.Context(), first, -1, time.Minute)
	require.NoError(t, err)
	require.False(t, ok)
	require.NoError(t, end())
	list, err := db.Parked(t.Context(), provider.ParkedFilter{Projector: "p"})
	require.NoError(t, err)
	require.Equal(t, []string{"first", "behind"}, []string{list[0].MessageID, list[1].MessageID})

	ok, err = db.Try(t.Context(), first, -1, time.Minute)
	require.NoError(t, err)
	require.True(t, ok)
	first.Attempts++
	applies := paused(t, db, again(first), nothing)
	third := marked("third")
	third.Messages[0].Lane = first.Lane
	done := make(chan error, 1)
	go func() {
		done <- db.Do(t.Context(), third, func(_ context.Context, _ pgx.Tx, found provider.Found) (provider.Closing, error) {
			return asides(third)(found), nil
		})
	}()
	waiting(t, db, 1)
	require.NoError(t, applies())
	require.NoError(t, <-done)
	isQueue(t, db)
	list, err = db.Due(t.Context(), provider.DueFilter{Builds: []provider.Build{{Projector: "p"}}, Keys: 10, Each: 10})
	require.NoError(t, err)
	require.Equal(t, []string{"behind", "third"}, []string{list[0].MessageID, list[1].MessageID})
}

// A redelivery that adds a handler to a parked message waits for the unit that runs it, and is
// then parked again.
func TestHandlersThatAreAddedAreNotLost(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	other := marked("m")
	other.Messages[0].Handlers[0].Name = "p/b"
	other.Messages[0].Lane = provider.LaneOfKey("k")
	end := paused(t, db, other, func(provider.Found) provider.Closing { // it has found no hold
		return provider.Closing{Park: []provider.Aside{{Parked: provider.Parked{MessageID: "m", Lane: provider.LaneOfKey("k"), Handlers: []string{"p/b"}}}}}
	})
	first := park(t, db, "k", "m")
	applies := paused(t, db, again(first), nothing)
	done := make(chan error, 1)
	go func() { done <- end() }()
	waiting(t, db, 1)
	require.NoError(t, applies())
	require.NoError(t, <-done)
	isQueue(t, db)
	list, err := db.Parked(t.Context(), provider.ParkedFilter{})
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, []string{"p/b"}, list[0].Handlers)
}

// Markers that the opening inserted for a parked message that is not live are deleted.
func TestMarkersOfMessagesThatAreNotLive(t *testing.T) {
	t.Parallel()
	for name, form := range forms {
		db := postgrestest.Open(t, nil, totals)
		p := park(t, db, "k", "m")
		_, err := db.Pool().Exec(t.Context(), `delete from kinora.markers; update kinora.parked set handlers = '{}', attempts = 7`)
		require.NoError(t, err)
		p.Handlers = nil
		u := again(p) // its attempts are not 7
		u.Messages[0].Mark, u.Messages[0].Handlers = true, []provider.Handler{{Name: "p/a", Was: []string{"p/old"}}}
		require.NoError(t, form(t.Context(), db, u, "k"))
		require.Zero(t, count(t, db, `select count(*) from kinora.markers`), name)
		require.Zero(t, count(t, db, `select count(*) from totals`), name)
		p.Attempts = 7
		u = again(p)
		u.Messages[0].Mark, u.Messages[0].Handlers = true, []provider.Handler{{Name: "p/a", Was: []string{"p/old"}}}
		require.NoError(t, form(t.Context(), db, u, "k"))
		require.Equal(t, 2, count(t, db, `select count(*) from kinora.markers`), name)
		require.Equal(t, 1, count(t, db, `select n from totals`), name)
		require.Zero(t, count(t, db, `select (select count(*) from kinora.holds) + (select count(*) from kinora.parked)`), name)
	}
}

// A decision waits for a unit that has the lane, and sees its result.
func TestADecisionWaitsForAUnit(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	p := park(t, db, "k", "m")
	end := paused(t, db, again(p), nothing)
	decided := make(chan int, 1)
	go func() {
		n, err := db.Decide(t.Context(), provider.ParkedFilter{}, provider.StateSkipped, provider.Decision{By: "ann", Reason: "test"})
		if err != nil {
			t.Error(err)
		}
		decided <- n
	}()
	waiting(t, db, 1)
	require.NoError(t, end())
	require.Zero(t, <-decided, "it was applied")
	require.Zero(t, count(t, db, `select (select count(*) from kinora.holds) + (select count(*) from kinora.parked)`))
}

// Deliveries, tries and decisions in few lanes at once: no message is applied twice or lost, and
// no hold is left.
// Promise: G6.8
func TestACrowdInFewLanes(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	const keys, each = 4, 40
	_, err := db.Pool().Exec(t.Context(), `create table applied (key text not null, n int not null, primary key (key, n))`)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := &laneCrowd{t, db}
	var deliveries, others sync.WaitGroup
	for k := range keys {
		// two owners of a key, as while a broker moves it
		for range 2 {
			deliveries.Go(func() {
				for n := range each {
					c.deliver(ctx, fmt.Sprint("k", k), fmt.Sprintf("k%d-%d", k, n))
				}
			})
		}
	}
	for range 3 {
		others.Go(func() {
			for ctx.Err() == nil {
				c.drain(ctx, keys)
			}
		})
	}
	others.Go(func() {
		for ctx.Err() == nil {
			c.decide(ctx)
		}
	})
	deliveries.Wait()
	cancel()
	others.Wait()
	isQueue(t, db)
	patience.Until(t, func() bool {
		_, err := db.Decide(t.Context(), provider.ParkedFilter{}, provider.StateWaiting, provider.Decision{})
		require.NoError(t, err)
		c.drain(t.Context(), keys)
		return count(t, db, `select count(*) from kinora.parked where state in ('waiting', 'stuck')`) == 0
	}, "no message to wait or be stuck")
	require.Equal(t, keys*each, count(t, db, `select count(*) from applied`))
	require.Zero(t, count(t, db, `select count(*) from kinora.holds`))
	rows, err := db.Parked(t.Context(), provider.ParkedFilter{States: []provider.ParkedState{provider.StateReplayed}, Limit: 1000})
	require.NoError(t, err)
	require.False(t, slices.ContainsFunc(rows, func(p provider.Parked) bool { return p.By != "ann" || p.ResolvedAt.IsZero() }))
}

// laneCrowd runs the goroutines of TestACrowdInFewLanes.
type laneCrowd struct {
	*testing.T
	db *postgres.DB
}

// apply writes the effect of a message. A second time it fails.
func (*laneCrowd) apply(ctx context.Context, tx pgx.Tx, id string) error {
	_, err := tx.Exec(ctx, `insert into applied select split_part($1, '-', 1), split_part($1, '-', 2)::int`, id)
	return err
}

// deliver applies a message, or parks it if its lane is held or it fails. It tries again after
// transient errors.
func (c *laneCrowd) deliver(ctx context.Context, key, id string) {
	m := delivery(id)
	m.Lane = provider.LaneOfKey(key)
	u := provider.Unit{Projector: "p", Messages: []provider.Message{m}}
	fails := rand.IntN(4) == 0
	for {
		err := c.db.Do(ctx, u, func(ctx context.Context, tx pgx.Tx, found provider.Found) (closing provider.Closing, err error) {
			switch {
			case !found.Fresh[0][0]:
			case found.Held[0]:
				closing = asides(u)(found)
				closing.Park[0].After = 0
			case fails:
				closing = asides(u)(found)
				closing.Park[0].After = time.Duration(rand.IntN(10)-2) * time.Millisecond // or stuck
			default:
				err = c.apply(ctx, tx, m.ID)
			}
			return closing, err
		})
		if err == nil {
			return
		}
		if provider.ClassOf(err) != provider.ClassTransient {
			c.Error(err)
			return
		}
	}
}

// drain runs the due messages, each failed one alone after a try.
func (c *laneCrowd) drain(ctx context.Context, keys int) {
	list, err := c.db.Due(ctx, provider.DueFilter{Builds: []provider.Build{{Projector: "p"}}, Keys: keys, Each: 8})
	if err != nil {
		return
	}
	for len(list) > 0 {
		n := 1
		for list[0].Class == provider.ClassHeld && n < len(list) && list[n].Class == provider.ClassHeld {
			n++
		}
		some := list[:n]
		list = list[n:]
		if some[0].Class != provider.ClassHeld {
			if ok, err := c.db.Try(ctx, some[0], 1000, 5*time.Millisecond); err != nil || !ok {
				continue
			}
			some[0].Attempts++
		}
		u := again(some...)
		_ = c.db.Do(ctx, u, func(ctx context.Context, tx pgx.Tx, found provider.Found) (provider.Closing, error) {
			return c.replay(ctx, tx, u, found)
		})
	}
}

// replay applies the parked messages of a unit. Some fail, and stop those of their lane.
func (c *laneCrowd) replay(ctx context.Context, tx pgx.Tx, u provider.Unit, found provider.Found) (closing provider.Closing, err error) {
	stopped := map[provider.Lane]bool{}
	for i, m := range u.Messages {
		switch {
		case !found.Live[i]:
		case stopped[m.Lane] || rand.IntN(8) == 0:
			stopped[m.Lane] = true
			p := *m.Parked
			p.Attempts = max(p.Attempts, 1)
			p.Class = provider.ClassUnknown
			closing.Park = append(closing.Park, provider.Aside{Message: i, Parked: p, After: time.Duration(rand.IntN(4)-1) * time.Millisecond})
		default:
			err = c.apply(ctx, tx, m.ID)
		}
		if err != nil {
			return closing, err
		}
	}
	return closing, nil
}

// decide replays some messages, of all or of the stuck ones.
func (c *laneCrowd) decide(ctx context.Context) {
	f := provider.ParkedFilter{Limit: rand.IntN(5)}
	if rand.IntN(2) == 0 {
		f.States = []provider.ParkedState{provider.StateStuck}
	}
	if _, err := c.db.Decide(ctx, f, provider.StateWaiting, provider.Decision{By: "ann", Reason: "again"}); err != nil && ctx.Err() == nil {
		c.Error(err)
	}
}

// The cost to skip a lane grows linearly with its length.
func TestSkippingALongLane(t *testing.T) {
	t.Parallel()
	dsn := postgrestest.DSN(t, nil)
	db, one := borrowed(t, nil, dsn), borrowed(t, nil, dsn+"&pool_max_conns=1")
	skip := func(name string, n int) int {
		return pages(t, one.Pool(), func() {
			skipped, err := one.Decide(t.Context(), provider.ParkedFilter{Projector: name, Limit: n}, provider.StateSkipped, provider.Decision{By: "ann", Reason: "test"})
			require.NoError(t, err)
			require.Equal(t, n, skipped)
		}, db)
	}
	fillParked(t, db, "short", 1, 1000)
	fillParked(t, db, "long", 1, 10_000)
	short, long := skip("short", 500), skip("long", 5000)
	t.Logf("%d pages for 500 messages, %d for 5000", short, long)
	require.Less(t, long, 20*short)
	isQueue(t, db)
	skip("long", 5000)
	skip("short", 500)
	require.Zero(t, count(t, db, `select count(*) from kinora.holds`))
}

// The backend of a lost connection may have rows of messages in flight for hours: no other
// statement waits for these.
func TestLockedRowsOfMessagesInFlightAreSkipped(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	w := provider.Worker{Runner: "me", Number: 1}
	require.NoError(t, db.InFlight(t.Context(), provider.Build{Projector: "p"}, w, []string{"old"}))
	lost := begin(t, db)
	_, err := lost.Exec(t.Context(), `delete from kinora.in_flight`)
	require.NoError(t, err)
	ctx := patience.Context(t)
	require.NoError(t, db.InFlight(ctx, provider.Build{Projector: "p"}, w, []string{"new"}))
	u := marked("new")
	u.Careful = &w
	require.NoError(t, do(ctx, db, u, nil))
	_, err = db.Beat(ctx, "me", 0, time.Hour)
	require.NoError(t, err)
	require.Equal(t, 1, count(t, db, `select count(*) from kinora.in_flight`), "the other transaction has the row")
	require.NoError(t, lost.Rollback(t.Context()))
	require.NoError(t, db.InFlight(ctx, provider.Build{Projector: "p"}, w, nil))
	require.Zero(t, count(t, db, `select count(*) from kinora.in_flight`))
}

// A decision about the last message of a lane waits for a unit that parks behind it, and leaves
// the lane to that message.
func TestADecisionSeesAMessageParkedBehind(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	first := park(t, db, "k", "first")
	behind := marked("behind")
	behind.Messages[0].Lane = first.Lane
	end := paused(t, db, behind, asides(behind))
	decided := make(chan error, 1)
	go func() {
		_, err := db.Decide(t.Context(), provider.ParkedFilter{Seqs: []int64{first.Seq}}, provider.StateSkipped, provider.Decision{By: "ann", Reason: "test"})
		decided <- err
	}()
	waiting(t, db, 1)
	require.NoError(t, end())
	require.NoError(t, <-decided)
	isQueue(t, db)
	list, err := db.Due(t.Context(), provider.DueFilter{Builds: []provider.Build{{Projector: "p"}}, Keys: 1, Each: 1})
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, "behind", list[0].MessageID)
}

// An attempt is counted for one unit, which therefore waits for a unit that parks behind its
// message.
func TestAnAttemptWaitsForItsLane(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil, totals)
	first := park(t, db, "k", "first")
	behind := marked("behind")
	behind.Messages[0].Lane = first.Lane
	ok, err := db.Try(t.Context(), first, -1, time.Minute)
	require.NoError(t, err)
	require.True(t, ok)
	first.Attempts++
	end := paused(t, db, behind, asides(behind))
	done := make(chan error, 1)
	go func() { done <- forms["tx"](t.Context(), db, again(first), "k") }()
	waiting(t, db, 1)
	require.NoError(t, end())
	require.NoError(t, <-done)
	require.Equal(t, 1, count(t, db, `select n from totals`))
	isQueue(t, db)
}

// No attempt is counted for a message that is not, or no longer, the first of its lane.
func TestOnlyTheFirstOfALaneIsTried(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	park(t, db, "k", "first")
	second := park(t, db, "k", "second")
	ok, err := db.Try(t.Context(), second, -1, time.Minute)
	require.NoError(t, err)
	require.False(t, ok)
	require.Equal(t, 1, count(t, db, `select sum(attempts) from kinora.parked`))
}
