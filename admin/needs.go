package admin

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kinora-go/kinora/provider"
)

// Need is what messages of a generation need, and which living services have it.
type Need struct {
	provider.Need
	Able []string `json:"able,omitempty"` // their processes
}

// NeedsText returns what a message needs (provider.Parked.Needs), for people.
func NeedsText(needs string) string { return strings.ReplaceAll(needs, "\n", ", ") }

// addNeeds adds what parked messages need.
func (f *Facts) addNeeds(ctx context.Context, store Projectors) error {
	var after []provider.Need
	of := map[provider.Build]*Projector{}
	for i, p := range f.Projectors {
		if p.Parked.N > 0 {
			b := provider.Build{Projector: p.Name, Generation: p.Generation}
			after, of[b] = append(after, provider.Need{Build: b}), &f.Projectors[i]
		}
	}
	if len(after) == 0 {
		return nil
	}
	all, err := store.Needs(ctx, after)
	if err != nil {
		return err
	}
	for _, n := range all {
		one := Need{Need: n}
		for c, process := range f.capable(n.Projector) {
			if p := of[n.Build]; p != nil && p.feeds(c) && c.Meets(n.Needs) {
				one.Able = append(one.Able, process)
			}
		}
		f.Needs = append(f.Needs, one)
	}
	return nil
}

const listedNeeds = 10 // the most needs of a finding

// findNeeds finds what messages wait for that no living service has. A generation for a rollback counts only while
// programs feed it. A store without operations does not know its services.
func (f *Facts) findNeeds() (found []provider.Finding) {
	meaning := "They, and the later messages of their keys, wait without attempts until one starts that has it."
	if !slices.Contains(f.Missing, "operations") {
		meaning = "No living service has it. " + meaning
	}
	for _, p := range f.Projectors {
		if p.State == "retired" || p.State != "live" && p.Runners == 0 {
			continue
		}
		one := p.findingOf("wait for a program that meets their needs", meaning)
		n := 0
		for _, need := range f.Needs {
			if need.Projector != p.Name || need.Number() != p.Generation || len(need.Able) > 0 {
				continue
			}
			if n++; n <= listedNeeds {
				one.Facts = append(one.Facts, facts("needs", NeedsText(need.Needs)+", for "+f.ago(need.Since))...)
			}
		}
		if n == 0 {
			continue
		}
		if n > listedNeeds {
			one.Facts = append(one.Facts, facts("needs", fmt.Sprintf("and %d more", n-listedNeeds))...)
		}
		one.Remedy = []string{"start a runner of " + p.Name + p.inVersion() + " that has it", fmt.Sprintf("kinora parked ls --projector %s --generation %d --class unable", p.Name, p.Generation)}
		found = append(found, one)
	}
	return found
}
