package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
)

// roleEnv holds the settings of a child; a process without it is the suite.
const roleEnv = "KINORA_FAULT_CHILD"

// role is what a child does.
type role string

const (
	producing role = "producer"
	relaying  role = "relay"
	running   role = "runner"
)

// settings are what the suite tells a child.
type settings struct {
	Role   role
	Name   string
	Life   int // from 1
	DSN    string
	Socket string // the broker's
	Dir    string // for its files
	Seed   uint64

	Conns    int           // of its pool
	Lease    time.Duration // of claims, and of runners
	Attempts int           // until an entry is abandoned or a message parked; negative: without end
	Skew     time.Duration // how wrong its clock is, in whole seconds (see skewed.go)
	Point    string        // where it kills itself, if it was built to (see the build tag kinora_fault)

	Streams int  // producer: how many have commands at a time
	Hot     int  // producer: how many of them have most
	Workers int  // producer: how many commands are under way at a time
	Length  int  // producer: commands of one stream
	Alone   bool // producer: no other one has commands for its streams

	Batch   int  // relay: entries of a claim
	Ordered bool // relay: one Publish call keeps the order of its messages

	Concurrency int           // runner: workers of each projector
	Unit        int           // runner: most messages of a unit; zero: the default
	Careful     bool          // runner: name every message before it runs
	Group       string        // runner: whose messages
	Batched     bool          // runner: units in one round trip
	Slow        time.Duration // runner: each handler takes up to this long
	Least       time.Duration // runner: and at least this long
	SlowOneIn   int           // runner: only one message in so many is slow; zero: all
	Control     bool          // runner: beside the projector with markers, one without
	Timeout     time.Duration // runner: a handler's

	More map[string]string // whatever a cell's own code wants to know
}

// work is what a child has to do its role.
type work struct {
	settings
	status *status
	trace  *trace
	db     *postgres.DB
}

// child is the program as a child, until SIGTERM.
func child(text string) int {
	w := &work{}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	err := json.Unmarshal([]byte(text), &w.settings)
	if err == nil {
		err = w.run(ctx)
	}
	if err != nil {
		slog.Error("ended", "err", err)
		return 1
	}
	return 0
}

func (w *work) run(ctx context.Context) error {
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, nil)))
	before := runtime.NumGoroutine()
	if err := w.life(ctx); err != nil {
		return err
	}
	return leaked(before)
}

// leaked tells whether goroutines are left behind a role that has ended well.
func leaked(before int) error {
	for limit := time.Now().Add(3 * time.Second); runtime.NumGoroutine() > before; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(limit) {
			stacks := make([]byte, 1<<20)
			return stay(before, string(stacks[:runtime.Stack(stacks, true)]))
		}
	}
	return nil
}

// stay is an error where more goroutines are left than there were, beside those that wait for connections on which nobody answers:
// pgx gives each of them 15 seconds to close, and the one that Acquire tries its time (postgres.Open); DB.Close does not wait for that.
func stay(before int, stacks string) error {
	left := slices.DeleteFunc(strings.Split(strings.TrimSpace(stacks), "\n\n"), func(stack string) bool {
		return strings.Contains(stack, "pgconn.(*PgConn).asyncClose") || strings.Contains(stack, "puddle/v2.(*Pool[...])") ||
			strings.Contains(stack, "pgxpool.(*Pool).Acquire")
	})
	if len(left) <= before {
		return nil
	}
	return fmt.Errorf("%d goroutines before, %d after:\n%s", before, len(left), strings.Join(left, "\n\n"))
}

// life is the role, from its start to its end.
func (w *work) life(ctx context.Context) (err error) {
	if w.status, err = openStatus(filepath.Join(w.Dir, "status-"+w.Name)); err != nil {
		return err
	}
	if w.trace, err = openTrace(filepath.Join(w.Dir, "trace-"+w.Name)); err != nil {
		return err
	}
	w.trace.printf("life")
	w.status.set(wordSkew, (time.Now().UnixNano()-machineTime())/int64(time.Second/2))
	if w.More["steps"] != "" {
		crash.Watch(w.passed)
	}
	if w.db = w.open(ctx); w.db == nil {
		return nil
	}
	defer w.shut()
	if w.More["probe"] != "" {
		go w.probe(ctx)
	}
	switch w.Role {
	case producing:
		return w.produce(ctx)
	case relaying:
		return w.relay(ctx)
	case running:
		return w.project(ctx)
	}
	return fmt.Errorf("no role %q", w.Role)
}

// open connects, however long the server is away. It returns nil where ctx ends first.
func (w *work) open(ctx context.Context) *postgres.DB {
	cfg := &postgres.Config{Route: outbox.ByCategory, Notify: true}
	for {
		db, err := w.connect(ctx, fmt.Sprintf("%s&pool_max_conns=%d&application_name=%s", w.DSN, w.Conns, w.Name), cfg)
		if err == nil {
			return db
		}
		slog.Warn("open", "err", err)
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil
		}
	}
}

// ready tells the suite that the role works.
func (w *work) ready(running <-chan struct{}) {
	go func() {
		<-running
		w.status.set(wordReady, 1)
	}()
}
