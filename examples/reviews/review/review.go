// Package review is the domain of the example: one review per product and author.
//
// Posting again edits the review; withdrawing removes it, and it can be posted anew. Each review is one stream
// of events, "review-" and an id made of product and author. The package knows the event store's types and
// no database.
package review

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// Category is the part of the stream names before the first "-", and with outbox.ByCategory the topic.
const Category = "review"

// Limits of a review.
const (
	MinStars   = 1
	MaxStars   = 5
	MaxSummary = 4 << 10   // bytes
	MaxText    = 128 << 10 // bytes; escaped as JSON it still fits into an event
)

// ErrRejected is matched by every *RejectedError.
var ErrRejected = errors.New("command rejected")

// ErrNoReview is the rejection of a command on a review that there never was.
var ErrNoReview error = &RejectedError{Reason: "there is no such review"}

// RejectedError is why a command was refused. The caller is at fault, and nothing was written. The reason
// never holds what the author wrote.
type RejectedError struct{ Reason string }

func (e *RejectedError) Error() string { return e.Reason }

// Is makes errors.Is(err, ErrRejected) true.
func (e *RejectedError) Is(target error) bool { return target == ErrRejected }

func rejected(format string, args ...any) error {
	return &RejectedError{Reason: fmt.Sprintf(format, args...)}
}

// Content is what an author says about a product.
type Content struct {
	Stars   int
	Summary string
	Text    string
}

func (c Content) check() error {
	switch {
	case c.Stars < MinStars || c.Stars > MaxStars:
		return rejected("%d stars: want %d to %d", c.Stars, MinStars, MaxStars)
	case len(c.Summary) > MaxSummary:
		return rejected("the summary has %d bytes: at most %d", len(c.Summary), MaxSummary)
	case len(c.Text) > MaxText:
		return rejected("the text has %d bytes: at most %d", len(c.Text), MaxText)
	case !utf8.ValidString(c.Summary) || !utf8.ValidString(c.Text):
		return rejected("summary or text is not UTF-8")
	case strings.ContainsRune(c.Summary, 0) || strings.ContainsRune(c.Text, 0):
		return rejected("summary or text has a NUL character")
	}
	return nil
}

// Review is the aggregate: the state of one review, folded from its stream. Its methods decide and change
// nothing; what they return is appended, and comes back through Apply.
type Review struct {
	product, author string
	posted          bool // it stands: posted, and not withdrawn since
	content         Content
	seen            time.Time // the latest time of anything that was done to it
}

// ID is the aggregate id of the review of product by author. Ids that make no storable stream are rejected.
func ID(product, author string) (string, error) {
	for _, part := range []string{product, author} {
		switch strings.TrimSpace(part) {
		case "":
			return "", rejected("product or author is empty")
		case ".", "..": // no URL leads there: clients take them for steps in a path
			return "", rejected("product or author is a dot, or two")
		}
	}
	id := eventstore.JoinID(product, author)
	err := provider.CheckStream(eventstore.StreamName(Category, id))
	if invalid, ok := errors.AsType[*eventstore.InvalidError](err); ok {
		return "", rejected("product and author make no id: %s", invalid.Reason)
	}
	return id, err
}

// New is a review that nobody has posted yet. The id is one that ID made.
func New(id string) *Review {
	r := &Review{}
	if parts, err := eventstore.SplitID(id); err == nil && len(parts) == 2 {
		r.product, r.author = parts[0], parts[1]
	}
	return r
}

// Apply folds one event.
func (r *Review) Apply(event any) {
	switch e := event.(type) {
	case Posted:
		r.posted, r.content = true, Content{e.Stars, e.Summary, e.Text}
		r.see(e.ReviewedAt)
	case Edited:
		r.content = Content{e.Stars, e.Summary, e.Text}
		r.see(e.ReviewedAt)
	case Withdrawn:
		r.posted, r.content = false, Content{}
		r.see(e.WithdrawnAt)
	}
}

func (r *Review) see(at time.Time) {
	if at.After(r.seen) {
		r.seen = at
	}
}

// Post posts the review, or edits it where it stands. The content that it has already changes nothing.
func (r *Review) Post(c Content, at time.Time) ([]any, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	if r.posted && c == r.content {
		return nil, nil
	}
	return r.put(c, at), nil
}

// PostAsOf is Post for a record of the past: it counts only if it is later than everything that was done to
// the review, a withdrawal included. So the same records may come again, and in any order. A later record
// with the same content is an edit all the same, because the time itself must be remembered.
func (r *Review) PostAsOf(c Content, at time.Time) ([]any, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	if !at.After(r.seen) {
		return nil, nil
	}
	return r.put(c, at), nil
}

func (r *Review) put(c Content, at time.Time) []any {
	at = at.UTC()
	if !r.posted {
		return []any{Posted{r.product, r.author, c.Stars, c.Summary, c.Text, at}}
	}
	return []any{Edited{r.product, r.author, c.Stars, r.content.Stars, c.Summary, c.Text, at}}
}

// Withdraw takes the review back. One that was withdrawn already stays so; one that there never was is rejected.
func (r *Review) Withdraw(at time.Time) ([]any, error) {
	switch {
	case !r.posted && r.seen.IsZero():
		return nil, ErrNoReview
	case !r.posted:
		return nil, nil
	}
	return []any{Withdrawn{r.product, r.author, r.content.Stars, at.UTC()}}, nil
}
