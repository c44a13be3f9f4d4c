// Command distributed runs relays, runners and brokers as processes, kills some of them meanwhile,
// and shows that the read models are exact.
//
//	go run .            # three relays, three runners, three NATS servers, PostgreSQL
//
// It starts all of them itself, and ends them. PostgreSQL is a private server from the installed
// binaries, unless KINORA_POSTGRES has a connection string, with rights to create a database. All
// processes are of this program: "distributed relay", "distributed runner" and "distributed nats".
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/kinora-go/kinora/examples/distributed/brokers"
)

// The first argument of a process that this program starts.
const (
	relayRole  = "relay"
	runnerRole = "runner"
	natsRole   = "nats"
)

func main() { os.Exit(command(os.Args[1:])) }

// command runs the program, and returns its exit code.
func command(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	if len(args) > 0 && slices.Contains([]string{relayRole, runnerRole, natsRole}, args[0]) {
		err = child(ctx, args[0], args[1:])
	} else {
		err = parent(ctx, args, os.Stdout)
	}
	if errors.Is(err, flag.ErrHelp) {
		return 2
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "distributed:", err)
		return 1
	}
	return 0
}

// child runs one service. It stops when ctx or its standard input ends.
func child(ctx context.Context, role string, args []string) error {
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, nil)).With("process", fmt.Sprintf("%s/%d", role, os.Getpid())))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	flags := flag.NewFlagSet(role, flag.ContinueOnError)
	if role == natsRole {
		var n natsNode
		n.flags(flags)
		if err := flags.Parse(args); err != nil {
			return err
		}
		return n.serve(ctx, os.Stdout)
	}
	var o options
	flags.StringVar(&o.dsn, "db", "", "connection string of PostgreSQL")
	flags.StringVar(&o.broker, "broker", "", "address of the broker")
	flags.DurationVar(&o.takeover, "takeover", brokers.Takeover, "how long the messages of a killed runner wait")
	flags.IntVar(&o.redeliver, "redeliver", 0, "nack every message number N, 2N, … after it is applied")
	if err := flags.Parse(args); err != nil {
		return err
	}
	return serve(ctx, role, o, os.Stdout)
}

// parent runs the whole example.
func parent(ctx context.Context, args []string, out io.Writer) (err error) {
	flags := flag.NewFlagSet("distributed", flag.ContinueOnError)
	events := flags.Int("events", 3000, "how many events to append")
	limit := flags.Duration("limit", 3*time.Minute, "end after this time")
	verbose := flags.Bool("v", false, "show what the processes log")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *events < 100 || flags.NArg() > 0 {
		return errors.New("-events must be at least 100, and there are no arguments")
	}
	ctx, cancel := context.WithTimeout(ctx, *limit)
	defer cancel()
	logs := io.Discard
	if *verbose {
		logs = os.Stderr
	}
	dsn, drop, err := startPostgres(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, drop()) }()
	ps, err := newProcesses(logs)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ps.stopAll()) }()
	return demonstrate(ctx, ps, dsn, *events, out)
}

// demonstrate runs the scenario with a cluster of three NATS servers, and prints the result.
func demonstrate(ctx context.Context, ps *processes, dsn string, events int, out io.Writer) error {
	begin := time.Now()
	db, err := openDB(ctx, dsn)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := prepareDB(ctx, db); err != nil {
		return err
	}
	say(out, "PostgreSQL is ready")
	cluster, err := startCluster(ctx, ps, 3)
	if err != nil {
		return err
	}
	defer func() {
		_ = ps.stopAll() // its error is returned by the call of the parent, or below
		cluster.remove()
	}()
	say(out, "three NATS servers are ready")
	s := &scenario{
		processes: ps, ledger: &ledger{db: db, amounts: map[string][]int64{}}, accounts: 20, services: 3, out: out,
		options: options{dsn: dsn, broker: cluster.address(), takeover: lease, redeliver: 20},
		outage:  cluster.killOne,
	}
	if err := s.run(ctx, events); err != nil {
		return err
	}
	if err := ps.stopAll(); err != nil { // counts are complete then
		return err
	}
	return s.report(ctx, time.Since(begin), out)
}

// report prints the counts, and returns an error if a read model is wrong.
func (s *scenario) report(ctx context.Context, took time.Duration, out io.Writer) error {
	say(out, "%d events of %d accounts in %s", s.events, len(s.amounts), took.Round(100*time.Millisecond))
	say(out, "entries taken over from a killed relay: %d", s.printed(takenOver))
	say(out, "deliveries of applied messages, skipped: %d", s.printed(skippedTwice))
	say(out, "events that came from the log before the broker delivered them: %d", s.printed(fromLog))
	for _, table := range []string{"deliveries", "balances"} {
		c, err := s.compare(ctx, table)
		if err != nil {
			return err
		}
		if len(c.wrong)+len(c.unordered) > 0 {
			return fmt.Errorf("%s is wrong for %v, and out of order for %v", table, c.wrong, c.unordered)
		}
		say(out, "%s is exact: %d events, each once, in the order of its account", table, c.applied)
	}
	return nil
}
