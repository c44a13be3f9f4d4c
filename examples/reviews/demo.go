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
)

type demoCmd struct {
	DB         database `placeholder:"sqlite:PATH" help:"A new file, which is kept, an empty database (postgres://…), or memory. Default: SQLite in a temporary folder."`
	Commands   int      `default:"5000" help:"How many commands."`
	Products   int      `default:"50" help:"Over how many products."`
	Duplicates float64  `default:"0.3" help:"Share of the messages that are delivered twice, half of these at the same moment."`
	Kills      int      `default:"5" help:"How often a worker is killed between a handler's start and its ack; with --processes, every other time a relay between its claim and its mark."`
	Broker     string   `enum:"memory,sql" default:"memory" help:"What carries messages: memory, in the worker, or sql, topics in the database (postgres://… only)."`
	Processes  int      `default:"0" help:"With --broker sql: so many relays and so many projectors, each in a process of its own, in place of the one worker."`
	Seed       uint64   `help:"Of commands and duplicates; 0 draws one."`
	JSON       string   `placeholder:"FILE" help:"Write the result here as well."`
}

// Validate is called by kong.
func (c *demoCmd) Validate() error {
	switch {
	case c.Commands < 1 || c.Products < 1:
		return errors.New("--commands and --products: want at least 1")
	case c.Duplicates < 0 || c.Duplicates > 1:
		return errors.New("--duplicates: want 0 to 1")
	case c.Kills < 0:
		return errors.New("--kills: want at least 0")
	case c.DB.kind == "memory" && c.Kills > 0:
		return errors.New("--db memory keeps everything in one process, which cannot kill itself and go on: use --kills 0")
	case c.Processes < 0 || c.Processes > 0 && c.Broker != sqlKind:
		return errors.New("--processes: want at least 0, and --broker sql, which processes share")
	}
	return checkBroker(c.Broker, c.DB)
}

// Run shows that a read model stays exact while messages are delivered again and processes are killed, and
// what becomes of one without markers.
func (c *demoCmd) Run(ctx context.Context) (err error) {
	slog.SetLogLoggerLevel(slog.LevelWarn)
	if c.Seed == 0 {
		c.Seed = rand.Uint64N(1 << 32)
	}
	tidy, err := c.place()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tidy()) }()
	db, err := c.DB.createDemo(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if err := unused(ctx, db); err != nil {
		return fmt.Errorf("%s: %w", c.DB, err)
	}
	look, err := openBroker(ctx, c.Broker, c.DB, 0, review.Category, againTopic)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, look.Close()) }()
	d := &demo{demoCmd: c, db: db, broker: look, ledger: newLedger(), start: time.Now()}
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
		return errors.New("the demo did not show what it should")
	}
	return nil
}

// place finds a place for the database, and says how to tidy up.
func (c *demoCmd) place() (tidy func() error, err error) {
	switch c.DB.kind {
	case "memory", "postgres":
		return func() error { return nil }, nil
	case "sqlite":
		if _, err := os.Stat(c.DB.path); err == nil {
			return nil, fmt.Errorf("%s is there already: the demo wants a new file, or it would count what it did not do", c.DB.path)
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

// unused refuses a database that something was published from.
func unused(ctx context.Context, db demoStore) error {
	counts, err := db.StatusCounts(ctx)
	for _, n := range counts {
		if n > 0 {
			return errors.New("it has been used: the demo wants an empty database, or it would count what it did not do")
		}
	}
	return err
}

// demo is one run of it.
type demo struct {
	*demoCmd
	db        demoStore
	broker    broker // of this process: in memory, the one that carries messages only where the worker is here
	commander *commander
	ledger    *ledger
	start     time.Time
}

func (d *demo) say(format string, args ...any) {
	fmt.Printf("%6.1fs  %s\n", time.Since(d.start).Seconds(), fmt.Sprintf(format, args...))
}

func (d *demo) run(ctx context.Context) (*demoResult, error) {
	var err error
	if d.commander, err = newCommander(d.db, d.Seed, d.Products, d.Commands); err != nil {
		return nil, err
	}
	d.say("%d commands on %d products, %.0f %% of the messages delivered twice, %d kills, seed %d, in %s",
		d.Commands, d.Products, d.Duplicates*100, d.Kills, d.Seed, d.DB)
	kills := 0
	if d.DB.kind == "memory" {
		err = d.inOneProcess(ctx)
	} else {
		kills, err = d.inProcesses(ctx)
	}
	if err != nil {
		return nil, err
	}
	if err := troubled(ctx, d.db); err != nil {
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
	d.say("done")
	fmt.Print(r)
	return r, nil
}

// inOneProcess runs the worker beside the commands.
func (d *demo) inOneProcess(ctx context.Context) error {
	w := &worker{role: wholeWork, db: d.db, broker: d.broker, duplicates: d.Duplicates, seed: d.Seed, trace: &trace{
		write: func(s step) error { d.ledger.enter("", s); return nil },
	}}
	working, stop := context.WithCancel(context.WithoutCancel(ctx))
	return d.alongside(ctx, stop, func(context.Context) error { return w.run(working) })
}

// alongside runs the worker while it issues the commands, waits until nothing is on its way, and stops it.
func (d *demo) alongside(ctx context.Context, stop func(), run func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error, 1)
	go func() {
		err := run(ctx)
		cancel(err) // without a worker there is nothing to wait for
		done <- err
	}()
	err := d.drive(ctx)
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

func (d *demo) drive(ctx context.Context) error {
	if err := d.commander.run(ctx, d.ledger.ackedMessages); err != nil {
		return err
	}
	d.say("all commands are issued: %d accepted, %d rejected, %d events", d.commander.tally.accepted,
		d.commander.tally.rejected, d.commander.events.Load())
	if err := caughtUp(ctx, d.db, d.broker, nil, func(int64) {}); err != nil { // ctx ends with the worker
		return err
	}
	d.say("every event is published and acked; the last copies are delivered")
	return nil
}
