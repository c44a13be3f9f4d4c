// Package plan decides what one program does for one projector, from what it sees. It does no I/O.
package plan

import (
	"fmt"
	"slices"

	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/provider"
)

// Program is what a program is, and may do.
type Program struct {
	Version  int
	OnChange generation.How // Options.RebuildOnChange
	Reads    bool           // it reads a log, so its projector can be rebuilt
	Creates  bool           // it has OnCreate
	Tool     bool           // it applies parked messages, and ends
}

// Seen is what a program sees of a projector.
type Seen struct {
	Rows []*generation.Row
	// Looked: the program has looked whether it must create the first generation.
	Looked bool
}

// Do is a change that a program makes first. Then it looks again.
type Do int

// The changes.
const (
	Nothing     Do = iota
	CreateFirst    // the first generation, and its tables
	TakeUp         // a request, or a rebuild for the version of the program
	Widen          // the live generation, to take the version of the program
	GiveUp         // a rebuild that the version of the program replaces
)

// Plan is what a program does.
type Plan struct {
	Main *generation.Row // that it applies deliveries to; nil: none
	Do   Do
	Row  *generation.Row // that Do changes
	Why  string          // why it feeds no generation, for the log
}

// Of returns what a program does.
func Of(me Program, s Seen) Plan {
	live := generation.Live(s.Rows)
	find := func(fits func(*generation.Row) bool) *generation.Row { return generation.Find(s.Rows, fits) }
	if !me.Reads {
		return Plan{Main: live}
	}
	if live.IsNew() && (me.Version > 1 || me.Creates) && !s.Looked {
		return Plan{Do: CreateFirst, Row: live}
	}
	requested := find(func(g *generation.Row) bool { return g.State == provider.GenerationRequested })
	if requested != nil && me.Version >= live.Newest {
		return Plan{Do: TakeUp, Row: requested}
	}
	if live.Takes(me.Version) {
		return Plan{Main: live}
	}
	fits := func(g *generation.Row) bool { return g.Takes(me.Version) && g.How != generation.Scratch }
	if g := find(func(g *generation.Row) bool { return fits(g) && g.State != provider.GenerationRetired }); g != nil {
		return Plan{Main: g}
	}
	switch build := find((*generation.Row).IsBuild); {
	case me.Version < live.Oldest:
		return Plan{Why: "this program applies nothing: the live read model is that of a newer version"}
	case me.OnChange == generation.NoRebuild:
		return Plan{Do: Widen, Row: live}
	case find(fits) != nil: // an operator has canceled or dropped it
		return Plan{Why: "the read model of this version was canceled or dropped: request a rebuild, or deploy a newer version"}
	case build == nil:
		o := generation.Order{How: me.OnChange, By: "kinora", Reason: fmt.Sprintf("version %d of the program", me.Version)}
		return Plan{Do: TakeUp, Row: generation.Next(s.Rows, o)}
	case build.How == generation.Scratch || build.Newest >= me.Version:
		return Plan{} // its rebuild comes after that
	default:
		return Plan{Do: GiveUp, Row: build}
	}
}

// Others returns the generations that a program feeds in addition to main.
func Others(me Program, all []*generation.Row, main provider.Build) (others []*generation.Row) {
	for _, g := range all {
		if me.Reads && g.IsFed() && g.Takes(me.Version) && g.Build != main {
			others = append(others, g)
		}
	}
	return others
}

// ForTool returns the generation whose parked messages are applied without a running service, or nil if none is that
// of the program. marked: the projector writes markers.
func ForTool(me Program, all []*generation.Row, marked bool) *generation.Row {
	live := generation.Live(all)
	if live.Takes(me.Version) || me.OnChange == generation.NoRebuild || !marked {
		return live
	}
	return generation.Find(all, func(g *generation.Row) bool {
		return g.Takes(me.Version) && g.State == provider.GenerationStandby
	})
}

// Sharing is what a runner sees of the segments of a projector.
type Sharing struct {
	Runner  string
	Runners []string // ids of those that share the segments
	Held    map[int]bool
	Mine    []int // segments that this runner reads
	Split   provider.Split
}

// Share is what it makes of that.
type Share struct {
	Quota int   // how many segments it should have
	Keep  []int // of Mine
	Ask   []int // to be asked for, in this order, until it has Quota
}

// ShareOf divides the segments. In the order of the runners' ids, the first ones have one segment more if
// the number does not divide evenly. So all runners agree on how many each has, and none takes more.
func ShareOf(s Sharing) Share {
	ids := slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(s.Runners), s.Runner))))
	rank, runners, count := slices.Index(ids, s.Runner), len(ids), s.Split.Count
	share := Share{Quota: count / runners}
	if rank < count%runners {
		share.Quota++
	}
	for _, number := range slices.Sorted(slices.Values(s.Mine)) {
		if s.Split.Has(number) && len(share.Keep) < share.Quota {
			share.Keep = append(share.Keep, number)
		}
	}
	if len(share.Keep) == share.Quota {
		return share
	}
	for i := range count { // runners begin at different segments, so that they do not ask for the same ones
		number := s.Split.First + (i+rank*count/runners)%count
		if !s.Held[number] && !slices.Contains(s.Mine, number) {
			share.Ask = append(share.Ask, number)
		}
	}
	return share
}
