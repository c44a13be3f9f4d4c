package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/kinora-go/kinora/internal/mutant"
)

const (
	suites = "providers/providertest" // its cases are tests of every provider
	faults = "tests/fault"
)

// test is a test of a package, a case of a suite, or a cell of the fault suite.
type test struct {
	pkg  string // the directory, such as "providers/postgres"
	name string // of a case: the suite and the case, as go test prints them: "EventStore/a_conflict_writes_nothing"

	isCell bool
}

// testsByLine returns the test of each line on which a comment may name promises.
func testsByLine(files *token.FileSet, file *ast.File, pkg string, suiteOf map[string]string) map[int]test {
	tests := map[int]test{}
	line := func(p token.Pos) int { return files.Position(p).Line }
	for _, decl := range file.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			name := decl.Name.Name
			isTest := decl.Recv == nil && (strings.HasPrefix(name, "Test") || strings.HasPrefix(name, "Fuzz"))
			if isTest && decl.Doc != nil {
				for l := line(decl.Doc.Pos()); l <= line(decl.Doc.End()); l++ {
					tests[l] = test{pkg: pkg, name: name}
				}
			}
		case *ast.GenDecl:
			if pkg != suites && pkg != faults {
				continue
			}
			for _, spec := range decl.Specs {
				for pos, t := range cases(spec, pkg, suiteOf) {
					tests[line(pos)-1] = t
				}
			}
		}
	}
	return tests
}

// cases returns the cases or cells of a variable, by the positions of their names.
func cases(spec ast.Spec, pkg string, suiteOf map[string]string) map[token.Pos]test {
	all := map[token.Pos]test{}
	values, ok := spec.(*ast.ValueSpec)
	if !ok {
		return nil
	}
	ast.Inspect(values, func(n ast.Node) bool {
		name, ok := caseName(n)
		switch {
		case ok && pkg == suites:
			all[n.Pos()] = test{pkg: pkg, name: suiteOf[values.Names[0].Name] + "/" + strings.ReplaceAll(name, " ", "_")}
		case ok:
			all[n.Pos()] = test{pkg: pkg, name: name, isCell: true}
		}
		return true
	})
	return all
}

// caseName returns the value of the field name of a case or a cell.
func caseName(n ast.Node) (string, bool) {
	field, ok := n.(*ast.KeyValueExpr)
	if !ok {
		return "", false
	}
	key, isName := field.Key.(*ast.Ident)
	value, isText := field.Value.(*ast.BasicLit)
	if !isName || !isText || key.Name != "name" {
		return "", false
	}
	name, err := strconv.Unquote(value.Value)
	return name, err == nil
}

// readSuites returns the suite of each variable with cases: the exported function of package providertest that
// names the variable.
func readSuites(root string) (map[string]string, error) {
	suiteOf := map[string]string{}
	paths, err := filepath.Glob(filepath.Join(root, suites, "*.go"))
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || f.Recv != nil || !f.Name.IsExported() || f.Body == nil {
				continue
			}
			ast.Inspect(f.Body, func(n ast.Node) bool {
				if id, ok := n.(*ast.Ident); ok {
					suiteOf[id.Name] = f.Name.Name
				}
				return true
			})
		}
	}
	return suiteOf, nil
}

// includes reports whether the test of a mutant is this test or a part of it.
func (t test) includes(part mutant.Test) bool {
	names := strings.Split(part.Name, "/")
	if t.pkg != suites {
		return !t.isCell && path.Clean(part.Package) == t.pkg && names[0] == t.name
	}
	suite, name, _ := strings.Cut(t.name, "/")
	return strings.HasSuffix(names[0], "Conformance") && names[len(names)-1] == name &&
		(names[1] == suite || strings.HasPrefix(names[0], "TestBatched")) // tests of one suite do not name it
}
