package provider

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Need is what messages of a generation wait for.
type Need struct {
	Build
	Needs string    `json:"needs"` // Parked.Needs
	Since time.Time `json:"since"` // when the first of the messages was parked
}

// Limits of needs.
const (
	MaxNeeds     = 1000 // of a build that Parking.Needs lists
	MaxNeedBytes = 1000 // of Parked.Needs: a message that needs more is stuck
)

// AnyType is the type in the NeedHandler of a program in which a handler was removed: it takes no event any more.
const AnyType = "*"

// NeedDecoder is the need of a message of other software: a decoder (projector.RunnerConfig.Decode).
const NeedDecoder = "decoder"

// NeedEvent returns the need of an event: a schema version of its type.
func NeedEvent(eventType string, schema int) string {
	return fmt.Sprintf("event %s %d", eventType, schema)
}

// NeedHandler returns the need of a message that was parked for a handler of its type.
func NeedHandler(handler, eventType string) string {
	return fmt.Sprintf("handler %s of %s", handler, eventType)
}

// Meets reports whether the runner has all that a message needs (Parked.Needs).
func (c *Capability) Meets(needs string) bool {
	for one := range strings.SplitSeq(needs, "\n") {
		_, has := slices.BinarySearch(c.Has, one)
		if handler, _, of := strings.Cut(one, " of "); !has && of && strings.HasPrefix(one, "handler ") {
			_, has = slices.BinarySearch(c.Has, handler+" of "+AnyType)
		}
		if !has {
			return false
		}
	}
	return true
}

// DryRunNeeds returns what a program must have to answer a request for a dry run (Parked.Needs): what the messages of a
// generation need that it selects. It is "" if none needs anything, or the request is not valid: every program can answer that.
func DryRunNeeds(ctx context.Context, store Parking, a Act, generation int) (string, error) {
	var q DryRunRequest
	if len(a.Detail) > 0 && json.Unmarshal(a.Detail, &q) != nil {
		return "", nil
	}
	q.Filter.Projector, q.Filter.Generation = a.Name, generation
	rows, err := store.Parked(ctx, q.Filter)
	if errors.Is(err, ErrInput) {
		return "", nil
	}
	var needs []string
	for _, p := range rows {
		if p.Needs != "" {
			needs = append(needs, strings.Split(p.Needs, "\n")...)
		}
	}
	return strings.Join(slices.Compact(slices.Sorted(slices.Values(needs))), "\n"), err
}

// NeedsOf is the rule of Parking.Needs for a build, given the first messages of all lanes.
func NeedsOf(after Need, firsts []Parked) (all []Need) {
	since := map[string]time.Time{}
	for _, p := range firsts {
		if at, ok := since[p.Needs]; p.IsUnable() && p.Needs > after.Needs && (!ok || p.At.Before(at)) {
			since[p.Needs] = p.At
		}
	}
	for _, needs := range slices.Sorted(maps.Keys(since)) {
		all = append(all, Need{Build: after.Build, Needs: needs, Since: since[needs]})
	}
	return all[:min(len(all), MaxNeeds)]
}

// CheckNeeds returns an error if after of Parking.Needs has a projector that no store can store.
func CheckNeeds(after []Need) error {
	var f DueFilter
	for _, a := range after {
		f.Builds = append(f.Builds, a.Build)
	}
	return CheckDueFilter(f)
}
