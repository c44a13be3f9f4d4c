package claim_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/stretchr/testify/require"
)

func TestDelay(t *testing.T) {
	t.Parallel()
	var b claim.Backoff // the defaults: 30s doubling to 1h
	for n, want := range map[int]time.Duration{
		1: 30 * time.Second, 2: time.Minute, 3: 2 * time.Minute, 7: 32 * time.Minute, 8: time.Hour, 9: time.Hour,
		62: time.Hour, 63: time.Hour, 64: time.Hour, 1 << 30: time.Hour,
	} {
		got, err := b.Delay(n)
		require.NoError(t, err)
		require.Equal(t, want, got, "attempt %d", n)
	}
	for _, n := range []int{0, -1} {
		_, err := b.Delay(n)
		require.ErrorIs(t, err, claim.ErrTerms, "attempt %d", n)
	}
}

func TestDelayJitter(t *testing.T) {
	t.Parallel()
	b := claim.Backoff{Base: time.Second, Max: time.Second, Jitter: 0.5}
	seen := map[time.Duration]bool{}
	for range 200 {
		d, err := b.Delay(1)
		require.NoError(t, err)
		require.LessOrEqual(t, d, time.Second)
		require.GreaterOrEqual(t, d, time.Second/2)
		seen[d] = true
	}
	require.Greater(t, len(seen), 50, "jitter is applied")
}

func TestBackoffIsExhaustedAtItsLimit(t *testing.T) {
	t.Parallel()
	require.False(t, claim.Backoff{}.Exhausted(7))
	require.True(t, claim.Backoff{}.Exhausted(8))
	b, err := claim.Backoff{}.WithDefaults()
	require.NoError(t, err)
	require.Equal(t, claim.Backoff{Base: 30 * time.Second, Max: time.Hour, Attempts: 8}, b)
	require.True(t, claim.Backoff{Base: -1}.Exhausted(8), "an invalid schedule has a limit too")
	require.True(t, claim.Backoff{Attempts: 1}.Exhausted(1))
	require.False(t, claim.Backoff{Attempts: -1}.Exhausted(1<<30), "negative means no limit")
}

func TestBadTermsAreRefused(t *testing.T) {
	t.Parallel()
	for name, b := range map[string]claim.Backoff{
		"negative base":   {Base: -1},
		"max below base":  {Base: time.Second, Max: time.Millisecond},
		"jitter over 1":   {Jitter: 1.1},
		"negative jitter": {Jitter: -0.1},
	} {
		_, err := b.WithDefaults()
		require.ErrorIs(t, err, claim.ErrTerms, name)
		_, err = b.Delay(1)
		require.ErrorIs(t, err, claim.ErrTerms, name)
	}
	for name, terms := range map[string]claim.Terms{
		"negative lease": {Lease: -1},
		"tiny lease":     {Lease: time.Microsecond},
		"negative limit": {Limit: -1},
	} {
		_, err := terms.WithDefaults()
		require.ErrorIs(t, err, claim.ErrTerms, name)
	}
}

func TestTermsDefaults(t *testing.T) {
	t.Parallel()
	a, err := claim.Terms{}.WithDefaults()
	require.NoError(t, err)
	b, err := claim.Terms{}.WithDefaults()
	require.NoError(t, err)
	require.Equal(t, []any{5 * time.Minute, 50}, []any{a.Lease, a.Limit})
	require.NotEqual(t, a.Token, b.Token, "every claim has its own token")
	require.Len(t, a.Token.String(), 32)
	require.Empty(t, claim.Token{}.String())
}

// portable claims numbers. Numbers in lost are claimed by another, and negative numbers must be
// claimed alone.
func portable(t *testing.T, rows []int, lost map[int]bool, fail error) ([]int, error) {
	t.Helper()
	terms, err := claim.Terms{Limit: 10}.WithDefaults()
	require.NoError(t, err)
	return claim.Portable(t.Context(), terms,
		func(_ context.Context, limit int) ([]int, error) {
			require.Equal(t, 10, limit)
			return rows, nil
		},
		func(_ context.Context, row int, got claim.Terms) (int, bool, error) {
			require.Equal(t, terms, got)
			if row == 99 {
				return 0, false, fail
			}
			return row * 10, !lost[row], nil
		},
		func(row int) bool { return row < 0 })
}

func TestPortable(t *testing.T) {
	t.Parallel()
	fail := errors.New("fail")
	for name, c := range map[string]struct {
		rows []int
		lost map[int]bool
		want []int
		err  error
	}{
		"takes in order":                            {rows: []int{1, 2, 3}, want: []int{10, 20, 30}},
		"a lost race skips":                         {rows: []int{1, 2, 3}, lost: map[int]bool{2: true}, want: []int{10, 30}},
		"a row to be claimed alone comes first":     {rows: []int{-1, 2, 3}, want: []int{-10}},
		"a row to be claimed alone ends the claim":  {rows: []int{1, -2, 3}, want: []int{10}},
		"a lost row to be claimed alone is skipped": {rows: []int{-1, 2}, lost: map[int]bool{-1: true}, want: []int{20}},
		"an error": {rows: []int{1, 99, 3}, err: fail},
		"none":     {want: []int{}},
	} {
		got, err := portable(t, c.rows, c.lost, fail)
		require.ErrorIs(t, err, c.err, name)
		require.Equal(t, c.want, got, name)
	}
}

func FuzzBackoff(f *testing.F) {
	f.Add(int64(0), int64(0), 0, 0.0, 1)
	f.Add(int64(time.Second), int64(time.Hour), 8, 0.5, 70)
	f.Add(int64(1)<<62, int64(1)<<62, -1, 1.0, 1<<40)
	f.Fuzz(func(t *testing.T, base, most int64, attempts int, jitter float64, n int) {
		b := claim.Backoff{Base: time.Duration(base), Max: time.Duration(most), Attempts: attempts, Jitter: jitter}
		whole, err := b.WithDefaults()
		if err != nil {
			require.ErrorIs(t, err, claim.ErrTerms)
			return
		}
		d, err := b.Delay(n)
		if n < 1 {
			require.ErrorIs(t, err, claim.ErrTerms)
			return
		}
		require.NoError(t, err)
		require.GreaterOrEqual(t, d, time.Duration(0))
		require.LessOrEqual(t, d, whole.Max)
	})
}

func FuzzTerms(f *testing.F) {
	f.Add(int64(0), 0)
	f.Add(int64(-1), 1)
	f.Fuzz(func(t *testing.T, lease int64, limit int) {
		terms, err := claim.Terms{Lease: time.Duration(lease), Limit: limit}.WithDefaults()
		if err != nil {
			require.ErrorIs(t, err, claim.ErrTerms)
			return
		}
		require.GreaterOrEqual(t, terms.Lease, time.Millisecond)
		require.Positive(t, terms.Limit)
		require.NotZero(t, terms.Token)
	})
}
