package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/outbox"
)

type demoCmd struct {
	DB         database `placeholder:"sqlite:PATH" help:"A new file, which is kept, an empty database (postgres://…), or memory. Default: SQLite in a temporary directory."`
	Commands   int      `default:"5000" help:"Number of commands."`
	Products   int      `default:"50" help:"Number of products."`
	Duplicates float64  `default:"0.3" help:"Share of the messages that are delivered twice, half of them at the same moment."`
	Kills      int      `default:"5" help:"How often a worker is killed between a handler's start and its ack. With --processes, every other kill is that of a relay between its claim and its mark."`
	Broker     string   `enum:"memory,sql" default:"memory" help:"The broker: memory, in the worker, or sql, topics in the database (postgres://… only)."`
	Processes  int      `default:"0" help:"With --broker sql: number of relays and number of projectors, each in its own process, instead of one worker."`
	Seed       uint64   `help:"Seed of the commands and duplicates. 0 means a random seed."`
	JSON       string   `placeholder:"FILE" help:"Also write the result to this file."`

	projectionFlags `embed:""`
}

// Validate is called by kong.
func (c *demoCmd) Validate() error {
	switch {
	case c.Commands < 1 || c.Products < 1:
		return errors.New("--commands and --products must be at least 1")
	case c.Duplicates < 0 || c.Duplicates > 1:
		return errors.New("--duplicates must be 0 to 1")
	case c.Kills < 0:
		return errors.New("--kills must be at least 0")
	case c.DB.kind == "memory" && c.Kills > 0:
		return errors.New("--db memory runs everything in one process, which cannot survive a kill: use --kills 0")
	case c.DB.kind == "memory" && c.Projection == "redis":
		return errors.New("--db memory has its read models in this process: use --projection sql")
	case c.Processes < 0 || c.Processes > 0 && c.Broker != sqlKind:
		return errors.New("--processes must be at least 0 and requires --broker sql, which processes can share")
	}
	return brokerAddress{kind: c.Broker}.check(c.DB)
}

// Run shows that a read model stays exact while messages are delivered twice and processes are
// killed, and that a read model without markers becomes wrong.
func (c *demoCmd) Run(ctx context.Context) (err error) {
	slog.SetLogLoggerLevel(slog.LevelWarn)
	if c.Seed == 0 {
		c.Seed = rand.Uint64N(1 << 32)
	}
	cleanup, err := c.prepareDB()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cleanup()) }()
	if c.DB = c.of(c.DB); c.DB.redis.url != "" {
		c.DB.redis.tag = demoTag
	}
	db, err := c.DB.createDemo(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := checkUnused(ctx, db); err != nil {
		return fmt.Errorf("%s: %w", c.DB, err)
	}
	if err := db.createDemoTables(ctx); err != nil {
		return err
	}
	observer, err := brokerAddress{kind: c.Broker}.openDemo(ctx, c.DB, 0, review.Category, againTopic)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, observer.Close()) }()
	d := &demo{demoCmd: c, db: db, broker: observer, ledger: newLedger(), start: time.Now()}
	result, err := d.run(ctx)
	switch {
	case err != nil && ctx.Err() != nil:
		return errors.New("interrupted")
	case err != nil:
		return err
	}
	if err := result.write(c.JSON); err != nil {
		return err
	}
	if !result.OK {
		return errors.New("the demo failed: the read model with markers is wrong, the control is right, or a kill is missing (see the table)")
	}
	return nil
}

// demoTag is the hash tag of the demo's keys in Redis. The demo deletes those of the last one.
const demoTag = "reviews-demo"

// prepareDB chooses a temporary database if none is given. The caller must call cleanup at the end.
func (c *demoCmd) prepareDB() (cleanup func() error, err error) {
	switch c.DB.kind {
	case "memory", "postgres":
		return func() error { return nil }, nil
	case "sqlite":
		if _, err := os.Stat(c.DB.path); err == nil {
			return nil, fmt.Errorf("%s already exists: the demo counts all events in the file, so use a new file", c.DB.path)
		}
		return func() error { return nil }, nil
	}
	dir, err := os.MkdirTemp("", "kinora-demo-")
	if err != nil {
		return nil, err
	}
	c.DB = database{kind: "sqlite", path: filepath.Join(dir, "demo.db")}
	return func() error { return os.RemoveAll(dir) }, nil
}

