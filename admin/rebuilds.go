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
	for i, g := range generations { // in order of projector and number
		last := i+1 == len(generations) || generations[i+1].Projector != g.Projector
		if last && g.State == "retired" && g.Failed != "" && (g.How == projector.InPlace || g.How == projector.BlueGreen) {
			r := rebuildOf(g)
			r.Refused = g.ChangedAt
			is := func(p Projector) bool { return p.Name == g.Projector && p.Generation == g.Number }
			f.Projectors = append(slices.DeleteFunc(f.Projectors, is), Projector{Name: g.Projector, Generation: g.Number, State: g.State, Rebuild: r})
		}
	}
}

// findRebuilds finds rebuilds that wait for a person, or for a runner. A store without operations does not know its runners.
func (f *Facts) findRebuilds(l provider.DiagnosisLimits) (found []provider.Finding) {
	for _, p := range f.Projectors {
		r, name := p.Rebuild, quote(p.Name)
		inPlace := r != nil && r.How == projector.InPlace.String()
		if r == nil || p.State == "requested" || !inPlace && r.How != projector.BlueGreen.String() { // others are verifications
			continue
		}
		one := provider.Finding{
			Check: provider.FindingRebuild, Title: fmt.Sprintf("The rebuild of %s ", p.Name),
			Facts: facts("generation", fmt.Sprintf("%d (%s)", p.Generation, p.State), "how", r.How, "by", r.By, "reason", r.Reason,
				"applied", fmt.Sprintf("%d of %d events", r.Applied, r.Total), "runners", fmt.Sprint(p.Runners)),
		}
		again := "kinora projectors rebuild " + name + ` --reason "…"`
		cancel := "kinora projectors cancel " + name + ` --reason "…"`
		isBuilt := p.State == "building" || p.State == "live" && inPlace
		switch nobody := isBuilt && p.Runners == 0 && !slices.Contains(f.Missing, "operations"); {
		case p.State == "retired" && f.At.Sub(r.Refused) > refusedShown:
			continue
		case p.State == "retired":
			one.Title += "was refused, or could not begin"
			one.Meaning = "Readers see the read model as it was. " + r.Failed + "."
			one.Remedy = []string{again}
		case r.Failed != "":
			one.Title += "waits for a person"
			one.Meaning = "Readers see the read model as it was. " + r.Failed + "."
			one.Remedy = []string{fmt.Sprintf(`kinora projectors promote %s %d --reason "…"`, name, p.Generation), cancel}
		case r.Paused:
			one.Title += "is paused"
			one.Meaning = "A person has paused it."
			one.Remedy = []string{"kinora projectors resume " + name + ` --rebuild --reason "…"`}
		case nobody && f.At.Sub(p.changed) > l.OpenTransaction:
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
