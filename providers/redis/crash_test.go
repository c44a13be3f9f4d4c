package redis_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
	"github.com/kinora-go/kinora/providers/sqlite"
)

// killer kills its process with SIGKILL after the commit of a number of units in which handlers
// ran.
type killer[Tx any] struct {
	provider.Units[Tx]
	left *int
}

func (k killer[Tx]) Do(ctx context.Context, u provider.Unit, run func(context.Context, Tx, provider.Found) (provider.Closing, error)) error {
	ran := -1
	err := k.Units.Do(ctx, u, func(ctx context.Context, tx Tx, found provider.Found) (provider.Closing, error) {
		begin := found.Begin
		found.Begin = func(message int) { ran = message; begin(message) }
		return run(ctx, tx, found)
	})
	if err != nil || ran < 0 {
		return err
	}
	if *k.left--; *k.left == 0 {
		fmt.Println("killed", u.Messages[ran].ID)
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	return nil
}

// wholeKiller is killer for a whole provider.
type wholeKiller[Tx any] struct {
	provider.Provider[Tx]
	left *int
}

func (k wholeKiller[Tx]) Do(ctx context.Context, u provider.Unit, run func(context.Context, Tx, provider.Found) (provider.Closing, error)) error {
	return killer[Tx]{k.Provider, k.left}.Do(ctx, u, run)
}

// The variants of the test. Each runs in child processes.
const (
	redisBeforeCommit = "Redis, before the commit of the second store"
	redisBeforeAck    = "Redis, before the ack"
	sqliteBeforeAck   = "SQLite with markers, before the ack"
)

// order is the input of a child process.
type order struct {
	URL, Prefix string // of Redis
	Path        string // file of SQLite
	Events      []event
	KillAfter   int // number of units; zero: never
	Step        string
}

// child applies the events of an order, and prints the id of each when it is acked.
func child(arm string) error {
	var o order
	if err := json.NewDecoder(os.Stdin).Decode(&o); err != nil {
		return err
	}
	db, err := sqlite.Open(context.Background(), o.Path, nil)
	if err != nil {
		return err
	}
	if o.Step != "" {
		return ownChild(arm, o, db)
	}
	if arm == sqliteBeforeAck {
		return apply(o, projector.RunnerConfig{}, db, wholeKiller[*sql.Tx]{db, &o.KillAfter}, projector.Define("stars", types, marked, projector.On("posted", countInSQLite)))
	}
	options, err := goredis.ParseURL(o.URL)
	if err != nil {
		return err
	}
	s := space{goredis.NewClient(options), o.Prefix}
	units, err := redis.New(s.client, nil)
	if err != nil {
		return err
	}
	u := provider.Combine(units, db)
	switch arm {
	case redisBeforeCommit:
		u = provider.Combine(killer[pipe]{units, &o.KillAfter}, db)
	case redisBeforeAck:
		u = wholeKiller[pipe]{u, &o.KillAfter}
	}
	return apply(o, projector.RunnerConfig{}, db, u, define(marked, s.count))
}

func countInSQLite(ctx context.Context, tx *sql.Tx, e eventstore.Event[posted]) error {
	_, err := tx.ExecContext(ctx, `insert into stars (product, n) values (?, ?) on conflict (product) do update set n = n + excluded.n`,
		e.Data.Product, e.Data.Stars)
	return err
}

// apply delivers the events of an order one after another, and ends when no message is parked.
func apply[Tx any](o order, cfg projector.RunnerConfig, db *sqlite.DB, u provider.Units[Tx], p *projector.Projector[Tx]) error {
	f := make(subscription)
	cfg.Logger = slog.New(slog.DiscardHandler)
	r, err := projector.NewRunner(u, projector.Subscribe(f, "review"), cfg, p)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	for _, e := range o.Events {
		m := e.message()
		f <- m
		<-m.Acked()
		fmt.Println("acked", e.ID)
	}
	for rows := []projector.Parked{{}}; len(rows) > 0 && err == nil; {
		rows, err = db.Parked(ctx, projector.ParkedFilter{})
	}
	cancel()
	return errors.Join(err, <-done)
}

// redeliver runs children until each event is acked. As a broker would, it delivers the others
// again. The first children are killed after so many units. It returns the events in flight at
// the kills.
func redeliver(t *testing.T, arm string, o order, kills ...int) (inFlight []event) {
	t.Helper()
	for n := 0; n <= len(kills); n++ {
		if o.KillAfter = 0; n < len(kills) {
			o.KillAfter = kills[n]
		}
		said, err := runChild(t, arm, o)
		if n < len(kills) {
			require.EqualError(t, err, "signal: killed")
		} else {
			require.NoError(t, err)
		}
		all := o.Events
		for line := range strings.Lines(said) {
			if id, ok := strings.CutPrefix(strings.TrimSpace(line), "acked "); ok {
				require.Equal(t, o.Events[0].ID, id)
				o.Events = o.Events[1:]
			} else {
				id = strings.TrimPrefix(strings.TrimSpace(line), "killed ")
				inFlight = append(inFlight, all[indexOf(t, all, id)])
			}
		}
	}
	require.Empty(t, o.Events)
	return inFlight
}

// runChild runs a child process, and returns its output.
func runChild(t *testing.T, arm string, o order) (said string, err error) {
	input, err := json.Marshal(o)
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "KINORA_CHILD="+arm)
	var stderr strings.Builder
	cmd.Stdin, cmd.Stderr = bytes.NewReader(input), &stderr
	out, err := cmd.Output()
	if err != nil && stderr.Len() > 0 {
		t.Log(stderr.String())
	}
	return string(out), err
}