// checkUnused returns an error if the outbox of the database has entries.
func checkUnused(ctx context.Context, db demoStore) error {
	counts, err := db.StatusCounts(ctx)
	for _, n := range counts {
		if n > 0 {
			return errors.New("the database has been used: the demo counts all events in it, so use an empty database")
		}
	}
	return err
}

// checkApplied returns an error if there are abandoned entries or parked messages.
func checkApplied(ctx context.Context, s store) error {
	counts, err := s.StatusCounts(ctx, outbox.Abandoned)
	if err != nil {
		return err
	}
	parked, err := s.ParkedCount(ctx, "")
	if err != nil {
		return err
	}
	if counts[outbox.Abandoned] > 0 || parked > 0 {
		return fmt.Errorf("%d outbox entries are abandoned, and %d messages are parked", counts[outbox.Abandoned], parked)
	}
	return nil
}

// demo is one run of the demo.
type demo struct {
	*demoCmd
	db        demoStore
	broker    demoBroker // of this process; a memory broker carries messages only if the worker runs here
	commander *commander
	ledger    *ledger
	start     time.Time
}

func (d *demo) logf(format string, args ...any) {
	fmt.Printf("%6.1fs  %s\n", time.Since(d.start).Seconds(), fmt.Sprintf(format, args...))
}

func (d *demo) run(ctx context.Context) (*demoResult, error) {
	var err error
	if d.commander, err = newCommander(d.db, d.Seed, d.Products, d.Commands); err != nil {
		return nil, err
	}
	d.logf("%d commands on %d products, %.0f%% of the messages delivered twice, %d kills, seed %d, in %s",
		d.Commands, d.Products, d.Duplicates*100, d.Kills, d.Seed, d.DB)
	kills := 0
	if d.DB.kind == "memory" {
		err = d.inOneProcess(ctx)
	} else {
		kills, err = d.inOtherProcesses(ctx)
	}
	if err != nil {
		return nil, err
	}
	if err := checkApplied(ctx, d.db); err != nil {
		return nil, err
	}
	exact, err := d.db.ratings(ctx, exactPrefix)
	if err != nil {
		return nil, err
	}
	control, err := d.db.ratings(ctx, controlPrefix)
	if err != nil {
		return nil, err
	}
	r := newDemoResult(&d.commander.tally, exact, control)
	r.Events, r.Kills = d.commander.events.Load(), kills
	r.count(d.ledger.total(), d.Kills)
	d.logf("done")
	fmt.Print(r)
	return r, nil
}

// inOneProcess runs the worker in this process while the commands are issued.
func (d *demo) inOneProcess(ctx context.Context) error {
	w := &worker{role: wholeWork, db: d.db, broker: d.broker, duplicates: d.Duplicates, seed: d.Seed, trace: &trace{
		write: func(s step) error { d.ledger.record("", s); return nil },
	}}
	working, stop := context.WithCancel(context.WithoutCancel(ctx))
	return d.runWithWorker(ctx, stop, func(context.Context) error { return w.run(working) })
}

// runWithWorker starts the worker, issues the commands, waits until no message is in flight, and
// stops the worker.
func (d *demo) runWithWorker(ctx context.Context, stop func(), run func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error, 1)
	go func() {
		err := run(ctx)
		cancel(err) // the commands must not wait for a worker that has ended
		done <- err
	}()
	err := d.issueAndWait(ctx)
	if err != nil {
		cancel(err)
	}
	stop()
	werr := <-done
	switch {
	case err == nil:
		return werr
	case werr == nil || errors.Is(werr, context.Canceled):
		return err
	default:
		return werr
	}
}

func (d *demo) issueAndWait(ctx context.Context) error {
	if err := d.commander.run(ctx, d.ledger.ackedMessages); err != nil {
		return err
	}
	d.logf("all commands issued: %d accepted, %d rejected, %d events", d.commander.tally.accepted,
		d.commander.tally.rejected, d.commander.events.Load())
	// ctx ends with the worker.
	if err := waitPublished(ctx, d.db, nil); err != nil {
		return err
	}
	if err := waitDrained(ctx, d.broker, d.db); err != nil {
		return err
	}
	d.logf("all events are published and acked; delivering the last copies")
	return nil
}
