package admin

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

// Programs are the living programs that apply messages, and their abilities.
type Programs struct {
	Projectors []string
	Rows       []Program
	// Differ: the abilities of two programs differ for a projector.
	Differ bool
}

// Program is a living program.
type Program struct {
	Process, Version string
	Can              []*Ability // for each of Projectors; nil: it does not have the projector
}

// Ability is what a program can do for a projector.
type Ability struct {
	Version int      // projector.Options.Version
	Lacks   []string // what another living program has (provider.Parked.Needs), sorted
}

// Programs returns the living programs, in order of process.
func (f *Facts) Programs() (all Programs) {
	has := map[string][]string{} // by projector: what one of the programs has
	var alive []provider.ServiceReport
	for _, s := range f.Services {
		if len(s.Can) == 0 || !s.ExpiresAt.After(f.At) {
			continue
		}
		alive = append(alive, s)
		for _, c := range s.Can {
			has[c.Projector] = append(has[c.Projector], c.Has...)
			all.Projectors = append(all.Projectors, c.Projector)
		}
	}
	slices.Sort(all.Projectors)
	all.Projectors = slices.Compact(all.Projectors)
	for name, list := range has {
		slices.Sort(list)
		has[name] = slices.Compact(list)
	}
	slices.SortStableFunc(alive, func(a, b provider.ServiceReport) int { return cmp.Compare(a.Process, b.Process) })
	first := map[string]*Ability{}
	for _, s := range alive {
		one := Program{Process: s.Process, Version: s.Version}
		for _, name := range all.Projectors {
			a := abilityOf(s.Capability(name), has[name])
			if was := first[name]; was == nil {
				first[name] = a
			} else if a != nil && (a.Version != was.Version || !slices.Equal(a.Lacks, was.Lacks)) {
				all.Differ = true
			}
			one.Can = append(one.Can, a)
		}
		all.Rows = append(all.Rows, one)
	}
	return all
}

// abilityOf returns nil for nil. has is what one of the living programs has, sorted.
func abilityOf(c *provider.Capability, has []string) *Ability {
	if c == nil {
		return nil
	}
	a := &Ability{Version: c.Version}
	for _, one := range has {
		if !c.Meets(one) {
			a.Lacks = append(a.Lacks, one)
		}
	}
	return a
}

const listedLacks = 5 // the most in the text of an ability

// String returns text for people, such as "version 2, lacks event rated 3"; "-" for nil.
func (a *Ability) String() string {
	if a == nil {
		return "-"
	}
	text, lacks := fmt.Sprintf("version %d", a.Version), a.Lacks
	if n := len(lacks); n > listedLacks {
		lacks = append(slices.Clip(lacks[:listedLacks]), fmt.Sprintf("and %d more", n-listedLacks))
	}
	if len(lacks) > 0 {
		text += ", lacks " + strings.Join(lacks, ", ")
	}
	return text
}
