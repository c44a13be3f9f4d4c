package provider

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/check"
)

// Limits that hold for every provider.
const (
	MaxIDBytes        = check.MaxID       // 255; streams, message ids, types, topics, ordering keys
	MaxSnapshotBytes  = check.MaxSnapshot // 4 MiB; the state of a snapshot
	DefaultMaxPayload = 1 << 20           // bytes of the payload of an event or a message; see CheckJSON
	MaxJSONDepth      = 1000              // nested arrays and objects, as in SQLite's JSON functions
	maxHeaderValue    = 1024
	maxHeaders        = 64
	maxExtra          = 48 // with it and maxExtraKey, the headers of FromEvent are valid
	maxExtraKey       = 240
)

// Category returns the part of a stream name before the first "-", or the whole name.
func Category(stream string) string {
	category, _, _ := strings.Cut(stream, "-")
	return category
}

// CheckName returns an *eventstore.InvalidError for a name that does not match
// ^[a-z][a-z0-9_]{0,40}$. Categories, and names that are part of SQL, must match.
func CheckName(field, name string) error {
	return invalid(field, check.Name(name))
}

// CheckText returns an *eventstore.InvalidError for text that is empty, too long, not UTF-8, or has control characters.
func CheckText(field, s string, limit int) error {
	return invalid(field, check.Text(s, limit))
}

// CheckStream returns an *eventstore.InvalidError for a name that is not "category-id", or is longer than MaxIDBytes.
func CheckStream(stream string) error {
	return invalid(check.Stream(stream))
}

// invalid returns an *eventstore.InvalidError unless reason is empty.
func invalid(field, reason string) error {
	if reason == "" {
		return nil
	}
	return &eventstore.InvalidError{Field: field, Reason: reason}
}

func invalidf(field, reason string, args ...any) error {
	return invalid(field, fmt.Sprintf(reason, args...))
}

// CheckAppend returns an *eventstore.InvalidError for the first invalid argument of eventstore.Store.Append. Providers call
// it before any SQL. A maxPayload ≤ 0 means DefaultMaxPayload.
func CheckAppend(stream string, expected eventstore.Expected, events []eventstore.Draft, maxPayload int) error {
	if err := CheckStream(stream); err != nil {
		return err
	}
	if expected < eventstore.Any {
		return invalidf("expected", "%d: must be Any, NoStream or a version", expected)
	}
	if len(events) == 0 {
		return invalidf("events", "must not be empty")
	}
	seen := make(map[string]struct{}, len(events))
	for i := range events {
		d := &events[i]
		err := checkDraft(d, maxPayload)
		if _, ok := seen[d.ID]; ok {
			err = invalid("id", "an earlier event has the same id: give each event its own")
		}
		if d.Type == eventstore.TypeEnded && i < len(events)-1 {
			err = invalid("type", eventstore.TypeEnded+" ends the stream: it must be the last event")
		}
		if e, ok := errors.AsType[*eventstore.InvalidError](err); ok {
			e.Field = fmt.Sprintf("events[%d].%s", i, e.Field)
		}
		if err != nil {
			return err
		}
		seen[d.ID] = struct{}{}
	}
	return nil
}

func checkDraft(d *eventstore.Draft, maxPayload int) error {
	if id, err := uuid.Parse(d.ID); err != nil || id.String() != d.ID {
		return invalid("id", "must be a UUID in canonical lower case")
	}
	if d.Schema < 1 || d.Schema > 1<<15-1 {
		return invalidf("schema", "%d: must be 1 to 32767", d.Schema)
	}
	m := &d.Metadata
	return cmp.Or(CheckText("type", d.Type, MaxIDBytes), CheckJSON("data", d.Data, maxPayload),
		checkValue("metadata.correlation_id", m.CorrelationID), checkValue("metadata.causation_id", m.CausationID),
		checkValue("metadata.traceparent", m.Traceparent), checkValue("metadata.actor", m.Actor),
		checkPairs("metadata.extra", m.Extra, maxExtra, maxExtraKey))
}

// checkValue is CheckText for a value of metadata or of a header, which may be empty.
func checkValue(field, value string) error {
	if value == "" {
		return nil
	}
	return CheckText(field, value, maxHeaderValue)
}

// CheckHeaders returns an *eventstore.InvalidError for more than 64 keys, a key that is empty or
// has more than 255 bytes, a value of more than 1024 bytes, and text that is not UTF-8 or has control characters.
func CheckHeaders(field string, headers map[string]string) error {
	return checkPairs(field, headers, maxHeaders, MaxIDBytes)
}

func checkPairs(field string, pairs map[string]string, most, mostKey int) error {
	if len(pairs) > most {
		return invalidf(field, "%d keys: at most %d are allowed", len(pairs), most)
	}
	for k, v := range pairs {
		if err := cmp.Or(CheckText(field+" key", k, mostKey), checkValue(field+" value", v)); err != nil {
			return err
		}
	}
	return nil
}