func indexOf(t *testing.T, list []event, id string) int {
	for i, e := range list {
		if e.ID == id {
			return i
		}
	}
	t.Fatalf("%s is none of the delivered events", id)
	return 0
}

// If a process is killed between EXEC and the ack, its message takes effect twice. With markers
// in the same transaction as the read model it takes effect once.
// Promise: G5.11
func TestAKillBetweenExecAndAckRepeatsTheEffect(t *testing.T) {
	t.Parallel()
	for _, arm := range []string{redisBeforeCommit, redisBeforeAck, sqliteBeforeAck} {
		t.Run(arm, func(t *testing.T) {
			t.Parallel()
			s, list := sharedSpace(t), events(40, 7)
			path := filepath.Join(t.TempDir(), "store.db")
			db, err := sqlite.Open(t.Context(), path, nil)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, db.Close()) })
			require.NoError(t, db.Migrate(t.Context()))
			_, err = db.SQL().Exec(`create table stars (product text primary key, n integer not null)`)
			require.NoError(t, err)

			began := time.Now()
			inFlight := redeliver(t, arm, order{URL: redistest.Shared(t), Prefix: s.prefix, Path: path, Events: list}, 5, 9, 12)
			require.Len(t, inFlight, 3)
			want, got := stars(append(inFlight, list...)...), s.counted(t)
			if arm == sqliteBeforeAck {
				want, got = stars(list...), countedInSQLite(t, db)
			}
			require.Equal(t, want, got)
			t.Logf("%d events, %d kills, %s: an exact projector has %d stars, this one %d", len(list), len(inFlight), time.Since(began), sum(stars(list...)), sum(got))
		})
	}
}

func countedInSQLite(t *testing.T, db *sqlite.DB) map[string]int {
	rows, err := db.SQL().Query(`select product, n from stars`)
	require.NoError(t, err)
	defer rows.Close()
	counted := map[string]int{}
	for rows.Next() {
		var product string
		var n int
		require.NoError(t, rows.Scan(&product, &n))
		counted[product] = n
	}
	require.NoError(t, rows.Err())
	return counted
}
