package provider

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// CheckStorable returns an *eventstore.InvalidError for text that is longer than MaxIDBytes, is not UTF-8, or has a
// NUL: nothing is stored under it. Empty text passes. Every provider calls it, or the checks below, before any SQL.
func CheckStorable[T ~string](field string, texts ...T) error {
	for _, t := range texts {
		if len(t) > MaxIDBytes {
			return invalidf(field, "%d bytes: at most %d are allowed", len(t), MaxIDBytes)
		}
	}
	return CheckStored(field, texts...)
}

// CheckStored is CheckStorable for text of any length: for ids that a store has returned, and another program has stored.
func CheckStored[T ~string](field string, texts ...T) error {
	for _, t := range texts {
		switch s := string(t); {
		case !utf8.ValidString(s):
			return invalid(field, "must be UTF-8")
		case strings.Contains(s, "\x00"):
			return invalid(field, "must not have NUL characters")
		}
	}
	return nil
}

// CheckFilter checks the limit, the statuses, the topic, the key and the stream.
func CheckFilter(f EntryFilter) error {
	return firstError(checkLimit(f.Limit), CheckStorable("filter.status", f.Status...), CheckStorable("filter.topic", f.Topic),
		CheckStorable("filter.key", f.Key), CheckStorable("filter.stream", f.Stream))
}

// CheckQuery checks the topics.
func CheckQuery(q EntryQuery) error {
	return firstError(CheckStorable("query.topics", q.Topics...), CheckStorable("query.except", q.Except...))
}

// CheckParkedFilter checks the limit, the projector and the handler. Key, Code and Types may be any text,
// because those of a parked message may be any text.
func CheckParkedFilter(f ParkedFilter) error {
	return firstError(checkLimit(f.Limit), CheckStorable("filter.projector", f.Projector), CheckStorable("filter.handler", f.Handler))
}

func checkLimit(limit int) error {
	if limit < 0 {
		return invalid("filter.limit", "must not be negative")
	}
	return nil
}

// CheckDueFilter checks the projectors.
func CheckDueFilter(f DueFilter) error {
	for _, b := range f.Builds {
		if err := CheckStorable("filter.builds", b.Projector); err != nil {
			return err
		}
	}
	return nil
}

// CheckSwitch returns ErrInput for a Switch that no store can run.
func CheckSwitch(u *Unit) error {
	s := u.Switch
	if len(u.Messages) > 0 || !u.Once || u.Advance != nil || u.DryRun != nil {
		return fmt.Errorf("%w: a unit with Switch must have Once, and neither Messages, Advance nor DryRun", ErrInput)
	}
	for _, g := range s.Set {
		if err := CheckGeneration(g); err != nil {
			return err
		}
		if g.Projector != u.Projector {
			return fmt.Errorf("%w: switch.Set has a generation of projector %s, and the unit is of %s", ErrInput, g.Projector, u.Projector)
		}
	}
	pairs := slices.Concat(s.Rename, s.Show)
	if c := s.Compare; c != nil {
		if pairs = slices.Concat(pairs, c.Pairs); c.Limit < 1 || c.Found == nil || c.Repair && c.Only == nil {
			return fmt.Errorf("%w: switch.Compare must have a Limit and Found, and with Repair also Only", ErrInput)
		}
	}
	for _, p := range pairs {
		if err := CheckTables(p.Table, p.Other); err != nil {
			return err
		}
	}
	return CheckTables(slices.Concat(s.Create, s.Reset)...)
}

// MaxTableBytes is the length limit of each part of a table's name, which is that of PostgreSQL.
const MaxTableBytes = 63

// CheckTables returns ErrInput for names that are not those of tables: at most two parts, of 1 to MaxTableBytes each,
// without quotes and control characters. For a part that is too long it is also an *eventstore.InvalidError.
func CheckTables(names ...string) error {
	for _, name := range names {
		parts := strings.Split(name, ".")
		for _, part := range parts {
			if len(part) > MaxTableBytes {
				return fmt.Errorf("%w: %w", ErrInput, invalidf(fmt.Sprintf("table %q", name), "%d bytes: at most %d are allowed", len(part), MaxTableBytes))
			}
			if len(parts) > 2 || part == "" || CheckStorable("table", part) != nil || strings.ContainsAny(part, "\"'`") {
				return fmt.Errorf("%w: table %q: give a name, or a schema and a name: \"reports.ratings\"", ErrInput, name)
			}
		}
	}
	return nil
}

// CheckQuestions checks the names of the handlers. A message's id may be any text.
func CheckQuestions(questions []Question) error {
	for i := range questions {
		if err := CheckStorable(fmt.Sprintf("questions[%d].handler", i), questions[i].Names()...); err != nil {
			return err
		}
	}
	return nil
}

// CheckSetCheckpoint checks the arguments of Progress.SetCheckpoint.
func CheckSetCheckpoint(projector string, to Checkpoint) error {
	if to.Mode < ModeCatchUp || to.Mode > ModeLive {
		return invalidf("checkpoint.mode", "%d: set one of the modes", to.Mode)
	}
	if to.Place.Position < 0 {
		return invalidf("checkpoint.place.position", "%d: must not be negative", to.Place.Position)
	}
	for _, split := range to.Splits {
		if split.First < 1 || split.Count < 0 || split.First > math.MaxInt32-split.Count {
			return invalidf("checkpoint.splits", "%+v: First must be at least 1 and Count at least 0", split)
		}
	}
	return firstError(CheckStorable("projector", projector), CheckStorable("checkpoint.lineage", to.Lineage), CheckStorable("checkpoint.place.id", to.Place.ID),
		checkTime("checkpoint.place.recorded_at", to.Place.RecordedAt))
}

// CheckUnapplied checks the names of Progress.Unapplied. A message's id may be any text.
func CheckUnapplied(projector string, messages []Message) error {
	if err := CheckStorable("projector", projector); err != nil {
		return err
	}
	for i := range messages {
		for j := range messages[i].Handlers {
			if err := CheckStorable(fmt.Sprintf("messages[%d].handlers[%d]", i, j), messages[i].Handlers[j].Names()...); err != nil {
				return err
			}
		}
	}
	return nil
}

// CheckPrune checks the arguments of Records.Prune and Progress.PruneApplied.
func CheckPrune(projector string, handlers []string) error {
	return firstError(CheckStorable("projector", projector), CheckStorable("handlers", handlers...))
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
