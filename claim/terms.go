package claim

import (
	"errors"
	"fmt"
	"time"
)

// Defaults of Terms.
const (
	DefaultLease = 5 * time.Minute
	DefaultLimit = 50
)

// ErrTerms: terms or a backoff that cannot be kept.
var ErrTerms = errors.New("invalid claim terms")

// Terms are the terms of one claim.
type Terms struct {
	Holder string        // who claims, for people to read
	Token  Token         // new for every claim
	Lease  time.Duration // how long the claim protects; zero means 5m
	Limit  int           // at most this many rows; zero means 50
}

// WithDefaults fills in what is zero, a token included, and refuses a negative or sub-millisecond lease and
// a negative limit with ErrTerms.
func (t Terms) WithDefaults() (Terms, error) {
	if t.Lease == 0 {
		t.Lease = DefaultLease
	}
	if t.Limit == 0 {
		t.Limit = DefaultLimit
	}
	if t.Token == (Token{}) {
		t.Token = NewToken()
	}
	if t.Lease < time.Millisecond || t.Limit < 0 {
		return t, fmt.Errorf("%w: lease %s (at least 1ms), limit %d (at least 1)", ErrTerms, t.Lease, t.Limit)
	}
	return t, nil
}
