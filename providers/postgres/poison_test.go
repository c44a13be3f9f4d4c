package postgres_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/stretchr/testify/require"
)

// The events of the poison tests: a handler for each, so that the messages of one key go through all of them.
type (
	exitedNote   noted
	loopedNote   noted
	panickedNote noted
	failedNote   noted
)

var poisons = eventstore.NewTypes(eventstore.Type[exitedNote]("exited"), eventstore.Type[loopedNote]("looped"),
	eventstore.Type[panickedNote]("panicked"), eventstore.Type[failedNote]("failed"))

var poisonTypes = []string{"exited", "looped", "panicked", "failed"}

// poisonBroker is a tableBroker of these events: the n-th message of a key is of the type n mod 4.
type poisonBroker struct{ tableBroker }

func (b *poisonBroker) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	from, err := b.tableBroker.Subscribe(ctx, topic)
	if err != nil {
		return nil, err
	}
	to := make(chan *message.Message)
	go func() {
		for {
			select {
			case m := <-from:
				var e noted
				_ = json.Unmarshal(m.Payload, &e)
				m.Metadata[outbox.HeaderType] = poisonTypes[e.N%4]
				select {
				case to <- m:
				case <-ctx.Done():
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return to, nil
}

// poisonous is the projector of these tests. What is poison does its worst, until it is mended.
func poisonous(mended bool, entered func(handler string, e noted)) *projector.Projector[pgx.Tx] {
	on := func(handler string, worst func()) func(context.Context, pgx.Tx, noted) error {
		return func(ctx context.Context, tx pgx.Tx, e noted) error {
			if strings.HasPrefix(e.Key, "poison-"+handler) && e.N >= 40 && !mended {
				entered(handler, e)
				worst()
				return errors.New("refused")
			}
			return list(ctx, tx, eventstore.Event[noted]{Data: e})
		}
	}
	exits := on("exits", func() { os.Exit(3) })
	loops := on("loops", func() {
		for !stopLooping.Load() { // it heeds nothing
		}
	})
	panics := on("panics", func() { panic("poison") })
	fails := on("fails", func() {})
	return projector.Define("poisonous", poisons, projector.Options{Markers: true},
		projector.On("exits", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[exitedNote]) error {
			return exits(ctx, tx, noted(e.Data))
		}),
		projector.On("loops", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[loopedNote]) error {
			return loops(ctx, tx, noted(e.Data))
		}),
		projector.On("panics", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[panickedNote]) error {
			return panics(ctx, tx, noted(e.Data))
		}),
		projector.On("fails", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[failedNote]) error {
			return fails(ctx, tx, noted(e.Data))
		}),
	)
}

var stopLooping atomic.Bool

// poison is a runner of it.
func poison(ctx context.Context) error {
	db, err := postgres.Open(ctx, os.Getenv("KINORA_TEST_DSN")+"&pool_max_conns=10", nil)
	if err != nil {
		return err
	}
	defer db.Close()
	broker, err := pgxpool.New(ctx, os.Getenv("KINORA_TEST_DSN")+"&pool_max_conns=4")
	if err != nil {
		return err
	}
	defer broker.Close()
	path := filepath.Join(os.Getenv("KINORA_TEST_DIR"), "entered")
	p := poisonous(false, func(handler string, e noted) {
		f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err == nil {
			_, _ = fmt.Fprintf(f, "%s %s %d\n", handler, e.Key, e.N)
			_ = f.Close()
		}
	})
	cfg := &projector.RunnerConfig{
		Concurrency: 8, Timeout: 300 * time.Millisecond, Lease: 2 * time.Second, Drain: 20 * time.Second,
		Logger: slog.New(slog.DiscardHandler), Version: "broken",
	}
	cfg.Retry.Base = 10 * time.Millisecond
	runner, err := projector.NewRunner(db, projector.Subscribe(&poisonBroker{tableBroker{broker, 1, true}}, "notes"), cfg, p)
	if err != nil {
		return err
	}
	return runner.Run(ctx)
}

