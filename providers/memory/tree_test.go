package memory

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// The test compares a tree with a map and a sorted list of its keys. Every earlier version must
// still have its content, because transactions and readers hold versions.
func TestTreeIsAnOrderedMapThatNeverChanges(t *testing.T) {
	t.Parallel()
	type version struct {
		tree *tree[int, int]
		want map[int]int
	}
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	now := version{want: map[int]int{}}
	var versions []version
	for step := range 3000 {
		key := random.IntN(300)
		want := maps.Clone(now.want)
		if random.IntN(3) == 0 {
			delete(want, key)
			now = version{now.tree.drop(key), want}
		} else {
			want[key] = step
			now = version{now.tree.put(key, step), want}
		}
		versions = append(versions, now)
	}
	for _, v := range versions {
		from := random.IntN(320)
		keys := slices.Sorted(maps.Keys(v.want))
		var got []int
		for k, value := range v.tree.from(from) {
			require.Equal(t, v.want[k], value, "seed %d", seed)
			got = append(got, k)
		}
		first, _ := slices.BinarySearch(keys, from)
		require.Equal(t, len(keys[first:]), len(got), "seed %d", seed)
		require.True(t, slices.Equal(keys[first:], got), "seed %d", seed)
		value, ok := v.tree.get(from)
		wantValue, wantOK := v.want[from]
		require.Equal(t, []any{wantValue, wantOK}, []any{value, ok}, "seed %d", seed)
		if len(keys) > 0 {
			require.Equal(t, keys[len(keys)-1], v.tree.last(), "seed %d", seed)
		}
	}
}

func TestTreeStaysShallow(t *testing.T) {
	t.Parallel()
	const n = 1 << 14
	var up *tree[int, struct{}]
	// in order, which turns a plain search tree into a list
	for i := range n {
		up = up.put(i, struct{}{})
	}
	require.Less(t, depth(up), 64)
}

func depth[V any](n *tree[int, V]) int {
	if n == nil {
		return 0
	}
	return 1 + max(depth(n.left), depth(n.right))
}

func TestFromStopsAtABreak(t *testing.T) {
	t.Parallel()
	var n *tree[string, int]
	for i, k := range []string{"d", "b", "a", "c"} {
		n = n.put(k, i)
	}
	var seen []string
	for k := range n.from("b") {
		if seen = append(seen, k); k == "c" {
			break
		}
	}
	require.Equal(t, []string{"b", "c"}, seen)
}
