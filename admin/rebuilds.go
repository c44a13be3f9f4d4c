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
		if p.Rebuild == nil || p.State == "requested" || p.State != "standby" && !isRebuild(p.Rebuild.How) { // others are verifications
			continue
		}
		before := func(b Projector) bool {
			return b.Name == p.Name && b.Generation == p.Generation && first.standsStill(b) && b.Rebuild.Applied == p.Rebuild.Applied
		}
		if one := p.findRebuild(f.standsStill(p) && slices.ContainsFunc(first.Projectors, before)); one.Title != "" {
			one.Check, one.Facts = provider.FindingRebuild, facts("generation", fmt.Sprintf("%d (%s)", p.Generation, p.State), "how", p.Rebuild.How, "by", p.Rebuild.By,
				"reason", p.Rebuild.Reason, "applied", fmt.Sprintf("%d of %d events", p.Rebuild.Applied, p.Rebuild.Total), "runners", fmt.Sprint(p.Runners))
			found = append(found, one)
		}
	}
	return found
}

// findRebuild returns what is wrong with the rebuild of a generation. The finding is empty if nothing is.
func (p *Projector) findRebuild(standsStill bool) (one provider.Finding) {
	r, name := p.Rebuild, quote(p.Name)
	cancel := "kinora projectors cancel " + name + ` --reason "…"`
	promote := fmt.Sprintf(`kinora projectors promote %s %d --reason "…"`, name, p.Generation)
	asItWas := "Readers see the read model as it was. " + r.Failed + "."
	seen := "" // in place, the old rows are gone
	if r.How == projector.InPlace.String() {
		seen = " Readers see only what it has applied."
	}
	finding := func(title, meaning string, remedy ...string) provider.Finding {
		return provider.Finding{Title: title, Meaning: meaning, Remedy: remedy}
	}
	rebuild := "The rebuild of " + p.Name
	switch {
	case p.State == "retired":
		return finding(rebuild+" was refused, or could not begin", asItWas, "kinora projectors rebuild "+name+` --reason "…"`)
	case r.Failed != "" && p.State == "standby":
		return finding(fmt.Sprintf("The promotion of generation %d of %s has failed", p.Generation, p.Name), asItWas,
			promote, fmt.Sprintf(`kinora projectors drop %s %d --reason "…"`, name, p.Generation))
	case p.State == "standby":
	case r.Failed != "":
		return finding(rebuild+" waits for a person", asItWas, promote, cancel)
	case r.Paused:
		return finding(rebuild+" is paused", "A person has paused it."+seen, "kinora projectors resume "+name+` --rebuild --reason "…"`)
	case standsStill:
		one = finding(rebuild+" stands still", "No runner works on it."+seen, "start a runner of "+p.Name+p.inVersion())
		if p.Others > 0 {
			one.Meaning = fmt.Sprintf("It is for version %s of the program, and only runners of other versions run.", p.VersionRange()) + seen
		}
		if seen == "" {
			one.Remedy = append(one.Remedy, cancel)
		}
	}
	return one
}
