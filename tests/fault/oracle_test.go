package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// testLedger is a ledger of one stream: five commands. The fourth was rejected and retried; the
// last is ambiguous.
const testLedger = `i a account-1 1 10
o a a
i b account-1 2 20
o b a
i c account-1 3 30
o c ?
i x account-1 4 99
o x r
i d account-1 4 40
o d a
i e account-1 5 50
i torn acco`

func readTestLedger(t *testing.T) map[string]*command {
	t.Helper()
	ledger := map[string]*command{}
	require.NoError(t, readLedger(strings.NewReader(testLedger), ledger))
	return ledger
}

func event(id string, n int) stored {
	return stored{id, "account-1", n, int64(10 * n), int64(n), "m-" + id}
}

func events(ids string) (all []stored) {
	for i, id := range strings.Split(ids, "") {
		all = append(all, event(id, i+1))
	}
	return all
}

func read(total int64, items ...int) model {
	return model{map[string]int64{"account-1": total}, map[string][]int{"account-1": items}}
}

// The oracle reports each kind of fault under its own name.
func TestOracleReportsEachFault(t *testing.T) {
	t.Parallel()
	other := read(150, 1, 2, 3, 4, 5)
	other.Lists["account-2"], other.Totals["account-2"] = []int{1}, 1
	moved := events("abcde")
	moved[2].Version = 7
	changed := events("abcde")
	changed[1].Amount = 21
	for name, c := range map[string]struct {
		events []stored
		model  model
		want   verdict
	}{
		"right, the ambiguous one found":     {events("abcde"), read(150, 1, 2, 3, 4, 5), verdict{}},
		"right, the ambiguous one not found": {events("abcd"), read(100, 1, 2, 3, 4), verdict{}},

		"a hole":                              {events("abcde"), read(120, 1, 2, 4, 5), verdict{Lost: 1}},
		"the end is missing":                  {events("abcde"), read(100, 1, 2, 3, 4), verdict{Lost: 1}},
		"nothing applied":                     {events("abcde"), model{}, verdict{Lost: 5}},
		"applied twice":                       {events("abcde"), read(170, 1, 2, 2, 3, 4, 5), verdict{Doubled: 1}},
		"applied twice, the second time late": {events("abcde"), read(170, 1, 2, 3, 4, 5, 2), verdict{Doubled: 1}},
		"one applied instead of another":      {events("abcde"), read(140, 1, 2, 2, 4, 5), verdict{Lost: 1, Doubled: 1}},
		"out of order":                        {events("abcde"), read(150, 1, 3, 2, 4, 5), verdict{Misordered: 1}},
		"more than was appended":              {events("abcde"), read(210, 1, 2, 3, 4, 5, 6), verdict{Phantom: 1}},
		"another stream":                      {events("abcde"), other, verdict{Phantom: 2}},
		"a sum too small":                     {events("abcde"), read(149, 1, 2, 3, 4, 5), verdict{Lost: 1}},
		"a sum too large":                     {events("abcde"), read(151, 1, 2, 3, 4, 5), verdict{Doubled: 1}},
		"an ambiguous one, applied and not in the log": {events("abcd"), read(150, 1, 2, 3, 4, 5), verdict{Phantom: 1}},

		"acknowledged, not in the log, and not applied": {events("abc"), read(60, 1, 2, 3), verdict{Lost: 2}},
		"rejected, and in the log":                      {append(events("abcde"), stored{"x", "account-1", 4, 99, 6, "m-x"}), read(150, 1, 2, 3, 4, 5), verdict{Phantom: 1}},
		"without a command, in the log":                 {append(events("abcde"), event("z", 6)), read(150, 1, 2, 3, 4, 5), verdict{Phantom: 1}},
		"twice in the log":                              {append(events("abcde"), event("b", 2)), read(150, 1, 2, 3, 4, 5), verdict{Doubled: 1}},
		"at another version":                            {moved, read(150, 1, 2, 3, 4, 5), verdict{Misordered: 1}},
		"changed":                                       {changed, read(150, 1, 2, 3, 4, 5), verdict{Phantom: 1}},
		"a hole before an ambiguous one":                {[]stored{event("a", 1), event("b", 2), event("d", 4)}, read(70, 1, 2, 4), verdict{Lost: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var v verdict
			judgeModel(judgeLog(readTestLedger(t), c.events, &v), c.model, &v)
			counts := func(v verdict) [4]int { return [4]int{v.Lost, v.Doubled, v.Phantom, v.Misordered} }
			require.Equal(t, counts(c.want), counts(v), v.reasons)
			require.Equal(t, counts(v) == [4]int{}, v.ok())
			require.Equal(t, v.ok(), len(v.streams) == 0)
		})
	}
}

// A malformed ledger is an error, because it proves nothing.
func TestMalformedLedgerIsAnError(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"o a a\n", "i a account-1 1\n", "x\n", "i a account-1 one 10\n"} {
		require.Error(t, readLedger(strings.NewReader(text), map[string]*command{}), text)
	}
	ledger := readTestLedger(t)
	require.Len(t, ledger, 6)
	require.Equal(t, ambiguous, ledger["e"].outcome)
	require.Equal(t, rejected, ledger["x"].outcome)
}

// Messages that the broker copied do not count as doubled by the fault.
func TestCopiesOfTheBrokerAreNotCountedAsDoubled(t *testing.T) {
	t.Parallel()
	m := read(0, 1, 2, 2, 3, 3, 3, 4)
	require.Equal(t, 2, doubledBy(events("abcd"), nil, m))
	require.Equal(t, 1, doubledBy(events("abcd"), map[string]bool{"m-b": true}, m))
	require.Zero(t, doubledBy(events("abcd"), map[string]bool{"m-b": true, "m-c": true}, m))
}
