package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each figure of the pages is that of its record, and each measured figure has one. Otherwise run make figures.
func TestThePagesHaveTheFiguresOfTheRecords(t *testing.T) {
	t.Parallel()
	r, err := load("../..")
	require.NoError(t, err)
	for _, page := range append(claims, others...) {
		text, err := os.ReadFile(filepath.Join("../..", page))
		require.NoError(t, err)
		after, err := rewrite(string(text), r)
		require.NoError(t, err, page)
		require.Equal(t, string(text), after, "%s: run make figures", page)
	}
	for _, page := range claims {
		text, err := os.ReadFile(filepath.Join("../..", page))
		require.NoError(t, err)
		findings, err := unrecorded(page, string(text), r, settings)
		require.NoError(t, err)
		require.Empty(t, findings)
	}
}

// The pages say that nothing was lost, doubled, invented or out of order.
func TestTheRecordOfTheFaultSuiteIsClean(t *testing.T) {
	t.Parallel()
	r, err := load("../..")
	require.NoError(t, err)
	for _, field := range []string{"failed", "lost", "doubled", "phantom", "misordered", "claims_broken"} {
		value, err := r.figure("cells", field)
		require.NoError(t, err)
		require.Equal(t, "0", value, field)
	}
	require.Equal(t, r.fields["mutants"]["recorded"], r.fields["mutants"]["caught"], "each mutant on record was caught")
	files, err := filepath.Glob("../../tests/fault/cell_*.go")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	require.Len(t, r.all, len(files), "a cell is declared in a file of its own")
	for _, name := range r.cells {
		require.Contains(t, r.cellTable(), "| `"+name+"` |", "the report has a cell that the code does not have")
	}
}

var bench = &records{fields: map[string]map[string]any{
	"relay/count": {"ours": 66292.9, "vs_limit": 0.6659, "date": "2026-11-23"},
	"late p99":    {"ours": 10.416},
	"cell/move":   {},
}}

func TestRewrite(t *testing.T) {
	t.Parallel()
	for before, want := range map[string]string{
		"<!-- =relay/count vs_limit -->0.70 of it":                                      "<!-- =relay/count vs_limit -->0.67 of it",
		"<!-- =relay/count ours -->71,256, and":                                         "<!-- =relay/count ours -->66,293, and",
		"<!-- =late p99 ours --> ms":                                                    "<!-- =late p99 ours -->10.4 ms",
		"on <!-- =relay/count date -->1 May 2026.":                                      "on <!-- =relay/count date -->23 November 2026.",
		"<!-- =cell/move lost -->5 lost":                                                "<!-- =cell/move lost -->no record lost",
		"<!-- figures: . ours . -->\n|a|b|c|\n|-|-|-|\n| `relay/count` | 1 (3) | 1 |\n": "<!-- figures: . ours . -->\n|a|b|c|\n|-|-|-|\n| `relay/count` | 66,293 (3) | 1 |\n",
		"<!-- figures: . p99/ours -->\n|a|b|\n|-|-|\n| `late`: x | 9, the same |\n":     "<!-- figures: . p99/ours -->\n|a|b|\n|-|-|\n| `late`: x | 10.4, the same |\n",
		"71,256 messages/s":                                                             "71,256 messages/s",
	} {
		got, err := rewrite(before, bench)
		require.NoError(t, err, before)
		require.Equal(t, want, got)
		again, err := rewrite(got, bench)
		require.NoError(t, err)
		require.Equal(t, got, again)
	}
	for _, wrong := range []string{
		"<!-- =relay/gone ours -->1",
		"<!-- =relay/count peer -->1",
		"<!-- made: gone -->\n<!-- end -->",
		"<!-- figures: . ours -->\n|a|b|\n|-|-|\n| `gone` | 1 |\n",
		"<!-- figures: . ours -->\n|a|b|c|\n|-|-|-|\n| `relay/count` | 1 | 2 |\n",
	} {
		_, err := rewrite(wrong, bench)
		require.Error(t, err, wrong)
	}
}

func TestMutantsOnRecord(t *testing.T) {
	t.Parallel()
	r := &records{fields: map[string]map[string]any{}, mutants: map[string]recorded{}}
	r.addMutants([]recorded{{"no_marker", true, "2026-11-27 02:04:58"}, {"no_fence", false, "2026-11-27 02:05:00"}})
	for field, want := range map[string]string{"recorded": "2", "caught": "1"} {
		got, err := r.figure("mutants", field)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	require.Regexp(t, "(?m)^\\| `no_marker` .* \\| 2026-11-27 \\|$", r.mutantTables())
	require.Regexp(t, "(?m)^\\| `no_fence` .* \\| no record \\|$", r.mutantTables())
}

func TestUnrecorded(t *testing.T) {
	t.Parallel()
	chosen := []setting{{"a.md", "leases of 2 s", "set by the cell"}}
	find := func(text string) []string {
		findings, err := unrecorded("a.md", text+" leases of 2 s", bench, chosen)
		require.NoError(t, err)
		return findings
	}
	for _, text := range []string{
		"It takes 76 µs.", "p99 was 6.6\nms", "falls to 0.28 of the limit", "71,256 messages", "| 3,414 |", "a fifth: 20 %", "3 times as fast",
		"twice as fast as the peer", "about 500 events a second", "took 27 minutes",
	} {
		require.NotEmpty(t, find(text), text)
	}
	for _, text := range []string{
		"<!-- =relay/count ours -->66,293 messages/s", "`go run . -for 2s`", "60,000 entries of 10,000 keys", "batches of 500", "(goal: at most 1.3)",
		"[page](page-12-ms.md), [site](https://x.org/5%20ms)", "```\n12 ms\n```", "five seconds",
		"<!-- figures: . ours -->\n| a | b |\n|-|-|\n| `relay/count` | 66,293 (1.5) |\n",
	} {
		require.Empty(t, find(text), text)
	}
	findings, err := unrecorded("a.md", "nothing", bench, chosen)
	require.NoError(t, err)
	require.True(t, len(findings) == 1 && strings.Contains(findings[0], "leases of 2 s"), "a setting that the page no longer has")
}
