package plan

import (
	"testing"

	"github.com/kinora-go/kinora/projector/internal/generation"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// row returns a generation that programs with versions from oldest to newest feed.
func row(number int, state provider.GenerationState, oldest, newest int) *generation.Row {
	g := &generation.Row{Build: provider.Build{Projector: "p", Generation: number}, State: state, Revision: 1}
	g.Oldest, g.Newest = oldest, newest
	return g
}

func of(g *generation.Row, how generation.How) *generation.Row {
	g.How = how
	return g
}

// What a program does, from the generations that it sees.
func TestPlans(t *testing.T) {
	t.Parallel()
	const live, standby, building, requested, retired = provider.GenerationLive, provider.GenerationStandby,
		provider.GenerationBuilding, provider.GenerationRequested, provider.GenerationRetired
	first := row(1, live, 1, 1)
	first.Revision = 0
	released := row(2, live, 1, 1)
	released.Released = true
	program := func(version int, how generation.How) Program {
		return Program{Version: version, OnChange: how, Reads: true}
	}
	creates := Program{Version: 1, Reads: true, Creates: true}
	const why, canceled = "this program applies nothing: the live read model is that of a newer version",
		"the read model of this version was canceled or dropped: request a rebuild, or deploy a newer version"
	for name, c := range map[string]struct {
		me   Program
		seen Seen
		main int // its number; 0: none
		do   Do
		row  int
		why  string
	}{
		"a program without a log":            {Program{Version: 2}, Seen{Rows: []*generation.Row{first}}, 1, Nothing, 0, ""},
		"the first program":                  {program(1, 0), Seen{Rows: []*generation.Row{first}}, 1, Nothing, 0, ""},
		"the first program creates tables":   {creates, Seen{Rows: []*generation.Row{first}}, 0, CreateFirst, 1, ""},
		"it has looked, they exist":          {creates, Seen{Rows: []*generation.Row{first}, Looked: true}, 1, Nothing, 0, ""},
		"the first program has version 2":    {program(2, 0), Seen{Rows: []*generation.Row{first}}, 0, CreateFirst, 1, ""},
		"the first program after a release":  {program(1, 0), Seen{Rows: []*generation.Row{row(1, retired, 0, 0), released}}, 2, Nothing, 0, ""},
		"it creates tables":                  {creates, Seen{Rows: []*generation.Row{row(1, retired, 0, 0), released}}, 0, CreateFirst, 2, ""},
		"its own version is live":            {program(2, generation.BlueGreen), Seen{Rows: []*generation.Row{row(1, retired, 1, 1), row(2, live, 2, 2)}}, 2, Nothing, 0, ""},
		"a request":                          {program(1, 0), Seen{Rows: []*generation.Row{row(1, live, 1, 1), of(row(2, requested, 0, 0), generation.InPlace)}}, 0, TakeUp, 2, ""},
		"a request, and a newer one is live": {program(1, 0), Seen{Rows: []*generation.Row{row(1, live, 2, 2), of(row(2, requested, 0, 0), generation.InPlace)}}, 0, Nothing, 0, why},
		"a newer program, no rebuild":        {program(2, generation.NoRebuild), Seen{Rows: []*generation.Row{row(1, live, 1, 1)}}, 0, Widen, 1, ""},
		"a newer program rebuilds":           {program(2, generation.BlueGreen), Seen{Rows: []*generation.Row{row(1, live, 1, 1)}}, 0, TakeUp, 2, ""},
		"its rebuild is going on":            {program(2, generation.BlueGreen), Seen{Rows: []*generation.Row{row(1, live, 1, 1), of(row(2, building, 2, 2), generation.BlueGreen)}}, 2, Nothing, 0, ""},
		"the old program goes on meanwhile":  {program(1, generation.BlueGreen), Seen{Rows: []*generation.Row{row(1, live, 1, 1), of(row(2, building, 2, 2), generation.BlueGreen)}}, 1, Nothing, 0, ""},
		"the old program stands by":          {program(1, generation.BlueGreen), Seen{Rows: []*generation.Row{row(1, standby, 1, 1), row(2, live, 2, 2)}}, 1, Nothing, 0, ""},
		"an older program feeds nothing":     {program(1, generation.BlueGreen), Seen{Rows: []*generation.Row{row(1, retired, 1, 1), row(2, live, 2, 2)}}, 0, Nothing, 0, why},
		"its rebuild was canceled":           {program(2, generation.BlueGreen), Seen{Rows: []*generation.Row{row(1, live, 1, 1), of(row(2, retired, 2, 2), generation.BlueGreen)}}, 0, Nothing, 0, canceled},
		"a verification is going on":         {program(2, generation.BlueGreen), Seen{Rows: []*generation.Row{row(1, live, 1, 1), of(row(2, building, 1, 1), generation.Scratch)}}, 0, Nothing, 0, ""},
		"it replaces an older rebuild":       {program(3, generation.BlueGreen), Seen{Rows: []*generation.Row{row(1, live, 1, 1), of(row(2, building, 2, 2), generation.BlueGreen)}}, 0, GiveUp, 2, ""},
		"a newer rebuild is going on":        {program(2, generation.BlueGreen), Seen{Rows: []*generation.Row{row(1, live, 1, 1), of(row(2, building, 3, 3), generation.BlueGreen)}}, 0, Nothing, 0, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := Of(c.me, c.seen)
			number := func(g *generation.Row) int {
				if g == nil {
					return 0
				}
				return g.Generation
			}
			require.Equal(t, []any{c.main, c.do, c.row, c.why}, []any{number(p.Main), p.Do, number(p.Row), p.Why})
		})
	}
}

// Which segments a runner reads.
func TestShares(t *testing.T) {
	t.Parallel()
	three := []string{"a", "b", "c"}
	for name, c := range map[string]struct {
		sharing Sharing
		share   Share
	}{
		"alone":                                 {Sharing{Runner: "a", Split: provider.Split{First: 1, Count: 3}}, Share{3, nil, []int{1, 2, 3}}},
		"the second of three begins at its own": {Sharing{Runner: "b", Runners: three, Held: map[int]bool{3: true}, Split: provider.Split{First: 1, Count: 8}}, Share{3, nil, []int{4, 5, 6, 7, 8, 1, 2}}},
		"the last of three has one less":        {Sharing{Runner: "c", Runners: three, Split: provider.Split{First: 1, Count: 8}}, Share{2, nil, []int{6, 7, 8, 1, 2, 3, 4, 5}}},
		"a third runner comes":                  {Sharing{Runner: "a", Runners: three, Mine: []int{4, 1, 3, 2}, Split: provider.Split{First: 1, Count: 8}}, Share{3, []int{1, 2, 3}, nil}},
		"a new split":                           {Sharing{Runner: "a", Mine: []int{1}, Split: provider.Split{First: 9, Count: 1}}, Share{1, nil, []int{9}}},
		"more runners than segments":            {Sharing{Runner: "c", Runners: three, Split: provider.Split{First: 1, Count: 2}}, Share{0, nil, nil}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, c.share, ShareOf(c.sharing))
		})
	}
}
