package review_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/examples/reviews/review"
	"github.com/kinora-go/kinora/providers/memory"
)

func day(n int) time.Time { return time.Date(2024, 1, n, 0, 0, 0, 0, time.UTC) }

func content(stars int) review.Content { return review.Content{Stars: stars, Summary: "s", Text: "t"} }

func posted(stars, at int) review.Posted {
	return review.Posted{Product: "42", Author: "ann", Stars: stars, Summary: "s", Text: "t", ReviewedAt: day(at)}
}

func edited(stars, was, at int) review.Edited {
	return review.Edited{Product: "42", Author: "ann", Stars: stars, WasStars: was, Summary: "s", Text: "t", ReviewedAt: day(at)}
}

func withdrawn(was, at int) review.Withdrawn {
	return review.Withdrawn{Product: "42", Author: "ann", WasStars: was, WithdrawnAt: day(at)}
}

func hidden(was, at int) review.Hidden {
	return review.Hidden{Product: "42", Author: "ann", WasStars: was, Reason: "rude", HiddenAt: day(at)}
}

// TestDecisions: each command returns the right events for the past events of a review.
func TestDecisions(t *testing.T) {
	t.Parallel()
	post := func(stars, at int) func(*review.Review) ([]any, error) {
		return func(r *review.Review) ([]any, error) { return r.Post(content(stars), day(at)) }
	}
	asOf := func(stars, at int) func(*review.Review) ([]any, error) {
		return func(r *review.Review) ([]any, error) { return r.PostAsOf(content(stars), day(at)) }
	}
	withdraw := func(at int) func(*review.Review) ([]any, error) {
		return func(r *review.Review) ([]any, error) { return r.Withdraw(day(at)) }
	}
	hide := func(stars, at int) func(*review.Review) ([]any, error) {
		return func(r *review.Review) ([]any, error) { return r.Hide(content(stars), "rude", day(at)) }
	}
	past := func(events ...any) []any { return events }
	for _, c := range []struct {
		name   string
		past   []any
		decide func(*review.Review) ([]any, error)
		want   []any
	}{
		{"first post", nil, post(5, 1), past(posted(5, 1))},
		{"second post is an edit", past(posted(5, 1)), post(3, 2), past(edited(3, 5, 2))},
		{"edit has the replaced stars", past(posted(5, 1), edited(3, 5, 2)), post(4, 3), past(edited(4, 3, 3))},
		{"same content returns no event", past(posted(5, 1)), post(5, 2), nil},
		{"return to earlier content is an edit", past(posted(5, 1), edited(3, 5, 2)), post(5, 3), past(edited(5, 3, 3))},
		{"withdraw", past(posted(5, 1), edited(3, 5, 2)), withdraw(3), past(withdrawn(3, 3))},
		{"withdraw twice returns no event", past(posted(5, 1), withdrawn(5, 2)), withdraw(3), nil},
		{"post the old content after a withdrawal", past(posted(5, 1), withdrawn(5, 2)), post(5, 3), past(posted(5, 3))},
		{"hide", past(posted(5, 1)), hide(5, 2), past(hidden(5, 2))},
		{"hide twice returns no event", past(posted(5, 1), hidden(5, 2)), hide(5, 3), nil},
		{"hide content that was edited", past(posted(5, 1), edited(3, 5, 2)), hide(5, 3), nil},
		{"hide a withdrawn review", past(posted(5, 1), withdrawn(5, 2)), hide(5, 3), nil},
		{"withdraw a hidden review", past(posted(5, 1), hidden(5, 2)), withdraw(3), nil},
		{"post after hiding", past(posted(5, 1), hidden(5, 2)), post(5, 3), past(posted(5, 3))},
		{"record before hiding", past(posted(5, 1), hidden(5, 4)), asOf(3, 3), nil},
		{"first record", nil, asOf(5, 1), past(posted(5, 1))},
		{"repeated record", past(posted(5, 2)), asOf(5, 2), nil},
		{"record of the same time with other content", past(posted(5, 2)), asOf(1, 2), nil},
		{"earlier record", past(posted(5, 2)), asOf(1, 1), nil},
		{"later record", past(posted(5, 2)), asOf(1, 3), past(edited(1, 5, 3))},
		{"later record with the same content", past(posted(5, 2)), asOf(5, 3), past(edited(5, 5, 3))},
		{"record before the withdrawal", past(posted(5, 2), withdrawn(5, 4)), asOf(1, 3), nil},
		{"record after the withdrawal", past(posted(5, 2), withdrawn(5, 4)), asOf(1, 5), past(posted(1, 5))},
		{"record before a manual edit", past(posted(5, 2), edited(1, 5, 9)), asOf(2, 5), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := review.New(eventstore.JoinID("42", "ann"))
			for _, e := range c.past {
				r.Apply(e)
			}
			// Twice, because a conflict runs the decision again: it must have no side effect.
			for range 2 {
				got, err := c.decide(r)
				require.NoError(t, err)
				require.Equal(t, c.want, got)
			}
		})
	}
}

