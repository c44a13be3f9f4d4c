package main

import (
	"go/ast"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStatementWithoutPointsIsReported(t *testing.T) {
	t.Parallel()
	const update = "query 7 update kinora.outbox set"
	for name, c := range map[string]struct {
		lines string
		where string
	}{
		"points on both sides":              {"point 7 a: before|" + update + "|result 7|point 7 a: after|shut", ""},
		"no point before":                   {update + "|result 7|point 7 a: after|shut", "no point right before"},
		"no point after":                    {"point 7 a: before|" + update + "|result 7|query 7 commit|point 7 b|shut", "no point right after"},
		"no point after the last statement": {"point 7 a: before|" + update + "|result 7|shut", "no point right after"},
		"killed":                            {"point 7 a: before|" + update + "|life|shut", ""},
		"points of another goroutine":       {"point 8 a: before|" + update + "|result 7|point 7 a: after|shut", "no point right before"},
		"a read":                            {"query 7 select 1|result 7|shut", ""},
		"a part of a transaction":           {"point 7 transaction: before|query 7 begin|result 7|" + update + "|result 7|point 7 x|query 7 commit|result 7|point 7 y|shut", ""},
		"a batch that reads":                {"query 7 select 1; select 2|result 7|shut", ""},
		"a batch that moves a checkpoint":   {"query 7 select 1; select kinora.advance(1)|result 7|shut", "no point right before"},
		"a batch that begins a transaction": {"query 7 begin; insert into kinora.markers|result 7|point 7 x|shut", "no point right before"},
	} {
		bare := map[string]*bareStep{}
		_, err := readSteps(strings.NewReader("1 "+strings.ReplaceAll(c.lines, "|", "\n1 ")+"\n"), bare)
		require.NoError(t, err, name)
		var where []string
		for _, b := range bare {
			where = append(where, b.where)
		}
		if c.where == "" {
			require.Empty(t, where, name)
		} else {
			require.Contains(t, where, c.where, name)
		}
	}
}

func TestPointsAreFound(t *testing.T) {
	t.Parallel()
	points, err := findPoints()
	require.NoError(t, err)
	require.Subset(t, points, []string{"append: before", "commit: after", "publish: before", "ack: after"})
}

// A point must also be passed if its step fails: for the process, the step has then happened.
func TestPointIsPassedEvenIfItsStepFails(t *testing.T) {
	t.Parallel()
	require.NoError(t, eachFile(func(path string, file *ast.File) {
		step := ""
		ast.Inspect(file, func(n ast.Node) bool {
			switch n.(type) {
			case *ast.ReturnStmt:
				require.Empty(t, step, "%s may return without a point after", path)
			case *ast.FuncLit:
				return step == "" // the returned call is part of the step
			}
			switch name, is := pointOf(n); {
			case strings.HasSuffix(name, ": before"):
				step = name
			case is:
				step = ""
			}
			return true
		})
		require.Empty(t, step, "%s has no point after", path)
	}))
}
