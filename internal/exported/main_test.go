package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

const fixture = "testdata/fixture"

func TestEachKindOfExportedNameIsCounted(t *testing.T) {
	t.Parallel()
	names, err := exported(fixture)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{
		"Limit", "Default", "Config", "Config.Size", "Config.Depth", "Config.Grow", "Store", "Store.Read",
		"Kind", "Small", "NewKind",
	}, names)
}

func TestMoreNamesThanTheLimitFail(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		args []string
		want int
		say  string
	}{
		"at the limit":   {[]string{"-max", "11", fixture}, 0, "in all         11\n"},
		"above it":       {[]string{"-max", "10", fixture}, 1, "more than 10: "},
		"two packages":   {[]string{"-max", "21", fixture, fixture}, 1, "in all         22\n"},
		"no limit":       {[]string{fixture}, 0, "in all         11\n"},
		"a list":         {[]string{"-v", fixture}, 0, "  Config.Grow\n"},
		"no such folder": {[]string{"testdata/missing"}, 1, "no Go files in testdata/missing\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			require.Equal(t, c.want, run(c.args, &out), out.String())
			require.Contains(t, out.String(), c.say)
		})
	}
}
