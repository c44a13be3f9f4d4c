package plan

import (
	"slices"

	"github.com/kinora-go/kinora/provider"
)

// Sharing is what a runner sees of the segments of a projector.
type Sharing struct {
	Runner  string
	Runners []string // ids of those that share the segments
	Held    map[int]bool
	Mine    []int // segments that this runner reads
	Split   provider.Split
}

// Share is what it makes of that.
type Share struct {
	Quota int   // how many segments it should have
	Keep  []int // of Mine
	Ask   []int // to be asked for, in this order, until it has Quota
}

// ShareOf divides the segments. In the order of the runners' ids, the first ones have one segment more if
// the number does not divide evenly. So all runners agree on how many each has, and none takes more.
func ShareOf(s Sharing) Share {
	ids := slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(s.Runners), s.Runner))))
	rank, runners, count := slices.Index(ids, s.Runner), len(ids), s.Split.Count
	share := Share{Quota: count / runners}
	if rank < count%runners {
		share.Quota++
	}
	for _, number := range slices.Sorted(slices.Values(s.Mine)) {
		if s.Split.Has(number) && len(share.Keep) < share.Quota {
			share.Keep = append(share.Keep, number)
		}
	}
	if len(share.Keep) == share.Quota {
		return share
	}
	for i := range count { // runners begin at different segments, so that they do not ask for the same ones
		number := s.Split.First + (i+rank*count/runners)%count
		if !s.Held[number] && !slices.Contains(s.Mine, number) {
			share.Ask = append(share.Ask, number)
		}
	}
	return share
}