// outbreak is a run of that projector in processes that die of it, and of others' hands.
type outbreak struct {
	*projectors
	lives, kills int
}

// until starts the process again whenever it has died, and kills it at random, until everything is acked.
func (o *outbreak) until(within time.Duration, kills int) {
	o.Helper()
	deadline := time.Now().Add(within)
	for {
		c := o.start(1, "KINORA_TEST_CHILD=poison")
		o.lives++
		ended := make(chan error, 1)
		go func() { ended <- c.Wait() }()
		var kill <-chan time.Time
		if o.kills < kills {
			kill = time.After(time.Duration(200+rand.IntN(1500)) * time.Millisecond)
		}
		look := time.NewTicker(20 * time.Millisecond)
		for over := false; !over; {
			select {
			case <-ended:
				over = true
			case <-kill:
				o.kills++
				_ = c.Process.Kill()
				kill = nil
			case <-look.C:
				if count(o.T, o.db, `select count(*) from broker where not acked`) == 0 {
					look.Stop()
					_ = c.Process.Kill() // it may loop still
					<-ended
					return
				}
				require.True(o, time.Now().Before(deadline), "it takes too long: %d are not acked after %d lives",
					count(o.T, o.db, `select count(*) from broker where not acked`), o.lives)
			}
		}
		look.Stop()
	}
}

// entries are how often each poison was entered.
func (o *outbreak) entries() map[string]int {
	o.Helper()
	text, err := os.ReadFile(filepath.Join(o.dir, "entered"))
	require.NoError(o, err)
	n := map[string]int{}
	for line := range strings.Lines(string(text)) {
		n[strings.TrimSpace(line)]++
	}
	return n
}

// A handler that ends the process, one that loops for ever, one that panics and one that returns an error, each on one key
// only, in one run of many messages under kills: each poison is parked after its budget, its key waits behind it in order,
// all else is exact; and after the fix and a replay so is everything.
func TestPoison(t *testing.T) {
	t.Parallel()
	const keys, each, kills = 200, 100, 8
	o := &outbreak{projectors: newProjectors(t)}
	_, err := o.db.Pool().Exec(t.Context(), `insert into broker (consumer, id, key, n)
		select 1, 'm-' || k || '-' || n, k, n from generate_series(1, $2) n,
			(select 'k' || i k from generate_series(1, $1 - 4) i union all select 'poison-' || unnest(array['exits', 'loops', 'panics', 'fails'])) k
		order by n, random()`, keys, each)
	require.NoError(t, err)
	o.until(5*time.Minute, kills)

	require.Equal(t, keys, count(t, o.db, `select count(*) from lists`))
	require.Zero(t, count(t, o.db, fmt.Sprintf(`select count(*) from lists where key not like 'poison-%%' and items <> array(select generate_series(1, %d))`, each)))
	first := map[string]int{"exits": 40, "loops": 41, "panics": 42, "fails": 43} // the first of 40 and more that is of its type
	entries, parked := o.entries(), 0
	for handler, n := range first {
		key := "poison-" + handler
		require.Equal(t, 1, count(t, o.db, fmt.Sprintf(`select count(*) from lists where key = '%s' and items = array(select generate_series(1, %d))`, key, n-1)), "%s", handler)
		rows, err := o.db.ParkedMessages(t.Context(), projector.ParkedFilter{Key: key})
		require.NoError(t, err)
		require.Len(t, rows, each-n+1, "%s", handler)
		for i, row := range rows {
			require.Equal(t, fmt.Sprintf("m-%s-%d", key, n+i), row.MessageID, "in order")
			if i > 0 {
				require.Equal(t, projector.HeldClass, row.Class)
			}
		}
		require.Equal(t, 5, rows[0].Attempts, "%s", handler)
		require.Equal(t, "broken", rows[0].Version)
		times := entries[fmt.Sprintf("%s %s %d", handler, key, n)]
		require.Positive(t, times, "%s", handler)
		require.LessOrEqual(t, times, 5, "%s: no more often than its budget, also where it was killed meanwhile", handler)
		require.NotContains(t, entries, fmt.Sprintf("%s %s %d", handler, key, n+4), "nothing passed it")
		parked += len(rows)
	}
	require.Equal(t, parked, count(t, o.db, `select count(*) from kinora.parked`), "no bystander")
	t.Logf("%d messages, %d lives of which %d were killed; entered: %v", keys*each, o.lives, o.kills, entries)

	mended, err := projector.NewRunner(o.db, projector.Source{}, nil, poisonous(true, nil))
	require.NoError(t, err)
	before := o.readModel()
	rehearsal, err := mended.Rehearse(t.Context(), projector.ParkedFilter{Projector: "poisonous", Limit: 1000}, false)
	require.NoError(t, err)
	require.Equal(t, parked, rehearsal.Messages)
	require.Len(t, rehearsal.Changes, 4)
	require.Equal(t, before, o.readModel(), "it leaves no trace")
	done, err := mended.Replay(t.Context(), projector.ParkedFilter{Projector: "poisonous"},
		projector.ReplayConfig{Rate: -1, Decision: projector.Decision{By: "test", Reason: "mended"}})
	require.NoError(t, err)
	require.Equal(t, projector.Replays{Replayed: parked}, done)
	require.Zero(t, count(t, o.db, fmt.Sprintf(`select count(*) from lists where items <> array(select generate_series(1, %d))`, each)))
	require.Zero(t, count(t, o.db, `select count(*) from kinora.parked where state = 'parked'`))
	for _, change := range rehearsal.Changes { // it told what came
		var row struct {
			Key   string
			Items []int
		}
		require.NoError(t, json.Unmarshal(change.After, &row))
		require.Equal(t, 1, count(t, o.db, fmt.Sprintf(`select count(*) from lists l where key = '%s' and to_jsonb(l) = '%s'`, row.Key, change.After)))
	}
}

