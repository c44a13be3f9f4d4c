package admin

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

// addWanted adds what the messages of requested dry runs need.
func (f *Facts) addWanted(ctx context.Context, store Projectors) error {
	f.wanted = map[int64]string{}
	for _, a := range f.Requests {
		if a.State != provider.ActRequested || a.Verb != provider.VerbDryRun {
			continue
		}
		needs, err := provider.DryRunNeeds(ctx, store, a, f.live(a.Name).Generation)
		if err != nil {
			return err
		}
		f.wanted[a.ID] = needs
	}
	return nil
}

// findRequests finds requests that no living service can answer, and rebuilds that none can take up.
func (f *Facts) findRequests() (found []provider.Finding) {
	for _, a := range f.Requests {
		if a.State != provider.ActRequested || a.Verb != provider.VerbDryRun && a.Verb != provider.VerbVerify {
			continue
		}
		p, lacks := f.answering(a)
		cancel := fmt.Sprintf(`kinora acts cancel %d --reason "…"`, a.ID)
		found = append(found, f.waits(p, lacks, fmt.Sprintf("Nobody can answer request %d: %s of %s", a.ID, a.Verb, a.Name), cancel, facts("by", a.By, "requested", f.ago(a.At)))...)
	}
	for _, g := range f.Projectors {
		if g.State != "requested" || g.Rebuild == nil {
			continue
		}
		p, title := f.live(g.Name), fmt.Sprintf("Nobody can take up the rebuild of %s", g.Name)
		cancel := "kinora projectors cancel " + quote(g.Name) + ` --reason "…"`
		found = append(found, f.waits(p, p.lackedForRebuild, title, cancel, facts("by", g.Rebuild.By, "requested", f.ago(g.changed)))...)
	}
	return found
}

// Unanswered returns why no living service can answer a request of Requests, or "".
func (f *Facts) Unanswered(request int64) string {
	for _, a := range f.Requests {
		if a.ID == request && a.State == provider.ActRequested && (a.Verb == provider.VerbDryRun || a.Verb == provider.VerbVerify) {
			why, _ := f.why(f.answering(a))
			return why
		}
	}
	return ""
}

// lacking returns what a runner that feeds the live generation lacks for a request; false: it does not matter, because the
// runner has another version.
type lacking func(*provider.Capability) (lacks []string, counts bool)

// answering returns the live generation that a request is about, and what runners lack for it.
func (f *Facts) answering(a provider.Act) (Projector, lacking) {
	p := f.live(a.Name)
	return p, func(c *provider.Capability) (lacks []string, counts bool) {
		switch {
		case !p.feeds(c):
			return nil, false
		case a.Verb == provider.VerbVerify:
			return p.lackedBy(c), true
		case f.wanted[a.ID] != "" && !c.Meets(f.wanted[a.ID]):
			return strings.Split(f.wanted[a.ID], "\n"), true
		}
		return nil, true
	}
}

// lackedBy returns what the generation has that a program does not have, as needs (provider.Parked.Needs): handlers, and schema
// versions of events whose types the program knows.
func (p *Projector) lackedBy(c *provider.Capability) (lacks []string) {
	for _, b := range p.handlers {
		has := func(name string) bool { return c.Meets(provider.NeedHandler(name, b.Type)) }
		if !has(b.Handler) && !slices.ContainsFunc(b.Was, has) {
			lacks = append(lacks, provider.NeedHandler(b.Handler, b.Type))
		}
	}
	for eventType, schemas := range p.seen {
		for _, schema := range schemas {
			if need := provider.NeedEvent(eventType, schema); c.Meets(provider.NeedEvent(eventType, 1)) && !c.Meets(need) {
				lacks = append(lacks, need)
			}
		}
	}
	return lacks
}

// lackedForRebuild is lackedBy for a program that may take up a requested rebuild: of the newest version that feeds the live
// generation, or of a newer one, which replaces the handlers.
func (p *Projector) lackedForRebuild(c *provider.Capability) (lacks []string, counts bool) {
	switch {
	case p.Versions != nil && c.Version < p.Versions[1]:
		return nil, false
	case p.feeds(c):
		return p.lackedBy(c), true
	case c.Version > p.Versions[1]:
		return nil, true
	}
	return nil, false
}

// waits returns a finding about a request unless a living runner can answer it.
func (f *Facts) waits(p Projector, lacks lacking, title, cancel string, who []provider.Fact) []provider.Finding {
	why, needs := f.why(p, lacks)
	if why == "" {
		return nil
	}
	start := "start a runner of " + p.Name + p.inVersion()
	if len(needs) > 0 {
		who, start = append(who, facts("needs", strings.Join(needs, ", "))...), start+" that has it"
	}
	return []provider.Finding{{Check: provider.FindingGone, Title: title, Meaning: why, Facts: who, Remedy: []string{start, cancel}}}
}

// why returns why no living runner can answer a request about p, and what they lack for it; "" if one can.
func (f *Facts) why(p Projector, lacks lacking) (why string, needs []string) {
	others := 0
	for c := range f.capable(p.Name) {
		l, counts := lacks(c)
		switch {
		case !counts:
			others++
		case len(l) == 0:
			return "", nil
		}
		needs = append(needs, l...)
	}
	slices.Sort(needs)
	switch {
	case len(needs) > 0:
		return "No living runner has what it needs.", slices.Compact(needs)
	case others > 0:
		return p.otherVersion(others), nil
	}
	return "No runner of " + p.Name + " runs.", nil
}

// otherVersion says that the only runners, n of them, are not those of the live version.
func (p *Projector) otherVersion(n int) string {
	only := "the only runner has another version"
	if n > 1 {
		only = fmt.Sprintf("the only %d runners have another version", n)
	}
	return "The live read model is that of version " + p.VersionRange() + ", and " + only + "."
}

// inVersion is VersionRange for a sentence.
func (p *Projector) inVersion() string {
	if p.Versions == nil {
		return ""
	}
	return " in version " + p.VersionRange()
}

// VersionRange returns the versions of the programs that feed the generation, such as "2" or "1 to 3"; empty if any does.
func (p *Projector) VersionRange() string {
	switch {
	case p.Versions == nil:
		return ""
	case p.Versions[0] == p.Versions[1]:
		return fmt.Sprint(p.Versions[0])
	}
	return fmt.Sprintf("%d to %d", p.Versions[0], p.Versions[1])
}
