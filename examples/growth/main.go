// Command growth is a service that has outgrown one database. Its tenants are spread over several
// event stores. One program runs the relays and runners of all stores, its read models are in
// databases of their own, and another service gets the events from a broker. Two of the database
// servers crash meanwhile, a store is added, and the read models are exact.
//
//	go run .
//
// It starts private PostgreSQL servers from the installed binaries, and ends them. The guide explains
// it: docs/guide/14-past-one-database.md.
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
	"syscall"
	"time"
)

func main() { os.Exit(command(os.Args[1:], os.Stdout)) }

// command runs the program, and returns its exit code.
func command(args []string, out io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := parse(ctx, args, out)
	if errors.Is(err, flag.ErrHelp) {
		return 2
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "growth:", err)
		return 1
	}
	return 0
}

func parse(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("growth", flag.ContinueOnError)
	events := flags.Int("events", 3000, "how many events to append")
	limit := flags.Duration("limit", 3*time.Minute, "end after this time")
	verbose := flags.Bool("v", false, "show what the services log")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *events < 100 || flags.NArg() > 0 {
		return errors.New("-events must be at least 100, and there are no arguments")
	}
	ctx, cancel := context.WithTimeout(ctx, *limit)
	defer cancel()
	logger := slog.New(slog.DiscardHandler)
	if *verbose {
		logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return demonstrate(ctx, *events, logger, out)
}

func demonstrate(ctx context.Context, events int, logger *slog.Logger, out io.Writer) (err error) {
	d, err := newDemo(ctx, logger, out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	if err := d.start(ctx); err != nil {
		return err
	}
	ctx, cancel := d.whileRunning(ctx)
	defer cancel()
	if err := d.run(ctx, events); err != nil {
		return err
	}
	replica, end, err := d.standby(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	if err := d.readOwn(ctx, replica); err != nil {
		return err
	}
	if err := d.settle(ctx); err != nil {
		return err
	}
	return d.check(ctx)
}
