package admin

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

// Programs are the living programs that apply messages or run tasks, and their abilities.
type Programs struct {
	Columns []string // projectors, and then "tasks of DOMAIN", each sorted
	Rows    []Program
	// Differ: the abilities of two programs differ for a column.
	Differ bool
}

// Program is a living program.
type Program struct {
	Process, Version string
	Can              []*Ability // for each of Columns; nil: it has nothing of the column
}

// Ability is what a program can do for a projector, or for the tasks of a domain.
type Ability struct {
	Version int      // projector.Options.Version; 0: of tasks
	Lacks   []string // what another living program has (provider.Parked.Needs, or a kind of tasks), sorted
}

// Programs returns the living programs, in order of process.
func (f *Facts) Programs() (all Programs) {
	seen := map[string]*has{} // by column
	byProcess := map[string]map[string]*has{}
	for _, s := range f.Services {
		if s.Kind == "relay" || !s.ExpiresAt.After(f.At) {
			continue
		}
		if byProcess[s.Process] == nil {
			byProcess[s.Process] = map[string]*has{}
			all.Rows = append(all.Rows, Program{Process: s.Process})
		}
		row := &all.Rows[slices.IndexFunc(all.Rows, func(p Program) bool { return p.Process == s.Process })]
		row.Version = cmp.Or(row.Version, s.Version)
		for _, c := range s.Can {
			add(byProcess[s.Process], seen, c.Projector, c)
		}
		for _, kind := range s.Kinds {
			domain, _, _ := strings.Cut(kind, "/")
			add(byProcess[s.Process], seen, tasksOf+domain, provider.Capability{Has: []string{kind}})
		}
	}
	all.Columns = slices.SortedFunc(maps.Keys(seen), func(a, b string) int {
		rank := func(column string) int { return len(column) - len(strings.TrimPrefix(column, tasksOf)) }
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a, b))
	})
	slices.SortFunc(all.Rows, func(a, b Program) int { return cmp.Compare(a.Process, b.Process) })
	first := map[string]*Ability{}
	for i, p := range all.Rows {
		for _, column := range all.Columns {
			a := byProcess[p.Process][column].ability(seen[column])
			if was := first[column]; was == nil {
				first[column] = a
			} else if a != nil && (a.Version != was.Version || !slices.Equal(a.Lacks, was.Lacks)) {
				all.Differ = true
			}
			all.Rows[i].Can = append(all.Rows[i].Can, a)
		}
	}
	return all
}

const tasksOf = "tasks of "

// has is what one program, or all of them, can do for a column.
type has struct{ provider.Capability }

// add adds what a service of one program can.
func add(one, all map[string]*has, column string, c provider.Capability) {
	for _, of := range []map[string]*has{one, all} {
		if of[column] == nil {
			of[column] = &has{provider.Capability{Version: c.Version}}
		}
		list := append(of[column].Has, c.Has...)
		slices.Sort(list)
		of[column].Has = slices.Compact(list)
	}
}

// ability returns nil for nil. all is what one of the living programs has.
func (h *has) ability(all *has) *Ability {
	if h == nil {
		return nil
	}
	a := &Ability{Version: h.Version}
	for _, one := range all.Has {
		if !h.Meets(one) {
			a.Lacks = append(a.Lacks, one)
		}
	}
	return a
}

const listedLacks = 5 // the most in the text of an ability

// String returns text for people, such as "version 2, lacks event rated 3" or "all kinds"; "-" for nil.
func (a *Ability) String() string {
	if a == nil {
		return "-"
	}
	var text []string
	if a.Version > 0 {
		text = append(text, fmt.Sprintf("version %d", a.Version))
	}
	lacks := a.Lacks
	if n := len(lacks); n > listedLacks {
		lacks = append(slices.Clip(lacks[:listedLacks]), fmt.Sprintf("and %d more", n-listedLacks))
	}
	if len(lacks) > 0 {
		text = append(text, "lacks "+strings.Join(lacks, ", "))
	} else if a.Version == 0 {
		text = append(text, "all kinds")
	}
	return strings.Join(text, ", ")
}
