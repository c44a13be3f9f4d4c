package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kinora-go/kinora/projector"
)

// rebuildCmd rebuilds the read model from the events. While a service runs, its runner does the work.
type rebuildCmd struct {
	Start   rebuildStartCmd   `cmd:"" default:"withargs" help:"Rebuild the read model, and wait until readers see it. This is the default."`
	Plan    rebuildPlanCmd    `cmd:"" help:"Show what a rebuild would do."`
	List    rebuildListCmd    `cmd:"" help:"List the generations of the read model, and the progress of a rebuild."`
	Pause   rebuildPauseCmd   `cmd:"" help:"Pause the rebuild."`
	Resume  rebuildResumeCmd  `cmd:"" help:"Resume the rebuild."`
	Cancel  rebuildCancelCmd  `cmd:"" help:"Give the rebuild up, and drop its tables."`
	Promote rebuildPromoteCmd `cmd:"" help:"Show a generation to readers: the one before (a rollback), or a rebuild that waits after --check."`
	Drop    rebuildDropCmd    `cmd:"" help:"Drop the generation that was kept for a rollback."`
}

// howFlags choose the way of a rebuild.
type howFlags struct {
	InPlace bool `help:"Empty the tables and fill them again: readers see an incomplete read model meanwhile. By default, new tables are filled, and readers see them once they are complete."`
	Rate    int  `placeholder:"N" help:"The most events per second."`
}

// Validate is called by kong.
func (f howFlags) Validate() error {
	if f.Rate < 0 {
		return errors.New("--rate is negative: use 0 or more")
	}
	return nil
}

func (f howFlags) how() projector.RebuildHow {
	if f.InPlace {
		return projector.InPlace
	}
	return projector.BlueGreen
}

// printPlan prints what a rebuild would do.
func (f howFlags) printPlan(ctx context.Context, db serviceStore) error {
	plan, err := db.plan(ctx, f.how())
	if err != nil {
		return err
	}
	took := plan.Duration
	if f.Rate > 0 {
		took = max(took, time.Duration(plan.Events)*time.Second/time.Duration(f.Rate))
	}
	fmt.Printf("%d events", plan.Events)
	if took > 0 {
		fmt.Printf(", about %s", max(took.Round(time.Second), time.Second))
	}
	switch {
	case f.InPlace && len(plan.Reset) == 0:
		fmt.Println("; it first empties the read model")
	case f.InPlace:
		fmt.Printf("; it first empties %s\n", strings.Join(plan.Reset, ", "))
	default:
		fmt.Println("; readers see the new tables once they are complete")
	}
	if plan.Parked > 0 {
		fmt.Printf("%d parked messages are tried again\n", plan.Parked)
	}
	return nil
}

// rebuildPlanCmd shows what a rebuild would do.
type rebuildPlanCmd struct {
	operatorFlags `embed:""`
	howFlags      `embed:""`
}

// Run prints the plan.
func (c *rebuildPlanCmd) Run(ctx context.Context) error {
	return c.with(ctx, func(db serviceStore) error { return c.printPlan(ctx, db) })
}

// rebuildStartCmd rebuilds the read model.
type rebuildStartCmd struct {
	operatorFlags `embed:""`
	howFlags      `embed:""`
	decisionFlags `embed:""`
	Check         bool          `help:"Compare the new tables with the old ones first. If they differ, wait for 'promote' or 'cancel'."`
	Wait          time.Duration `default:"3s" help:"How long a running service may take to begin. Then this command does the work itself."`
}

// Validate is called by kong.
func (c *rebuildStartCmd) Validate() error {
	switch {
	case c.Reason == "":
		return errNoReason
	case c.InPlace && c.Check:
		return errors.New("--check compares new tables with the old ones, and --in-place makes none: use one of them")
	}
	return nil
}

// Run requests a rebuild and waits until readers see its result. It joins a rebuild that is going on.
func (c *rebuildStartCmd) Run(ctx context.Context) error {
	return c.with(ctx, func(db serviceStore) error {
		all, err := db.generations(ctx)
		if err != nil {
			return err
		}
		if g := underConstruction(all); g != nil {
			fmt.Printf("joining the rebuild of %s (%s)\n", g.By, g.Reason)
		} else if err := c.printPlan(ctx, db); err != nil {
			return err
		}
		n, err := projector.RequestRebuild(ctx, db.state(), db.name(), projector.Rebuild{
			How: c.how(), Decision: c.decision(), Rate: c.Rate, Check: c.Check,
		})
		if err != nil {
			return err
		}
		if err := follow(ctx, db, n, c.Wait); err != nil {
			return err
		}
		fmt.Printf("generation %d is live\n", n)
		return nil
	})
}

