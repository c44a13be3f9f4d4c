package admin

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

// Programs are the living programs that apply messages, and what they can.
type Programs struct {
	Projectors []string
	Rows       []Program
	// Differ: for a projector, one program can what another one cannot.
	Differ bool
}

// Program is a living program.
type Program struct {
	Process, Version string
	// Can has, for each of Projectors, its version and what this program lacks that another living one has; "-" if it does not
	// have the projector.
	Can []string
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
	first := map[string]string{}
	for _, s := range alive {
		one := Program{Process: s.Process, Version: s.Version}
		for _, name := range all.Projectors {
			text := "-"
			if c := s.Capability(name); c != nil {
				text = can(c, has[name])
				all.Differ = all.Differ || first[name] != "" && first[name] != text
				first[name] = text
			}
			one.Can = append(one.Can, text)
		}
		all.Rows = append(all.Rows, one)
	}
	return all
}

const listedLacks = 5

// can says what a program can do for a projector. has is what one of the living programs has, sorted.
func can(c *provider.Capability, has []string) string {
	var lacks []string
	for _, one := range has {
		if !c.Meets(one) {
			lacks = append(lacks, one)
		}
	}
	text := fmt.Sprintf("version %d", c.Version)
	if n := len(lacks); n > listedLacks {
		lacks = append(lacks[:listedLacks], fmt.Sprintf("and %d more", n-listedLacks))
	}
	if len(lacks) > 0 {
		text += ", lacks " + strings.Join(lacks, ", ")
	}
	return text
}