// readModel is all of it, and all of Kinora's tables that a unit writes, as text.
func (o *outbreak) readModel() (text string) {
	o.Helper()
	require.NoError(o, o.db.Pool().QueryRow(o.Context(), `select
		(select string_agg(l::text, e'\n' order by key) from lists l) || (select count(*) || '/' || coalesce(max(processed_at)::text, '') from kinora.markers) ||
		(select string_agg(p::text, e'\n' order by id) from kinora.parked p) || (select count(*) from kinora.outbox) ||
		(select count(*) from kinora.attempts)`).Scan(&text))
	return text
}

// Messages that end their process take no bystander along: none is parked, none counts twice.
func TestBystandersOfKillers(t *testing.T) {
	t.Parallel()
	const messages = 1000
	o := &outbreak{projectors: newProjectors(t)}
	_, err := o.db.Pool().Exec(t.Context(), `insert into broker (consumer, id, key, n)
		select 1, 'm-' || n, case when n in (200, 500, 800) then 'poison-exits-' || n else 'k' || n % 97 end, n from generate_series(1, $1) n order by n`, messages)
	require.NoError(t, err)
	o.until(3*time.Minute, 0)
	list, err := o.db.ParkedMessages(t.Context(), projector.ParkedFilter{})
	require.NoError(t, err)
	var ids []string
	for _, p := range list {
		ids = append(ids, p.MessageID)
		require.Equal(t, "vanished", p.Code)
		require.Equal(t, 5, p.Attempts)
	}
	require.ElementsMatch(t, []string{"m-200", "m-500", "m-800"}, ids)
	require.Equal(t, map[string]int{"exits poison-exits-200 200": 5, "exits poison-exits-500 500": 5, "exits poison-exits-800 800": 5}, o.entries())
	require.Equal(t, messages-3, count(t, o.db, `select sum(cardinality(items)) from lists`))
	require.Equal(t, messages-3, count(t, o.db, `select count(distinct n) from lists, unnest(items) n`))
	require.Zero(t, count(t, o.db, `select count(*) from kinora.attempts`), "who was suspected in vain is cleared")
	t.Logf("%d lives", o.lives)
}
