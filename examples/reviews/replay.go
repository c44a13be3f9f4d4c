package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kinora-go/kinora/projector"
)

// replayCmd applies parked messages again.
type replayCmd struct {
	operatorFlags `embed:""`
	decisionFlags `embed:""`
	Seq           []int64       `placeholder:"N" help:"Which: their numbers in the list."`
	Key           string        `help:"Those of this ordering key."`
	Class         string        `enum:",permanent,unknown,transient,held" default:"" placeholder:"CLASS" help:"Those of this class: permanent, unknown, transient or held."`
	All           bool          `help:"All that are parked."`
	DryRun        bool          `help:"Show the rows that would change, for the first 100 messages, and change nothing."`
	Wait          time.Duration `default:"1m" help:"How long to wait for the messages to be applied."`
}

// Validate is called by kong.
func (c *replayCmd) Validate() error {
	switch some := len(c.Seq) > 0 || c.Key != "" || c.Class != ""; {
	case some == c.All:
		return errors.New("say which messages: by --seq, --key and --class, all of which must hold, or by --all alone")
	case c.Reason == "" && !c.DryRun:
		return errNoReason
	case c.Wait < 0:
		return errors.New("--wait: give no negative time")
	}
	return nil
}

// Run makes the messages due, and applies them with the handlers of this program, next to a service that may do the same;
// or it shows what that would do.
func (c *replayCmd) Run(ctx context.Context) error {
	return c.with(ctx, func(db serviceStore) error {
		f := projector.ParkedFilter{Projector: reviewsProjector, Seqs: c.Seq, Key: c.Key, Class: classNamed(c.Class)}
		if c.DryRun {
			return c.dryRun(ctx, db, f)
		}
		n, err := projector.Replay(ctx, db, f, c.decision())
		if err != nil {
			return err
		}
		if n == 0 {
			return errNothingPicked
		}
		f.Class = nil // it changes when a message fails for another reason
		return c.finish(ctx, db, f, n)
	})
}

// finish applies what is due until nothing that was picked is waiting, or time is up.
func (c *replayCmd) finish(ctx context.Context, db serviceStore, f projector.ParkedFilter, picked int) error {
	ctx, cancel := context.WithTimeout(ctx, c.Wait)
	defer cancel()
	for {
		if err := db.applyParked(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		waiting, stuck, err := count(context.WithoutCancel(ctx), db, f)
		if err != nil {
			return err
		}
		if waiting > 0 && ctx.Err() == nil {
			_ = sleep(ctx, 50*time.Millisecond)
			continue
		}
		fmt.Printf("%d picked, %d of them are waiting, %d stuck\n", picked, waiting, stuck)
		if waiting+stuck > 0 {
			return errors.New("some were not applied: 'reviews parked' says why, --dry-run with their errors")
		}
		return nil
	}
}

// count counts the messages that f selects, and that are parked still.
func count(ctx context.Context, db serviceStore, f projector.ParkedFilter) (waiting, stuck int, err error) {
	for {
		list, err := db.Parked(ctx, f)
		if err != nil || len(list) == 0 {
			return waiting, stuck, err
		}
		for _, p := range list {
			f.After = p.Seq
			switch {
			case p.State == projector.StateStuck, p.DueAt.IsZero(): // or it waits behind one that is stuck
				stuck++
			default:
				waiting++
			}
		}
	}
}

func (c *replayCmd) dryRun(ctx context.Context, db serviceStore, f projector.ParkedFilter) error {
	would, err := db.dryRun(ctx, f)
	if err != nil {
		return err
	}
	fmt.Print(dryRunText(would))
	switch {
	case len(would.Failures) > 0:
		return errors.New("some would fail")
	case would.Messages+would.Waiting == 0:
		return errNothingPicked
	case would.Messages == 0:
		return errors.New("nothing would be replayed: what was picked waits behind what was not")
	}
	return nil
}

// dryRunText shows each row before and after, what would fail, and the sums.
func dryRunText(would *projector.DryRun) string {
	var b strings.Builder
	for _, c := range would.Changes {
		fmt.Fprintln(&b, printable(c.Table))
		if c.Before != nil {
			fmt.Fprintln(&b, "  -", printable(string(c.Before)))
		}
		if c.After != nil {
			fmt.Fprintln(&b, "  +", printable(string(c.After)))
		}
	}
	for _, f := range would.Failures {
		fmt.Fprintf(&b, "%d would fail: %s\n", f.Parked.Seq, printable(f.Err.Error()))
	}
	fmt.Fprintf(&b, "%d would be replayed, %d would fail, %d would wait; %d rows would change; nothing is changed\n",
		would.Messages, len(would.Failures), would.Waiting, len(would.Changes))
	return b.String()
}
