package sqlite

import (
	"context"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// statementsOf finds every SQL constant of the package.
func statementsOf(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("*.go")
	require.NoError(t, err)
	set := token.NewFileSet()
	var files []*ast.File
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(set, path, nil, 0)
		require.NoError(t, err)
		files = append(files, f)
	}
	info := &types.Info{Defs: map[*ast.Ident]types.Object{}}
	cfg := types.Config{Error: func(error) {}} // no imports: constants do not need them
	_, _ = cfg.Check("sqlite", set, files, info)
	statement := regexp.MustCompile(`^\s*(with|select|insert|update|delete|savepoint|release|rollback)\s`)
	found := map[string]string{}
	for name, object := range info.Defs {
		c, ok := object.(*types.Const)
		if ok && c.Val().Kind() == constant.String && statement.MatchString(constant.StringVal(c.Val())) {
			found[name.Name] = constant.StringVal(c.Val())
		}
	}
	return found
}

func TestEveryStatementFitsTheSchema(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db, err := Open(ctx, filepath.Join(t.TempDir(), "schema.db"), nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, db.Migrate(ctx))
	found := statementsOf(t)
	require.Greater(t, len(found), 15)
	for name, query := range found {
		require.Equal(t, strings.ToLower(query), query, "%s is in lower case", name)
		s, err := db.SQL().PrepareContext(ctx, query)
		require.NoError(t, err, name)
		require.NoError(t, s.Close())
	}
	for _, query := range inTransactions {
		require.True(t, slices.Contains(values(found), query))
	}
}

func values(m map[string]string) (all []string) {
	for _, v := range m {
		all = append(all, v)
	}
	return all
}
