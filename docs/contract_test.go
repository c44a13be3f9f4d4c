package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The tables of providers.md have every interface of the contract, each with all of its own methods.
func TestTheContractOfProvidersIsWhole(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("providers.md")
	require.NoError(t, err)
	page := map[string][]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([A-Za-z.]+)` \\| ((?:`[A-Za-z]+`(?:, )?)+) \\|").FindAllStringSubmatch(string(text), -1) {
		page[row[1]] = strings.Split(strings.Trim(row[2], "`"), "`, `")
	}
	contract := contractOf(t, "../provider", "")
	for name, methods := range contractOf(t, "../claim", "claim.") {
		contract[name] = methods
	}
	require.Greater(t, len(contract), 25)
	require.Equal(t, contract, page)
}

// contractOf returns the methods of the exported interfaces of a package that have methods of their own.
func contractOf(t *testing.T, dir, prefix string) map[string][]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	contract := map[string][]string{}
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok || !spec.Name.IsExported() {
				return true
			}
			of, ok := spec.Type.(*ast.InterfaceType)
			if !ok {
				return true
			}
			for _, method := range of.Methods.List {
				for _, name := range method.Names {
					contract[prefix+spec.Name.Name] = append(contract[prefix+spec.Name.Name], name.Name)
				}
			}
			return true
		})
	}
	return contract
}
