package projector

import (
	"context"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/projector/internal/follow"
	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/provider"
)

// Generation is a generation of a projector's read model: one that is live, was live, or is being
// built.
type Generation struct {
	Projector string
	Number    int
	// State is "requested", "building", "live", "standby" (it was live, and is kept up to date for
	// Promote), "retired" (its tables are being dropped) or "forgotten" (it was live when the projector was forgotten).
	State    string
	How      RebuildHow // how it was built; NoRebuild for the first
	Decision            // who requested it, and why
	// Programs with an Options.Version from Oldest to Newest feed it. Both are zero until a runner has
	// taken the request up.
	Oldest, Newest int
	Position       int64 // its checkpoint
	Paused         bool
	CaughtUp       bool   // it has reached the end of the log, or the live generation
	Failed         string // why it was given up, or waits for Promote or Cancel
	// Applied is the number of events that the rebuild has applied. Total is the number of all events:
	// first those that existed when the rebuild began, and then those that existed when it had applied
	// these.
	Applied, Total int64
	PerSecond      float64          // events per second
	Left           time.Duration    // the estimated time until it has caught up; zero if it is not known
	Behind         int64            // the number of events that the live generation has applied and it has not
	Seen           map[string][]int // the schema versions of the events of each type that it has applied
	ChangedAt      time.Time        // when State changed last, on the store's clock
}

// Generations returns the generations of p, the oldest first. Retired ones whose rows and tables are
// deleted are left out, unless they have Failed and are newer than the live one. The events behind are
// counted, which takes about a second per million.
func (p *Projector[Tx]) Generations(ctx context.Context, s State) (shown []Generation, err error) {
	defer check.Wrap(&err, "generations of %s", p.name)
	all, err := generation.All(ctx, s, p.name)
	if err != nil {
		return nil, err
	}
	at, err := s.Checkpoint(ctx, generation.Live(all).Build)
	if err != nil {
		return nil, err
	}
	for _, g := range all {
		if g.Cleared && (g.Failed == "" || g.Generation < at.Generation) {
			continue
		}
		one := shownOf(g)
		c, err := s.Checkpoint(ctx, g.Build)
		if err != nil {
			return nil, err
		}
		one.Position = c.Place.Position
		if behind := at.Place.Position - c.Place.Position; behind > 0 && (g.IsBuild() || g.State == provider.GenerationStandby) {
			if one.Behind, err = follow.Count(ctx, s, p.Takes(), c.Place.Position, at.Place.Position); err != nil {
				return nil, err
			}
		}
		if rest := max(g.Total-g.Applied, one.Behind); !g.Done && g.PerSecond > 0 && rest > 0 {
			one.Left = time.Duration(float64(rest) / g.PerSecond * float64(time.Second)).Round(time.Second)
		}
		shown = append(shown, one)
	}
	return shown, nil
}

// ReadGenerations returns stored generations, for tools that do not have the projectors. Position, Behind
// and Left are zero. A row that another program wrote shows less.
func ReadGenerations(rows []provider.Generation) (all []Generation) {
	for _, row := range rows {
		g, _ := generation.Read(row)
		all = append(all, shownOf(g))
	}
	return all
}

// shownOf returns a generation as it is shown to people.
func shownOf(g *generation.Row) Generation {
	state := string(g.State)
	if g.Forgotten {
		state = "forgotten"
	}
	return Generation{
		Projector: g.Projector, Number: g.Generation, State: state, How: RebuildHow(g.How), Decision: Decision{By: g.By, Reason: g.Reason},
		Oldest: g.Oldest, Newest: g.Newest, Paused: g.Paused, CaughtUp: g.Done, Failed: g.Failed,
		Applied: g.Applied, Total: g.Total, PerSecond: g.PerSecond, Seen: g.Seen, ChangedAt: g.Changed,
	}
}

// GenerationAction is what Control does to a generation.
type GenerationAction int

const (
	// Pause stops a rebuild until Resume. If the read model is rebuilt in place, readers see it
	// incomplete meanwhile.
	Pause GenerationAction = iota + 1
	Resume
	// Cancel ends a blue/green rebuild or a request, and drops the new tables. A rebuild in place
	// that has begun cannot be canceled: the old rows are gone.
	Cancel
	// Promote makes a generation live that stands by (a rollback), or that waits because of
	// Rebuild.Check. A runner of its Version must run: it does that within about a second. If none has
	// run for some time, the generation catches up first: see Generation.Behind. If messages of the
	// generation are parked and tried again, the switch waits for them for at most 30 s.
	Promote
	// Drop retires a generation that stands by, and drops its tables.
	Drop
)

// String returns "pause", "resume", "cancel", "promote" or "drop".
func (a GenerationAction) String() string {
	if names := [...]string{"", "pause", "resume", "cancel", "promote", "drop"}; a > 0 && int(a) < len(names) {
		return names[a]
	}
	return fmt.Sprintf("GenerationAction(%d)", int(a))
}

// Control applies an action to a generation of a projector. d says who has decided this, and why;
// it is stored with the generation.
//   - ErrGeneration: the state of the generation does not allow the action, or it does not exist.
//   - ErrInput: a is not one of the constants, or d is not complete.
func Control(ctx context.Context, b provider.Builds, projector string, number int, a GenerationAction, d Decision) (err error) {
	defer check.Wrap(&err, "%s generation %d of %s", a, number, projector)
	if err := d.Validate(); err != nil {
		return err
	}
	if a < Pause || a > Drop {
		return fmt.Errorf("%w: use the constants of GenerationAction", ErrInput)
	}
	for {
		all, err := generation.All(ctx, b, projector)
		if err != nil {
			return err
		}
		g := generation.Find(all, func(g *generation.Row) bool { return g.Generation == number })
		if g == nil {
			return fmt.Errorf("%w: it does not exist", ErrGeneration)
		}
		to := *g
		if to.By, to.Reason = d.By, d.Reason; !act(&to, a) {
			return fmt.Errorf("%w: it is %s", ErrGeneration, g.State)
		}
		if set, err := b.SetGeneration(ctx, to.Stored()); set || err != nil {
			return err
		}
	}
}

// act applies an action to g. It returns false if the state does not allow the action.
func act(g *generation.Row, a GenerationAction) (can bool) {
	build := g.IsBuild() && g.How != generation.Scratch
	standby := g.State == provider.GenerationStandby
	switch a {
	case Pause, Resume:
		can, g.Paused = build || g.IsReplaying() && g.IsLive(), a == Pause
	case Cancel:
		can, g.State = build, provider.GenerationRetired
	case Promote:
		can = standby || build && g.How == generation.BlueGreen && g.Failed != ""
		g.Promoted, g.Failed = true, "" // it no longer waits
	case Drop:
		can, g.State = standby, provider.GenerationRetired
	}
	return can
}