// underConstruction returns the generation that is being rebuilt, or nil.
func underConstruction(all []projector.Generation) *projector.Generation {
	i := slices.IndexFunc(all, func(g projector.Generation) bool {
		return g.State == "requested" || g.State == "building" || g.State == "live" && !g.CaughtUp
	})
	if i < 0 {
		return nil
	}
	return &all[i]
}

// rebuildListCmd lists the generations.
type rebuildListCmd struct {
	operatorFlags `embed:""`
}

// Run prints the list.
func (c *rebuildListCmd) Run(ctx context.Context) error {
	return c.with(ctx, func(db serviceStore) error {
		all, err := db.generations(ctx)
		if err != nil {
			return err
		}
		fmt.Print(columns(generationTable(all)))
		return nil
	})
}

func generationTable(all []projector.Generation) []string {
	table := []string{"generation\tstate\tversion\trebuilt\tevents\tof\tper second\tleft\tbehind\tsince (UTC)\tby\treason"}
	for _, g := range all {
		state := g.State
		switch {
		case g.Paused:
			state += ", paused"
		case g.Failed != "":
			state += ": " + g.Failed
		}
		progress := "\t\t\t"
		if !g.CaughtUp && g.Total > 0 {
			progress = fmt.Sprintf("%d\t%d\t%.0f\t%s", g.Applied, g.Total, g.PerSecond, g.Left)
		}
		table = append(table, fmt.Sprintf("%d\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s", g.Number, printable(state), versionsOf(g), g.How, progress, g.Behind,
			g.ChangedAt.Format(time.DateTime), printable(g.By), printable(g.Reason)))
	}
	return table
}

// versionsOf returns the versions of the programs that feed a generation.
func versionsOf(g projector.Generation) string {
	switch {
	case g.Newest == 0: // no runner has taken the request up
		return ""
	case g.Oldest < g.Newest:
		return fmt.Sprintf("%d-%d", g.Oldest, g.Newest)
	}
	return fmt.Sprint(g.Newest)
}

// controlFlags select a generation for a decision.
type controlFlags struct {
	operatorFlags `embed:""`
	decisionFlags `embed:""`
}

// Validate is called by kong.
func (c *controlFlags) Validate() error {
	if c.Reason == "" {
		return errNoReason
	}
	return nil
}

// control does an action to generation n. Zero means the one that is being rebuilt.
func (c *controlFlags) control(ctx context.Context, a projector.GenerationAction, n int) error {
	return c.with(ctx, func(db serviceStore) error {
		if n == 0 {
			all, err := db.generations(ctx)
			if err != nil {
				return err
			}
			g := underConstruction(all)
			if g == nil {
				return errors.New("no rebuild is going on: see 'reviews rebuild list'")
			}
			n = g.Number
		}
		if err := projector.Control(ctx, db.state(), db.name(), n, a, c.decision()); err != nil {
			return err
		}
		if a != projector.Promote {
			return nil
		}
		if err := follow(ctx, db, n, followPatience); err != nil {
			return err
		}
		fmt.Printf("generation %d is live\n", n)
		return nil
	})
}

type (
	rebuildPauseCmd struct {
		controlFlags `embed:""`
	}
	rebuildResumeCmd struct {
		controlFlags `embed:""`
	}
	rebuildCancelCmd struct {
		controlFlags `embed:""`
	}
	rebuildPromoteCmd struct {
		controlFlags `embed:""`
		Generation   int `arg:"" help:"The number of the generation."`
	}
	rebuildDropCmd struct {
		controlFlags `embed:""`
		Generation   int `arg:"" help:"The number of the generation."`
	}
)

// Run pauses the rebuild.
func (c *rebuildPauseCmd) Run(ctx context.Context) error { return c.control(ctx, projector.Pause, 0) }

// Run resumes the rebuild.
func (c *rebuildResumeCmd) Run(ctx context.Context) error { return c.control(ctx, projector.Resume, 0) }

// Run cancels the rebuild.
func (c *rebuildCancelCmd) Run(ctx context.Context) error { return c.control(ctx, projector.Cancel, 0) }

// Run promotes a generation, and waits until readers see it.
func (c *rebuildPromoteCmd) Run(ctx context.Context) error {
	return c.control(ctx, projector.Promote, c.Generation)
}

// Run drops a generation.
func (c *rebuildDropCmd) Run(ctx context.Context) error {
	return c.control(ctx, projector.Drop, c.Generation)
}
