package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/kinora-go/kinora/projector"
)

// replayCmd handles parked messages again, with the handlers of this program.
type replayCmd struct {
	operatorFlags `embed:""`
	decisionFlags `embed:""`
	Seq           []int64 `placeholder:"N" help:"Which: their numbers in the list."`
	Key           string  `help:"Those of this ordering key."`
	Class         string  `enum:",permanent,unknown,held" default:"" placeholder:"CLASS" help:"Those of this class: permanent, unknown or held."`
	All           bool    `help:"All that are parked."`
	Rehearse      bool    `help:"Show the rows that would change, for the first 100 messages, and change nothing."`
	Rate          float64 `default:"100" help:"Messages a second at most; 0 for no limit."`
	Force         bool    `help:"Also those that may have taken effect already, as markers from when they were parked are pruned."`
}

// Validate is called by kong.
func (c *replayCmd) Validate() error {
	switch some := len(c.Seq) > 0 || c.Key != "" || c.Class != ""; {
	case some == c.All:
		return errors.New("say which messages: by --seq, --key and --class, all of which must hold, or by --all alone")
	case c.Reason == "" && !c.Rehearse:
		return errNoReason
	case c.Rate < 0:
		return errors.New("--rate: want nothing negative")
	}
	return nil
}

// Run replays them, or shows what that would do. The service may run meanwhile.
func (c *replayCmd) Run(ctx context.Context) error {
	return c.with(ctx, func(db serviceStore) error {
		runner, err := db.runner(projector.Source{}) // to replay, and never to run
		if err != nil {
			return err
		}
		f := projector.ParkedFilter{Projector: reviewsProjector, Seqs: c.Seq, Key: c.Key, Class: classNamed(c.Class)}
		if c.Rehearse {
			return c.rehearse(ctx, runner, f)
		}
		if c.Rate == 0 {
			c.Rate = -1
		}
		done, err := runner.Replay(ctx, f, projector.ReplayConfig{Rate: c.Rate, Force: c.Force, Decision: c.decision()})
		fmt.Printf("%d replayed, %d failed, %d waiting\n", done.Replayed, done.Failed, done.Waiting)
		if err != nil {
			return err
		}
		return unlessDone(done)
	})
}

// unlessDone: what waits behind others may be left to the service, but not where nothing else was picked.
func unlessDone(done projector.Replays) error {
	switch {
	case done.Failed > 0:
		return errors.New("some failed: 'reviews parked' says with what, --rehearse with their errors")
	case done.Replayed > 0:
		return nil
	case done.Waiting > 0:
		return errors.New("nothing was replayed: what was picked waits behind what was not")
	}
	return errNothingPicked
}

func (c *replayCmd) rehearse(ctx context.Context, runner *projector.Runner, f projector.ParkedFilter) error {
	would, err := runner.Rehearse(ctx, f, c.Force)
	if err != nil {
		return err
	}
	fmt.Print(rehearsalText(would))
	switch {
	case len(would.Failures) > 0:
		return errors.New("some would fail")
	case would.Messages+would.Waiting == 0:
		return errNothingPicked
	case would.Messages == 0:
		return unlessDone(projector.Replays{Waiting: would.Waiting})
	}
	return nil
}

// rehearsalText shows each row before and after, what would fail, and what all comes to.
func rehearsalText(would *projector.Rehearsal) string {
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
