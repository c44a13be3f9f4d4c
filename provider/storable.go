package provider

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/kinora-go/kinora/eventstore"
)

// Every provider calls these checks before any SQL. They return an *eventstore.InvalidError for text
// of a filter that is not UTF-8, has a NUL, or is longer than MaxIDBytes. No database can store the
// first two, and Kinora stores no longer names. Empty text passes, because it is no condition.

// CheckStorable checks texts of one field.
func CheckStorable[T ~string](field string, texts ...T) error {
	for _, t := range texts {
		reason := ""
		switch s := string(t); {
		case len(s) > MaxIDBytes:
			reason = fmt.Sprintf("%d bytes: give at most %d", len(s), MaxIDBytes)
		case !utf8.ValidString(s):
			reason = "not UTF-8: no database can store this"
		case strings.Contains(s, "\x00"):
			reason = "has a NUL character: no database can store this"
		default:
			continue
		}
		return &eventstore.InvalidError{Field: field, Reason: reason}
	}
	return nil
}

// CheckFilter checks the statuses, the topic, the key and the stream.
func CheckFilter(f EntryFilter) error {
	return firstError(CheckStorable("filter.status", f.Status...), CheckStorable("filter.topic", f.Topic), CheckStorable("filter.key", f.Key),
		CheckStorable("filter.stream", f.Stream))
}

// CheckQuery checks the topics.
func CheckQuery(q EntryQuery) error {
	return firstError(CheckStorable("query.topics", q.Topics...), CheckStorable("query.except", q.Except...))
}

// CheckParkedFilter checks the projector and the handler. Key, Code and Types may be any text,
// because a parked message may have any.
func CheckParkedFilter(f ParkedFilter) error {
	return firstError(CheckStorable("filter.projector", f.Projector), CheckStorable("filter.handler", f.Handler))
}

// CheckDueFilter checks the projectors.
func CheckDueFilter(f DueFilter) error { return CheckStorable("filter.projectors", f.Projectors...) }

// CheckQuestions checks the names of the handlers. A message's id may be any text.
func CheckQuestions(questions []Question) error {
	for i := range questions {
		if err := CheckStorable(fmt.Sprintf("questions[%d].handler", i), questions[i].Names()...); err != nil {
			return err
		}
	}
	return nil
}

// CheckPrune checks the arguments of Records.Prune.
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
