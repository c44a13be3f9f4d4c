// Package claim has the parts that every claim of rows shares: terms, tokens, backoff, and a
// portable claim.
//
// A claim finds rows and takes them atomically: no row is taken twice while its lease lives.
//
//   - The lease is how long the claim protects its rows, on the store's clock.
//   - The token fences a worker that finishes late: a change with an old token changes nothing.
//   - Taking a row counts as an attempt, whether or not it fails. So a row that kills its worker
//     each time still reaches its limit of attempts.
//
// The package builds no queries: each provider writes the claim statements for its tables. A
// provider that cannot claim several rows in one transaction uses Portable.
//
//	entries of the outbox     Terms, Token, Backoff, Portable
//	tasks                     Terms, Token, Backoff, Portable
//	readers of the log        provider.Leases: "reader/<projector>"
//	deletion of old entries   provider.Leases: "prune-entries"
//	deletion of old markers   provider.Leases: "prune-markers/<projector>"
//	deletion of old tasks     provider.Leases: "prune-tasks"
//	parked messages           Backoff
package claim

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"time"

	"github.com/kinora-go/kinora/internal/pauses"
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

// Token identifies one claim. The zero Token means no claim.
type Token [16]byte

// String returns the token in hexadecimal, or "" for the zero Token.
func (t Token) String() string {
	if t == (Token{}) {
		return ""
	}
	return hex.EncodeToString(t[:])
}

// NewToken returns a random token. Each claim uses a new one.
func NewToken() Token {
	var t Token
	_, _ = rand.Read(t[:]) // never fails: crypto/rand.Read ends the program instead
	return t
}

// Portable claims rows with one read, and one guarded update per row, in the order of candidates. It is to be called in
// a transaction.
//   - candidates reads at most limit rows that may be claimed.
//   - take checks again, in one atomic statement, everything that made the row a candidate, and
//     takes it. If another claim was faster, take returns (row, false, nil), and Portable skips
//     the row.
//   - alone reports whether a row must be claimed without others. If such a row is the first, it
//     is the only one that is taken; otherwise the claim ends before it. A nil alone means no
//     such rows.
//   - An error ends the claim, and is returned without rows: the transaction must be rolled back.
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
			return nil, err
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

// Backoff is a retry schedule with its limit of attempts. The defaults suit external calls.
type Backoff struct {
	Base     time.Duration // the delay after the first attempt, then doubled; zero means 30s
	Max      time.Duration // the longest delay; zero means 1h, or Base if that is longer
	Attempts int           // the limit of attempts; zero means 8, negative means no limit
	Jitter   float64       // 0 to 1: the largest share taken off a delay at random; zero means none
}

// WithDefaults returns b with its zero fields filled in. A negative Base, a Max shorter than
// Base, and a Jitter outside 0 to 1 are ErrTerms.
func (b Backoff) WithDefaults() (Backoff, error) {
	b.Base = cmp.Or(b.Base, 30*time.Second)
	b.Max, b.Attempts = cmp.Or(b.Max, max(time.Hour, b.Base)), cmp.Or(b.Attempts, 8)
	if b.Base < 0 || b.Max < b.Base || !(b.Jitter >= 0 && b.Jitter <= 1) {
		return b, fmt.Errorf("%w: backoff base %s (must not be negative), max %s (at least base), jitter %g (0 to 1)",
			ErrTerms, b.Base, b.Max, b.Jitter)
	}
	return b, nil
}

// Delay returns the delay after the n-th attempt: min(Base·2^(n-1), Max), less its jitter. An n
// below 1 and an invalid schedule are ErrTerms.
func (b Backoff) Delay(n int) (time.Duration, error) {
	b, err := b.WithDefaults()
	if err != nil {
		return 0, err
	}
	if n < 1 {
		return 0, fmt.Errorf("%w: delay after attempt %d: the first attempt is 1", ErrTerms, n)
	}
	d := pauses.Doubled(b.Base, n-1, b.Max)
	return d - time.Duration(b.Jitter*mathrand.Float64()*float64(d)), nil
}

// Exhausted reports whether n attempts have reached the limit.
func (b Backoff) Exhausted(n int) bool {
	b, _ = b.WithDefaults()
	return b.Attempts > 0 && n >= b.Attempts
}
