package claim

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// ErrTerms means that a field of Terms, of a Backoff, or of the retention or batch of an outbox is
// invalid.
var ErrTerms = errors.New("invalid claim terms")

// Terms are the terms of one claim.
type Terms struct {
	Holder string        // who claims; only people read it
	Token  Token         // a new one for each claim; zero means a random one
	Lease  time.Duration // how long the claim protects its rows, at least 1ms; zero means 5m
	Limit  int           // the most rows; zero means 50
}

// WithDefaults returns t with its zero fields filled in, including a new token. A lease shorter
// than 1ms and a negative limit are ErrTerms.
func (t Terms) WithDefaults() (Terms, error) {
	t.Lease, t.Limit = cmp.Or(t.Lease, 5*time.Minute), cmp.Or(t.Limit, 50)
	if t.Token == (Token{}) {
		t.Token = NewToken()
	}
	if t.Lease < time.Millisecond || t.Limit < 0 {
		return t, fmt.Errorf("%w: lease %s (at least 1ms), limit %d (at least 1)", ErrTerms, t.Lease, t.Limit)
	}
	return t, nil
}
