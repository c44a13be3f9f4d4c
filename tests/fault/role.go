package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
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

// role is a child's job.
type role string

const (
	producing role = "producer"
	relaying  role = "relay"
	running   role = "runner"
	reading   role = "reader"
	laboring  role = "worker"
	building  role = "builder"
)

// settings configure a child.
type settings struct {
	Role    role
	Name    string
	Life    int // starts at 1
	DSN     string
	Program string `json:"-"` // the file of its program; empty means the suite's
	Socket  string // the broker's socket
	Dir     string // the child's files
	Seed    uint64

	Conns int           // pool size
	Lease time.Duration // lease of claims and of runners
	// Attempts limits the attempts before an entry is abandoned or a message is stuck; negative
	// means unlimited.
	Attempts int
	Patience time.Duration // limit on its drain, and on the wait for its goroutines
	Skew     time.Duration // error of its clock, in whole seconds (see skewed.go)
	Point    string        // crash point at which it kills itself, with the build tag kinora_fault
	Stops    bool          // it stops itself there instead

	Streams int  // producer: number of streams with commands at a time
	Hot     int  // producer: number of them that get most commands
	Workers int  // producer: number of concurrent commands
	Length  int  // producer: commands per stream
	Alone   bool // producer: no other producer uses its streams
	Rate    int  // producer: most commands a second; zero means no limit

	Batch   int  // relay: entries per claim
	Ordered bool // relay: one Publish call keeps the order of its messages

	Concurrency int           // runner: workers per projector
	Unit        int           // runner: maximum messages per unit; zero means the default
	Careful     bool          // runner: record every message as in flight before it runs
	Group       string        // runner: consumer group
	Batched     bool          // runner: units in one round trip
	Slow        time.Duration // runner: upper bound of a handler's duration
	Least       time.Duration // runner: lower bound of a handler's duration
	SlowOneIn   int           // runner: one message in so many is slow; zero means all
	Control     bool          // runner: also run a control projector without markers
	Timeout     time.Duration // runner: a handler's deadline
	Arms        []string      // runner: its projectors, from arms.go; empty means exact
	Log         bool          // runner: reads the log, without the broker
	From        int64         // runner: the position behind which new projectors begin
	Grace       time.Duration // runner: RunnerConfig.Grace
	Lossy       bool          // runner: its broker loses, doubles and delays deliveries (see lossy.go)

	More map[string]string // settings for a cell's own code
}

// work is the state of a child.
type work struct {
	settings
	status *status
	trace  *trace
	db     *postgres.DB
	http   *http.Client // of a worker
}

// child runs the program as a child until SIGTERM.
func child(text string) int {
	w := &work{}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	err := json.Unmarshal([]byte(text), &w.settings)
	if err == nil {
		err = w.run(ctx)
	}
	if err != nil {
		slog.Error("child failed", "err", err)
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
	return leaked(before, w.Patience)
}

// leaked returns an error if a role that ended without an error leaves goroutines behind that do not end within limit.
func leaked(before int, limit time.Duration) (err error) {
	for begin := time.Now(); runtime.NumGoroutine() > before; time.Sleep(20 * time.Millisecond) {
		stacks := make([]byte, 1<<20)
		if err = leakError(before, string(stacks[:runtime.Stack(stacks, true)])); err == nil || time.Since(begin) > limit {
			return err
		}
	}
	return nil
}

// leakError returns an error if there are more goroutines than before, except those that wait for
// connections without an answer: pgx gives each of them 15 s to close, and Acquire tries its
// connection in the background (postgres.Open). DB.Close waits for neither.
func leakError(before int, stacks string) error {
	left := slices.DeleteFunc(strings.Split(strings.TrimSpace(stacks), "\n\n"), func(stack string) bool {
		return strings.Contains(stack, "pgconn.(*PgConn).asyncClose") || strings.Contains(stack, "puddle/v2.(*Pool[...])") ||
			strings.Contains(stack, "pgxpool.(*Pool).Acquire")
	})
	if len(left) <= before {
		return nil
	}
	return fmt.Errorf("%d goroutines before, %d after:\n%s", before, len(left), strings.Join(left, "\n\n"))
}

// life runs the role from start to end.
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
		if w.More["redis"] != "" {
			return w.projectRedis(ctx)
		}
		return w.project(ctx)
	case reading:
		return w.read(ctx)
	case laboring:
		return w.labor(ctx)
	case building:
		return w.build(ctx)
	}
	return fmt.Errorf("unknown role %q", w.Role)
}

// open connects and retries while the server is away. It returns nil if ctx ends first.
func (w *work) open(ctx context.Context) *postgres.DB {
	cfg := &postgres.Config{Route: outbox.ByCategory, Notify: true}
	if w.More["unrouted"] != "" {
		cfg.Route = nil
	}
	for {
		db, err := w.connect(ctx, fmt.Sprintf("%s&pool_max_conns=%d&application_name=%s", w.DSN, w.Conns, w.Name), cfg)
		if err == nil {
			return db
		}
		slog.Warn("open failed, retrying", "err", err)
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil
		}
	}
}

// ready reports to the suite that the role works.
func (w *work) ready(running <-chan struct{}) {
	go func() {
		<-running
		w.status.set(wordReady, 1)
	}()
}
