package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// replayCmd applies parked messages again.
type replayCmd struct {
	operatorFlags `embed:""`
	decisionFlags `embed:""`
	Seq           []int64       `placeholder:"N" help:"The numbers of the messages in the list."`
	Key           string        `help:"Messages of this ordering key."`
	Class         string        `enum:",permanent,unknown,transient,held,unable" default:"" placeholder:"CLASS" help:"Messages of this class: permanent, unknown, transient, held or unable."`
	All           bool          `help:"All parked messages."`
	DryRun        bool          `help:"Show the rows that would change, for the first 100 messages. Changes nothing."`
	Wait          time.Duration `default:"1m" help:"How long to wait for the messages to be applied."`
}

// Validate is called by kong.
func (c *replayCmd) Validate() error {
	switch selected := len(c.Seq) > 0 || c.Key != "" || c.Class != ""; {
	case selected == c.All:
		return errors.New("select messages: use --seq, --key and --class, which all must match, or --all alone")
	case c.Reason == "" && !c.DryRun:
		return errNoReason
	case c.Wait < 0:
		return errors.New("--wait is negative: use 0 or more")
	}
	return nil
}

// Run marks the messages as due and applies them with the handlers of this program. A running
// service may apply them at the same time. With --dry-run it only shows the changes.
func (c *replayCmd) Run(ctx context.Context) error {
	return c.with(ctx, func(db serviceStore) error {
		f, err := ofLive(ctx, db, projector.ParkedFilter{Seqs: c.Seq, Key: c.Key, Class: classNamed(c.Class)})
		if err != nil {
			return err
		}
		if c.DryRun {
			return c.dryRun(ctx, db, f)
		}
		n, err := projector.Replay(ctx, db, f, c.decision())
		if err != nil {
			return err
		}
		if n == 0 {
			return errNothingSelected
		}
		f.Class = nil // the class changes when a message fails for another reason
		return c.finish(ctx, db, f, n)
	})
}

// ofLive selects the messages of the generation of the read model that readers see.
func ofLive(ctx context.Context, db serviceStore, f projector.ParkedFilter) (projector.ParkedFilter, error) {
	all, err := db.state().Generations(ctx, db.name())
	f.Projector, f.Generation = db.name(), provider.LiveGeneration(all)
	return f, err
}

// finish applies due messages until no selected message is waiting or --wait is over.
func (c *replayCmd) finish(ctx context.Context, db serviceStore, f projector.ParkedFilter, selected int) error {
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
		fmt.Printf("%d selected: %d still waiting, %d stuck\n", selected, waiting, stuck)
		if waiting+stuck > 0 {
			return errors.New("some messages were not applied: 'reviews parked' lists them, --dry-run shows their errors")
		}
		return nil
	}
}

// count counts the messages that f selects and that are still parked.
func count(ctx context.Context, db serviceStore, f projector.ParkedFilter) (waiting, stuck int, err error) {
	for {
		list, err := db.Parked(ctx, f)
		if err != nil || len(list) == 0 {
			return waiting, stuck, err
		}
		for _, p := range list {
			f.After = p.Seq
			switch {
			case p.State == projector.StateStuck, p.DueAt.IsZero(): // or the message waits behind a stuck one
				stuck++
			default:
				waiting++
			}
		}
	}
}

func (c *replayCmd) dryRun(ctx context.Context, db serviceStore, f projector.ParkedFilter) error {
	result, err := db.dryRun(ctx, f)
	if err != nil {
		return err
	}
	fmt.Print(dryRunText(result))
	switch {
	case len(result.Failures) > 0:
		return errors.New("some messages would fail: fix their handler, or skip them")
	case result.Messages+result.Waiting == 0:
		return errNothingSelected
	case result.Messages == 0:
		return errors.New("no message would be replayed: the selected ones wait behind messages that are not selected, so select those too")
	}
	return nil
}

// dryRunText returns each changed row before and after, the failures, and the totals.
func dryRunText(result *projector.DryRun) string {
	var b strings.Builder
	for _, c := range result.Changes {
		fmt.Fprintln(&b, printable(c.Table))
		if c.Before != nil {
			fmt.Fprintln(&b, "  -", printable(string(c.Before)))
		}
		if c.After != nil {
			fmt.Fprintln(&b, "  +", printable(string(c.After)))
		}
	}
	for _, f := range result.Failures {
		fmt.Fprintf(&b, "%d would fail: %s\n", f.Parked.Seq, printable(f.Err.Error()))
	}
	fmt.Fprintf(&b, "%d would be replayed, %d would fail, %d would wait; %d rows would change; nothing is changed\n",
		result.Messages, len(result.Failures), result.Waiting, len(result.Changes))
	return b.String()
}
