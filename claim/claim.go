// Package claim holds the mechanics that every find-and-take shares: terms, tokens, backoff, the portable claim.
//
// A claim finds rows and takes them, atomically: no row is taken twice while its lease lives. The lease says
// how long the claim protects its rows, on the store's clock. The token fences late finishers: a change that
// carries a stale token changes nothing. The claim is the attempt: taking a row counts, not failing at it, so
// that a row that kills its worker every time still reaches its limit.
//
// The package is no query builder: each provider writes its claim verbs for its tables.
package claim

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"time"
)

// Token fences whoever claimed. The zero Token stands for no claim.
type Token [16]byte

// NewToken draws a token. Every claim has its own.
func NewToken() Token {
	var t Token
	_, _ = rand.Read(t[:]) // never fails: crypto/rand.Read ends the program instead
	return t
}

// String is the token in hexadecimal, or "" for the zero Token.
func (t Token) String() string {
	if t == (Token{}) {
		return ""
	}
	return hex.EncodeToString(t[:])
}

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

// Portable claims with one read and one guarded update a row, in the order that candidates gives.
//   - take must re-assert in its own atomic statement all that made the row a candidate; a lost race is
//     (row, false, nil), and the row is skipped.
//   - alone, where not nil, tells whether a row must be claimed with no other: such a row is taken if it is
//     the first, and ends the claim before it otherwise.
//   - An error ends the claim; the rows taken until then are returned with it and stay claimed.
func Portable[R any](ctx context.Context, t Terms,
	candidates func(ctx context.Context, limit int) ([]R, error),
	take func(ctx context.Context, row R, t Terms) (R, bool, error),
	alone func(row R) bool,
) ([]R, error) {
	rows, err := candidates(ctx, t.Limit)
	if err != nil {
		return nil, err
	}
	taken := make([]R, 0, len(rows))
	for _, row := range rows {
		single := alone != nil && alone(row)
		if single && len(taken) > 0 {
			break
		}
		got, ok, err := take(ctx, row, t)
		if err != nil {
			return taken, err
		}
		if !ok {
			continue
		}
		taken = append(taken, got)
		if single {
			break
		}
	}
	return taken, nil
}