// CheckJSON returns an *eventstore.InvalidError unless data is one JSON value that every provider
// stores without loss. These are invalid:
//   - more than maxPayload bytes (≤ 0 means DefaultMaxPayload), with numbers written without
//     exponents: 1e6 counts as seven bytes, because PostgreSQL returns 1000000;
//   - text that is not UTF-8, and a NUL or a lone surrogate in a string;
//   - a key that occurs twice in one object;
//   - arrays and objects nested deeper than MaxJSONDepth;
//   - a number outside PostgreSQL's numeric: at most 131072 digits before the point, 16383 after
//     it (https://www.postgresql.org/docs/15/datatype-numeric.html).
func CheckJSON(field string, data []byte, maxPayload int) error {
	if maxPayload <= 0 {
		maxPayload = DefaultMaxPayload
	}
	if len(data) > maxPayload {
		return invalidf(field, "%d bytes: at most %d are allowed", len(data), maxPayload)
	}
	size := len(data)
	dec := jsontext.NewDecoder(bytes.NewBuffer(data)) // a *bytes.Buffer is read in place
	for whole := false; ; whole = dec.StackDepth() == 0 {
		tok, err := dec.ReadToken()
		switch {
		case errors.Is(err, io.EOF) && whole:
			return nil
		case err != nil:
			return invalidf(field, "must be JSON that every database stores: %s", jsonReason(err))
		case whole:
			return invalidf(field, "must be one JSON value, not several")
		case dec.StackDepth() > MaxJSONDepth:
			return invalidf(field, "is nested deeper than %d", MaxJSONDepth)
		}
		switch tok.Kind() {
		case '"':
			if strings.IndexByte(tok.String(), 0) >= 0 {
				return invalidf(field, "must not have NUL characters")
			}
		case '0':
			more, ok := numberGrowth(tok.String())
			if !ok {
				return invalidf(field, "has a number outside the range of PostgreSQL's numeric")
			}
			if size += more; size > maxPayload {
				return invalidf(field, "more than %d bytes with its numbers written without exponents", maxPayload)
			}
		}
	}
}

// jsonReason describes err and its position, without the value.
func jsonReason(err error) string {
	if errors.Is(err, jsontext.ErrDuplicateName) {
		return "a key occurs twice in one object"
	}
	if s, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		return fmt.Sprintf("invalid at byte %d", s.ByteOffset)
	}
	return "unexpected end"
}

// numberGrowth returns how many bytes longer n is without its exponent, and whether it is in the range of numeric.
func numberGrowth(n string) (more int, ok bool) {
	n = strings.TrimPrefix(n, "-")
	mantissa, exponent, scaled := strings.Cut(strings.ToLower(n), "e")
	if !scaled && len(n) <= 16383 {
		return 0, true
	}
	if len(exponent) > 8 {
		return 0, false
	}
	exp, _ := strconv.Atoi(exponent)
	before, after, _ := strings.Cut(mantissa, ".")
	whole, fraction := len(before)+exp, len(after)-exp
	if whole > 131072 || fraction > 16383 {
		return 0, false
	}
	size := max(whole, 1)
	if fraction > 0 {
		size += 1 + fraction
	}
	return max(size-len(n), 0), true
}

// CheckSnapshot checks the arguments of LoadSnapshot, and of SaveSnapshot if s has a version.
func CheckSnapshot(stream string, s eventstore.Snapshot) error {
	if err := cmp.Or(CheckStream(stream), CheckText("snapshot schema", s.Schema, 64)); err != nil || s.Version == 0 && s.State == nil {
		return err
	}
	if err := CheckText("snapshot event id", s.EventID, MaxIDBytes); err != nil {
		return err
	}
	if s.Version < 1 {
		return invalid("snapshot version", "must be 1 or more")
	}
	if len(s.State) > MaxSnapshotBytes {
		return invalidf("snapshot state", "has more than %d bytes", MaxSnapshotBytes)
	}
	return nil
}

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
	return cmp.Or(checkLimit(f.Limit), CheckStorable("filter.status", f.Status...), CheckStorable("filter.topic", f.Topic),
		CheckStorable("filter.key", f.Key), CheckStorable("filter.stream", f.Stream))
}

// CheckQuery checks the topics.
func CheckQuery(q EntryQuery) error {
	return cmp.Or(CheckStorable("query.topics", q.Topics...), CheckStorable("query.except", q.Except...))
}

// CheckParkedFilter checks the limit, the projector and the handler. Key, Code and Types may be any text, as of a message.
func CheckParkedFilter(f ParkedFilter) error {
	return cmp.Or(checkLimit(f.Limit), CheckStorable("filter.projector", f.Projector), CheckStorable("filter.handler", f.Handler))
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

// CheckClear checks the names that are given to Builds.ClearGeneration.
func CheckClear(projector string, handlers []string, tables []TablePair) error {
	var names []string
	for _, t := range tables {
		if names = append(names, t.Table); t.Other != "" {
			names = append(names, t.Other)
		}
	}
	return cmp.Or(CheckPrune(projector, handlers), CheckTables(names...))
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
	return cmp.Or(CheckStorable("projector", projector), CheckStorable("checkpoint.lineage", to.Lineage), CheckStorable("checkpoint.place.id", to.Place.ID),
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
	return cmp.Or(CheckStorable("projector", projector), CheckStorable("handlers", handlers...))
}