// TestRejections: a mistake of the caller is an ErrRejected, and nothing is written.
func TestRejections(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	commands, err := review.NewCommands(db)
	require.NoError(t, err)
	post := func(product, author string, c review.Content) error {
		_, err := commands.Post(t.Context(), product, author, c, day(1))
		return err
	}
	asOf := func(c review.Content) error {
		_, err := commands.PostAsOf(t.Context(), "42", "ann", c, day(1))
		return err
	}
	ok := content(5)
	withdraw := func(author string) error {
		_, err := commands.Withdraw(t.Context(), "42", author, day(2))
		return err
	}
	require.NoError(t, post("42", "gone", ok))
	require.NoError(t, withdraw("gone"))
	for name, err := range map[string]error{
		"zero stars":        post("42", "ann", content(0)),
		"six stars":         post("42", "ann", content(6)),
		"record: six stars": asOf(content(6)),
		"empty product":     post("", "ann", ok),
		"empty author":      post("42", "", ok),
		"long product":      post(strings.Repeat("p", 300), "ann", ok),
		"long once escaped": post(strings.Repeat("-", 150), "ann", ok),
		"control character": post("4\n2", "ann", ok),
		"invalid UTF-8":     post("42", "\xff", ok),
		"text with NUL":     asOf(review.Content{Stars: 5, Text: "\x00"}),
		"text not UTF-8":    asOf(review.Content{Stars: 5, Text: "\xff"}),
		"long text":         asOf(review.Content{Stars: 5, Text: strings.Repeat("t", review.MaxText+1)}),
		"long summary":      asOf(review.Content{Stars: 5, Summary: strings.Repeat("t", review.MaxSummary+1)}),
		"never posted":      withdraw("ann"),
		"blank author":      post("42", " ", ok),
		"one dot":           post(".", "ann", ok),
		"two dots":          withdraw(".."),
	} {
		require.ErrorIs(t, err, review.ErrRejected, name)
	}
	require.ErrorIs(t, withdraw("ann"), review.ErrNoReview)
	require.NotErrorIs(t, post("42", "ann", content(0)), review.ErrNoReview)
	for range db.ReadStream(t.Context(), "review-42-ann", 0) {
		require.Fail(t, "a rejected command wrote something")
	}
}

// TestLargestContent: the largest content that the domain allows fits into an event, also when
// every byte is escaped.
func TestLargestContent(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	commands, err := review.NewCommands(db)
	require.NoError(t, err)
	c := review.Content{Stars: 5, Summary: strings.Repeat("<", review.MaxSummary), Text: strings.Repeat("\x01", review.MaxText)}
	at, err := commands.Post(t.Context(), "42", "ann", c, day(1))
	require.NoError(t, err)
	require.Equal(t, 1, at.Count)
}

// TestStreams: reviews with similar ids have separate streams, and events are read back as stored.
func TestStreams(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	commands, err := review.NewCommands(db)
	require.NoError(t, err)
	for i, id := range [][2]string{{"42-a", "b"}, {"42", "a-b"}, {"42~", "a"}} {
		at, err := commands.Post(t.Context(), id[0], id[1], content(1+i), day(1))
		require.NoError(t, err)
		require.Equal(t, int64(1), at.Version)
		for raw, err := range db.ReadStream(t.Context(), at.Stream, 0) {
			require.NoError(t, err)
			e, err := eventstore.Decode[review.Posted](review.Types, raw)
			require.NoError(t, err)
			require.Equal(t, id, [2]string{e.Data.Product, e.Data.Author})
		}
		again, err := commands.Post(t.Context(), id[0], id[1], content(1+i), day(2))
		require.NoError(t, err)
		require.Zero(t, again.Count)
	}
}
