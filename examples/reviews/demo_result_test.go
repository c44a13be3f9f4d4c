package main

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/memory"
)

// TestVerdict: OK is true only if the result proves the effect of markers.
func TestVerdict(t *testing.T) {
	t.Parallel()
	expected := &tally{accepted: 3, rejected: 1, stars: map[string]map[string]int{
		"a": {"ann": 5, "bob": 4}, "b": {"ann": 1}, "c": {}, // c: all withdrawn
	}}
	right := []rating{{"a", 2, 9}, {"b", 1, 1}, {"c", 0, 0}}
	doubled := []rating{{"a", 4, 18}, {"b", 1, 1}, {"c", 0, 0}}
	injected := counts{Deliveries: 8, Duplicates: 3, Injected: 2}
	for name, c := range map[string]struct {
		exact, control []rating
		counts         counts
		kills, wanted  int
		ok             bool
	}{
		"proven":                         {right, doubled, injected, 5, 5, true},
		"exact is wrong":                 {doubled, doubled, injected, 5, 5, false},
		"exact lacks a product":          {right[1:], doubled, injected, 5, 5, false},
		"exact has an extra product":     {append([]rating{{"x", 1, 1}}, right...), doubled, injected, 5, 5, false},
		"exact has wrong stars":          {[]rating{{"a", 2, 8}, {"b", 1, 1}}, doubled, injected, 5, 5, false},
		"control right with copies":      {right, right, injected, 5, 5, false},
		"control right without copies":   {right, right, counts{}, 5, 5, true},
		"one kill too few":               {right, doubled, injected, 4, 5, false},
		"no row for a withdrawn product": {right[:2], doubled, injected, 5, 5, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newDemoResult(expected, c.exact, c.control)
			r.Kills = c.kills
			r.count(c.counts, c.wanted)
			require.Equal(t, c.ok, r.OK)
			require.Equal(t, totals{3, 10}, r.Expected)
			require.NotEmpty(t, r.String())
		})
	}
}

// TestWrongRowsComeFirst: the table lists wrong rows first, because it shows only some rows.
func TestWrongRowsComeFirst(t *testing.T) {
	t.Parallel()
	expected := &tally{stars: map[string]map[string]int{}}
	var right []rating
	for c := 'a'; c <= 'z'; c++ {
		expected.stars[string(c)] = map[string]int{"ann": 3}
		right = append(right, rating{string(c), 1, 3})
	}
	exact, control := append([]rating(nil), right...), append([]rating(nil), right...)
	exact[25].Stars++
	control[24].Reviews += 7
	table := newDemoResult(expected, exact, control).String()
	require.Regexp(t, `(?s)control\nz .*1 / 4  wrong.*\ny .*8 / 3  wrong\na .*and 16 more`, table)
}

// TestTally: the ratings computed from the commands match the events.
func TestTally(t *testing.T) {
	t.Parallel()
	db, err := memory.New(nil)
	require.NoError(t, err)
	c, err := newCommander(db, 1, 3, 500)
	require.NoError(t, err)
	require.NoError(t, c.run(t.Context(), func() int { return 1 << 30 }))
	require.Equal(t, 500, c.tally.accepted+c.tally.rejected)
	require.Greater(t, c.tally.rejected, 20)
	require.Less(t, int(c.events.Load()), c.tally.accepted, "some accepted commands change nothing")
	require.Equal(t, int(c.events.Load()), c.estimate())
	for product, authors := range c.tally.stars {
		stored := map[string]int{}
		for i := range 40 {
			author := fmt.Sprintf("author-%02d", i+1)
			for raw, err := range db.ReadStream(t.Context(), "review-"+eventstore.JoinID(product, author), 0) {
				require.NoError(t, err)
				var data struct{ Stars int }
				require.NoError(t, json.Unmarshal(raw.Data, &data))
				if stored[author] = data.Stars; raw.Type == "review.withdrawn" {
					delete(stored, author)
				}
			}
		}
		require.Equal(t, stored, authors)
	}
}
