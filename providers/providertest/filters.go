package providertest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

const filterRule = "Text in a filter that no database can store is an *InvalidError, before any SQL. Nothing is changed"

var (
	entryFilterCases  = []testCase{{name: "text that cannot be stored", rule: filterRule, play: badEntryFilters}}
	parkedFilterCases = []testCase{{name: "text that cannot be stored", rule: filterRule, play: badParkedFilters}}
	recordFilterCases = []testCase{{name: "text that cannot be stored", rule: filterRule, play: badRecordFilters}}
)

// unstorable are texts that no database can store, or that are too long for a name.
var unstorable = map[string]string{
	"not UTF-8": "a" + replacement, "with a NUL": "a\x00b", "a NUL": "\x00", "long": strings.Repeat("x", 256),
}

// filterCall is a call with a filter.
type filterCall struct {
	name string
	call func(ctx context.Context, text string) error
}

// refusesText makes each call with each of the texts, in a context that has ended, so that a call
// that reaches its SQL returns another error. With valid text the call succeeds.
func (s *stage) refusesText(calls []filterCall) {
	s.Helper()
	ended, end := context.WithCancel(s.ctx)
	end()
	for _, c := range calls {
		for what, text := range unstorable {
			s.invalid(c.call(ended, text), fmt.Sprintf("%s %s", c.name, what))
		}
		s.ok(c.call(s.ctx, "O'Hara \t日本"), c.name)
		s.ok(c.call(s.ctx, strings.Repeat("x", 255)), c.name)
	}
}

func badEntryFilters(s *stage) {
	for _, each := range []func(text string) provider.EntryFilter{
		func(text string) provider.EntryFilter { return provider.EntryFilter{Topic: text} },
		func(text string) provider.EntryFilter { return provider.EntryFilter{Key: text} },
		func(text string) provider.EntryFilter { return provider.EntryFilter{Stream: text} },
		func(text string) provider.EntryFilter {
			return provider.EntryFilter{Status: []outbox.Status{outbox.Failed, outbox.Status(text)}}
		},
	} {
		field := fmt.Sprintf("%+v", each("x"))
		s.refusesText([]filterCall{
			{"Entries of " + field, func(ctx context.Context, text string) error { _, err := s.db.Entries(ctx, each(text)); return err }},
			{"Requeue of " + field, func(ctx context.Context, text string) error { _, err := s.db.Requeue(ctx, each(text)); return err }},
			{"Skip of " + field, func(ctx context.Context, text string) error { _, err := s.db.Skip(ctx, each(text)); return err }},
		})
	}
	for call, err := range map[string]error{
		"Entries": failure(s.db.Entries(s.ctx, provider.EntryFilter{Limit: -1})),
		"Requeue": failure(s.db.Requeue(s.ctx, provider.EntryFilter{Limit: -1})),
		"Skip":    failure(s.db.Skip(s.ctx, provider.EntryFilter{Limit: -1})),
	} {
		s.invalid(err, call+" with a negative limit")
	}
	claims := func(q provider.EntryQuery) error {
		_, err := provider.ClaimEntries(s.ctx, s.db, q, claim.Terms{Token: claim.NewToken(), Holder: "a", Lease: time.Second, Limit: 1})
		return err
	}
	s.refusesText([]filterCall{
		{"StatusCounts", func(ctx context.Context, text string) error {
			_, err := s.db.StatusCounts(ctx, outbox.Pending, outbox.Status(text))
			return err
		}},
		{"claims of topics", func(_ context.Context, text string) error { return claims(provider.EntryQuery{Topics: []string{text}}) }},
		{"claims except topics", func(_ context.Context, text string) error { return claims(provider.EntryQuery{Except: []string{text}}) }},
	})
}

func badParkedFilters(s *stage) {
	s.park(-1, s.failed("m-1", "ann"))
	before := s.dump()
	for _, each := range []func(text string) provider.ParkedFilter{
		func(text string) provider.ParkedFilter { return provider.ParkedFilter{Projector: text} },
		func(text string) provider.ParkedFilter {
			return provider.ParkedFilter{Projector: s.name, Handler: text}
		},
	} {
		field := fmt.Sprintf("%+v", each("x"))
		s.refusesText([]filterCall{
			{"Parked of " + field, func(ctx context.Context, text string) error { _, err := s.db.Parked(ctx, each(text)); return err }},
			{"Decide of " + field, func(ctx context.Context, text string) error {
				_, err := s.db.Decide(ctx, each(text), provider.StateWaiting, ann)
				return err
			}},
		})
	}
	s.refusesText([]filterCall{
		{"ParkedCount", func(ctx context.Context, text string) error {
			if c, ok := s.store.(parkedCounter); ok {
				return failure(c.ParkedCount(ctx, text))
			}
			return failure(s.db.Parked(ctx, provider.ParkedFilter{Projector: text}))
		}},
		{"Due", func(ctx context.Context, text string) error {
			_, err := s.db.Due(ctx, provider.DueFilter{Builds: []provider.Build{s.build(), {Projector: text}}, Keys: 1, Each: 1})
			return err
		}},
	})
	for _, text := range []string{"a" + replacement, "a\x00b"} {
		for _, d := range []provider.Decision{{By: text, Reason: "why"}, {By: "ann", Reason: text}} {
			_, err := s.db.Decide(s.ctx, provider.ParkedFilter{Projector: s.name}, provider.StateSkipped, d)
			s.invalid(err, fmt.Sprintf("decision %q", d))
			s.require(errors.Is(err, provider.ErrInput), "the error %v is ErrInput", err)
		}
	}
	s.unchanged(before, "bad filters")
}

func badRecordFilters(s *stage) {
	s.refusesText([]filterCall{
		{"Outcomes at a handler", func(ctx context.Context, text string) error {
			_, err := s.db.Outcomes(ctx, []provider.Question{{Handler: text, MessageID: "m"}})
			return err
		}},
		{"Outcomes at an earlier name", func(ctx context.Context, text string) error {
			_, err := s.db.Outcomes(ctx, []provider.Question{{Handler: s.name + "/a", Was: []string{text}, MessageID: "m"}})
			return err
		}},
		{"Prune of a projector", func(ctx context.Context, text string) error {
			_, err := s.db.Prune(ctx, text, []string{s.name + "/a"}, time.Hour, 1)
			return err
		}},
		{"Prune of a handler", func(ctx context.Context, text string) error {
			_, err := s.db.Prune(ctx, s.name, []string{s.name + "/a", text}, time.Hour, 1)
			return err
		}},
		{"DropMarkers", func(ctx context.Context, text string) error { _, err := s.db.DropMarkers(ctx, text, 1); return err }},
	})
}

// failure returns the error of a call.
func failure[T any](_ T, err error) error { return err }
