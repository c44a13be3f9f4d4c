package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kinora-go/kinora/internal/mutant"
	"github.com/stretchr/testify/require"
)

// unrecorded lists, a name on each line, the cells, mutants and parts that the present suite has not recorded yet. A line
// that names nothing fails, and so does one of an entry that is recorded.
const unrecorded = "unrecorded.txt"

// The records of make fault, make mutants and make long have an entry for everything but what unrecorded lists, no other
// one, and all are ok.
func TestTheRecordsAreComplete(t *testing.T) {
	t.Parallel()
	var mutants, parts []string
	for _, m := range mutant.All {
		mutants = append(mutants, m.Name)
	}
	for _, p := range longParts {
		parts = append(parts, p.name)
	}
	text, err := os.ReadFile(unrecorded)
	require.NoError(t, err)
	missing := strings.Fields(string(text))
	for _, name := range missing {
		require.Contains(t, slices.Concat(cellNames(cells), mutants, parts), name, "%s names nothing", unrecorded)
	}
	t.Run("report.json", func(t *testing.T) { isComplete[result](t, "report.json", cellNames(cells), missing, "make fault") })
	t.Run("mutants.json", func(t *testing.T) { isComplete[caught](t, "mutants.json", mutants, missing, "make mutants") })
	t.Run("long.json", func(t *testing.T) { isComplete[longResult](t, "long.json", parts, missing, "make long") })
}

func isComplete[T entry](t *testing.T, path string, names, missing []string, command string) {
	r, err := openRecord[T](path, names, nil)
	require.NoError(t, err)
	left := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return slices.Contains(missing, name) })
	var unknown, bad []string
	for _, e := range r.all {
		whole := e.ran().OK && e.ran().Fingerprint != "" // an entry without a fingerprint is of an earlier suite
		i := slices.Index(left, e.name())
		switch {
		case i >= 0:
			left = slices.Delete(left, i, i+1)
			if !whole {
				bad = append(bad, e.name())
			}
		case whole || !slices.Contains(missing, e.name()):
			unknown = append(unknown, e.name())
		}
	}
	require.Empty(t, left, "%s lacks these: %s", path, command)
	require.Empty(t, unknown, "%s has these, which name nothing, are there twice, or are in %s: %s", path, unrecorded, command)
	require.Empty(t, bad, "%s has these, which are not ok: %s", path, command)
}

// The record of make fault has enough kills that left work behind, and deliveries.
func TestTheRecordHasEnoughFaults(t *testing.T) {
	t.Parallel()
	r, err := openRecord[result]("report.json", nil, nil)
	require.NoError(t, err)
	kills, deliveries := 0, 0
	for _, one := range r.all {
		deliveries += one.Deliveries
		for _, role := range []role{producing, relaying, running, reading, laboring, building} {
			kills += one.Injected["kill_"+string(role)]
		}
	}
	require.Greater(t, kills, 500)
	require.Greater(t, deliveries, 1_000_000)
}

func TestARunContinuesFromItsRecord(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "record.json")
	open := func(code string, names ...string) *record[longResult] {
		r, err := openRecord[longResult](path, names, func(name string) string { return code + name })
		require.NoError(t, err)
		return r
	}
	r := open("0001", "a", "b", "c")
	require.False(t, r.has("a"))
	for _, name := range []string{"c", "a", "b"} {
		require.NoError(t, r.put(longResult{name, r.ended(name, name != "b", time.Now())}))
	}
	r = open("0001", "a", "b")
	require.True(t, r.has("a"))
	require.False(t, r.has("b"), "it was not ok")
	require.False(t, open("0002", "a", "b").has("a"), "the code has changed")
	require.NoError(t, r.put(longResult{"b", r.ended("b", true, time.Now())}))
	var names []string
	for _, e := range open("0001").all {
		names = append(names, e.Part)
	}
	require.Equal(t, []string{"a", "b"}, names, "in order, without c, which names nothing")
}

func TestCellsOfMutantsExist(t *testing.T) {
	t.Parallel()
	for _, m := range mutant.All {
		if len(m.Cells) > 0 {
			_, err := choose(strings.Join(m.Cells, ","))
			require.NoError(t, err, m.Name)
		}
	}
}
