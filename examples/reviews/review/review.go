// Package review is the domain of the example: one review per product and author.
//
// Posting again edits the review. A withdrawn review can be posted again. Each review is one event
// stream. Its name is "review-" and an id made of product and author. The package uses the types
// of the event store and no database.
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

// Category is the part of the stream names before the first "-". With outbox.ByCategory it is also
// the topic.
const Category = "review"

// Limits of a review.
const (
	MinStars   = 1
	MaxStars   = 5
	MaxSummary = 4 << 10   // bytes
	MaxText    = 128 << 10 // bytes; fits into an event even when JSON escapes every byte
)

// ErrRejected is matched by every *RejectedError.
var ErrRejected = errors.New("command rejected")

// ErrNoReview rejects a command on a review that was never posted.
var ErrNoReview error = &RejectedError{Reason: "no such review: check the product and the author"}

// RejectedError reports why a command was rejected. The caller has to change the command. Nothing
// was written. The reason never contains text by the author.
type RejectedError struct{ Reason string }

func (e *RejectedError) Error() string { return e.Reason }

// Is makes errors.Is(err, ErrRejected) true.
func (e *RejectedError) Is(target error) bool { return target == ErrRejected }

func rejected(format string, args ...any) error {
	return &RejectedError{Reason: fmt.Sprintf(format, args...)}
}

// Content is an author's opinion of a product.
type Content struct {
	Stars   int
	Summary string
	Text    string
}

func (c Content) check() error {
	switch {
	case c.Stars < MinStars || c.Stars > MaxStars:
		return rejected("stars must be %d to %d, got %d", MinStars, MaxStars, c.Stars)
	case len(c.Summary) > MaxSummary:
		return rejected("summary has %d bytes: shorten it to at most %d", len(c.Summary), MaxSummary)
	case len(c.Text) > MaxText:
		return rejected("text has %d bytes: shorten it to at most %d", len(c.Text), MaxText)
	case !utf8.ValidString(c.Summary) || !utf8.ValidString(c.Text):
		return rejected("summary or text is not valid UTF-8: send UTF-8")
	case strings.ContainsRune(c.Summary, 0) || strings.ContainsRune(c.Text, 0):
		return rejected("summary or text contains a NUL character: remove it")
	}
	return nil
}

// Review is the aggregate: the state of one review, rebuilt from its stream. Its methods decide and
// do not change the state. The events that they return are appended and then passed to Apply.
type Review struct {
	product, author string
	posted          bool // posted and not withdrawn or hidden since
	content         Content
	latest          time.Time // the latest time of all its events
}

// ID returns the aggregate id of the review of product by author. It rejects an id that is not
// valid in the name of a stream.
func ID(product, author string) (string, error) {
	for _, part := range []string{product, author} {
		switch strings.TrimSpace(part) {
		case "":
			return "", rejected("product or author is empty: both are required")
		case ".", "..": // clients resolve these in the path of a URL
			return "", rejected(`product or author is "." or "..": use another name`)
		}
	}
	id := eventstore.JoinID(product, author)
	err := provider.CheckStream(eventstore.StreamName(Category, id))
	if invalid, ok := errors.AsType[*eventstore.InvalidError](err); ok {
		return "", rejected("product and author do not form a valid id: %s", invalid.Reason)
	}
	return id, err
}

// New returns a review that is not posted yet. The id is a result of ID.
func New(id string) *Review {
	r := &Review{}
	if parts, err := eventstore.SplitID(id); err == nil && len(parts) == 2 {
		r.product, r.author = parts[0], parts[1]
	}
	return r
}

// Apply updates the state with one event.
func (r *Review) Apply(event any) {
	switch e := event.(type) {
	case Posted:
		r.posted, r.content = true, Content{e.Stars, e.Summary, e.Text}
		r.noteTime(e.ReviewedAt)
	case Edited:
		r.content = Content{e.Stars, e.Summary, e.Text}
		r.noteTime(e.ReviewedAt)
	case Withdrawn:
		r.posted, r.content = false, Content{}
		r.noteTime(e.WithdrawnAt)
	case Hidden:
		r.posted, r.content = false, Content{}
		r.noteTime(e.HiddenAt)
	}
}

func (r *Review) noteTime(at time.Time) {
	if at.After(r.latest) {
		r.latest = at
	}
}

// Post posts the review, or edits it if it is already posted. It returns no event if the content is
// the same.
func (r *Review) Post(c Content, at time.Time) ([]any, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	if r.posted && c == r.content {
		return nil, nil
	}
	return r.postOrEdit(c, at), nil
}

// PostAsOf is Post for a historical record. It has an effect only if the record is later than every
// event of the review, including a withdrawal. So records may be repeated and may come in any
// order. A later record with the same content is still an edit, because the review must remember
// its time.
func (r *Review) PostAsOf(c Content, at time.Time) ([]any, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	if !at.After(r.latest) {
		return nil, nil
	}
	return r.postOrEdit(c, at), nil
}

func (r *Review) postOrEdit(c Content, at time.Time) []any {
	at = at.UTC()
	if !r.posted {
		return []any{Posted{r.product, r.author, c.Stars, c.Summary, c.Text, at}}
	}
	return []any{Edited{r.product, r.author, c.Stars, r.content.Stars, c.Summary, c.Text, at}}
}

// Withdraw withdraws the review. It returns no event if the review is already withdrawn, and
// ErrNoReview if the review was never posted.
func (r *Review) Withdraw(at time.Time) ([]any, error) {
	switch {
	case !r.posted && r.latest.IsZero():
		return nil, ErrNoReview
	case !r.posted:
		return nil, nil
	}
	return []any{Withdrawn{r.product, r.author, r.content.Stars, at.UTC()}}, nil
}

// Erase withdraws the review if it is posted, and ends its stream for ever: it cannot be posted again.
// It returns ErrNoReview if the review was never posted.
func (r *Review) Erase(at time.Time) ([]any, error) {
	events, err := r.Withdraw(at)
	if err != nil {
		return nil, err
	}
	return append(events, eventstore.Ended{}), nil
}

// Hide hides a review that a moderator has rejected. It returns no event if the review has other
// content by now, or is not posted.
func (r *Review) Hide(rejected Content, reason string, at time.Time) ([]any, error) {
	if !r.posted || r.content != rejected {
		return nil, nil
	}
	return []any{Hidden{r.product, r.author, r.content.Stars, reason, at.UTC()}}, nil
}
