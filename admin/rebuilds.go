package admin

import (
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// refusedShown is how long a rebuild that was refused is a finding, if no other one follows.
const refusedShown = 24 * time.Hour

// addRefused adds the rebuilds that were refused or could not begin, if no other one followed: they have no checkpoint.
func (f *Facts) addRefused(generations []projector.Generation) {
	generations = slices.DeleteFunc(slices.Clone(generations), func(g projector.Generation) bool { return !isRebuild(g.How.String()) }) // verifications
	for i, g := range generations {                                                                                                     // in order of projector and number
		last := i+1 == len(generations) || generations[i+1].Projector != g.Projector
		begun := g.Oldest > 0 // it was canceled, or replaced
		if last && g.State == "retired" && g.Failed != "" && !begun && f.At.Sub(g.ChangedAt) <= refusedShown {
			r := rebuildOf(g)
			r.Refused = g.ChangedAt
			is := func(p Projector) bool { return p.Name == g.Projector && p.Generation == g.Number }
			f.Projectors = append(slices.DeleteFunc(f.Projectors, is), Projector{Name: g.Projector, Generation: g.Number, State: g.State, Rebuild: r})
		}
	}
}

func isRebuild(how string) bool {
	return how == projector.InPlace.String() || how == projector.BlueGreen.String()
}

// standsStill reports whether a generation is being rebuilt, and no runner works on it. A store without operations does not know
// its runners.
func (f *Facts) standsStill(p Projector) bool {
	return p.Rebuild != nil && !p.Rebuild.Paused && p.Rebuild.Failed == "" && p.Runners == 0 && !slices.Contains(f.Missing, "operations") &&
		(p.State == "building" && isRebuild(p.Rebuild.How) || p.State == "live" && p.Rebuild.How == projector.InPlace.String())
}

// findRebuilds finds rebuilds that wait for a person, or for a runner, and promotions that have failed. first is an earlier look.
func (f *Facts) findRebuilds(first *Facts) (found []provider.Finding) {
	for _, p := range f.Projectors {
		r, name := p.Rebuild, quote(p.Name)
		inPlace := r != nil && r.How == projector.InPlace.String()
		if r == nil || p.State == "requested" || p.State != "standby" && !isRebuild(r.How) { // others are verifications
			continue
		}
		one := provider.Finding{
			Check: provider.FindingRebuild, Title: fmt.Sprintf("The rebuild of %s ", p.Name),
			Facts: facts("generation", fmt.Sprintf("%d (%s)", p.Generation, p.State), "how", r.How, "by", r.By, "reason", r.Reason,
				"applied", fmt.Sprintf("%d of %d events", r.Applied, r.Total), "runners", fmt.Sprint(p.Runners)),
		}
		again := "kinora projectors rebuild " + name + ` --reason "…"`
		cancel := "kinora projectors cancel " + name + ` --reason "…"`
		before := func(b Projector) bool {
			return b.Name == p.Name && b.Generation == p.Generation && first.standsStill(b) && b.Rebuild.Applied == r.Applied
		}
		promote := fmt.Sprintf(`kinora projectors promote %s %d --reason "…"`, name, p.Generation)
		switch {
		case p.State == "retired":
			one.Title += "was refused, or could not begin"
			one.Meaning = "Readers see the read model as it was. " + r.Failed + "."
			one.Remedy = []string{again}
		case r.Failed != "" && p.State == "standby":
			one.Title = fmt.Sprintf("The promotion of generation %d of %s has failed", p.Generation, p.Name)
			one.Meaning = "Readers see the read model as it was. " + r.Failed + "."
			one.Remedy = []string{promote, fmt.Sprintf(`kinora projectors drop %s %d --reason "…"`, name, p.Generation)}
		case p.State == "standby":
			continue
		case r.Failed != "":
			one.Title += "waits for a person"
			one.Meaning = "Readers see the read model as it was. " + r.Failed + "."
			one.Remedy = []string{promote, cancel}
		case r.Paused:
			one.Title += "is paused"
			one.Meaning = "A person has paused it."
			one.Remedy = []string{"kinora projectors resume " + name + ` --rebuild --reason "…"`}
		case f.standsStill(p) && slices.ContainsFunc(first.Projectors, before):
			one.Title += "stands still"
			one.Meaning = "No runner works on it."
			if p.Others > 0 {
				one.Meaning = fmt.Sprintf("It is for version %s of the program, and only runners of other versions run.", p.VersionRange())
			}
			one.Remedy = []string{"start a runner of " + p.Name + p.inVersion(), cancel}
			if p.State == "live" { // in place: the old rows are gone
				one.Meaning, one.Remedy = one.Meaning+" Readers see only what it has applied.", one.Remedy[:1]
			}
		default:
			continue
		}
		if r.Paused && inPlace {
			one.Meaning += " Readers see only what it has applied."
		}
		found = append(found, one)
	}
	return found
}
