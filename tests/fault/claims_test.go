package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Each line is what a relay recorded about an entry: "relay: time what seq token asked status". The
// lease is 100.
func TestClaimHistoryIsJudged(t *testing.T) {
	t.Parallel()
	const a1, late = "a: 12 claimed 1 A 10 id", "a: 135 marking 1 A 130 published\n"
	for name, c := range map[string]struct {
		lines       string
		broken, met int
	}{
		"one after another":                    {a1 + "\na: 21 marking 1 A 20 failed\na: 22 marked 1 A 20 failed\nb: 40 claimed 1 B 30 id", 0, 0},
		"after the lease":                      {a1 + "\nb: 120 claimed 1 B 110 id\n" + late + "a: 140 late 1 A 130 published", 0, 1},
		"after the lease, and published":       {a1 + "\nb: 120 claimed 1 B 110 id\nb: 126 marking 1 B 125 published\n" + late + "a: 140 late 1 A 130 published", 0, 0},
		"while the lease was live":             {a1 + "\nb: 100 claimed 1 B 30 id", 1, 0},
		"while the mark's outcome was unknown": {a1 + "\na: 20 marking 1 A 19 failed\nb: 100 claimed 1 B 30 id", 0, 0},
		"a late mark is accepted":              {a1 + "\nb: 120 claimed 1 B 110 id\n" + late + "a: 140 marked 1 A 130 published", 1, 0},
		"a late renewal is accepted":           {a1 + "\nb: 120 claimed 1 B 110 id\na: 140 marked 1 A 130 claimed", 1, 0},
		"a mark asked for in time is accepted": {a1 + "\na: 106 marking 1 A 105 failed\nb: 120 claimed 1 B 110 id\na: 140 marked 1 A 105 failed", 0, 0},
		"the claim's reply came late":          {"a: 180 claimed 1 A 10 id\nb: 125 claimed 1 B 120 id\na: 190 marking 1 A 185 pending\na: 195 late 1 A 185 pending", 0, 0},
		"renewed, but claimed by another":      {a1 + "\na: 80 marked 1 A 70 claimed\nb: 150 claimed 1 B 140 id", 1, 0},
		"renewed, and expired":                 {a1 + "\na: 80 marked 1 A 70 claimed\nb: 190 claimed 1 B 180 id", 0, 0},
		"after it was published":               {a1 + "\na: 21 marking 1 A 20 published\na: 22 marked 1 A 20 published\nb: 240 claimed 1 B 230 id", 1, 0},
		"after a mark without a reply":         {a1 + "\na: 21 marking 1 A 20 published\nb: 240 claimed 1 B 230 id", 0, 0},
		"late without a reason":                {a1 + "\na: 21 marking 1 A 20 published\na: 22 late 1 A 20 published", 1, 0},
		"late, the other claim unknown":        {a1 + "\n" + late + "a: 140 late 1 A 130 published", 0, 0},
		"another entry":                        {a1 + "\nb: 100 claimed 2 B 30 id", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			entries := map[string]*entryLife{}
			for _, by := range []string{"a", "b"} {
				var lines []string
				for line := range strings.Lines(c.lines) {
					if mine, ok := strings.CutPrefix(line, by+": "); ok {
						lines = append(lines, strings.TrimSpace(mine))
					}
				}
				require.NoError(t, readClaims(strings.NewReader(strings.Join(lines, "\n")), by, entries))
			}
			broken, met := 0, 0
			for _, e := range entries {
				if e.broken(100*time.Nanosecond) != "" {
					broken++
				}
				met += e.met()
			}
			require.Equal(t, c.broken, broken)
			require.Equal(t, c.met, met)
		})
	}
}
