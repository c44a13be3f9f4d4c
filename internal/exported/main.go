// Command exported counts what packages export, as go doc shows it: constants, variables,
// functions, types, their methods, the methods of interfaces and the fields of structs.
//
//	go run ./internal/exported [-max N] [-v] DIRECTORY...
//
// With -v it lists the names. With more than -max names in all, it fails: every name is something
// to read and to keep.
package main

import (
	"flag"
	"fmt"
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"strings"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout)) }

func run(args []string, out io.Writer) int {
	flags := flag.NewFlagSet("exported", flag.ContinueOnError)
	flags.SetOutput(out)
	limit := flags.Int("max", 0, "fail above this number of names in all directories together; 0 means no limit")
	verbose := flags.Bool("v", false, "list the names")
	if flags.Parse(args) != nil {
		return 2
	}
	total := 0
	for _, dir := range flags.Args() {
		names, err := exported(dir)
		if err != nil {
			_, _ = fmt.Fprintln(out, err)
			return 1
		}
		total += len(names)
		_, _ = fmt.Fprintf(out, "%-12s %4d\n", filepath.Base(dir), len(names))
		if *verbose {
			_, _ = fmt.Fprintln(out, "  "+strings.Join(names, "\n  "))
		}
	}
	_, _ = fmt.Fprintf(out, "%-12s %4d\n", "in all", total)
	if *limit > 0 && total > *limit {
		_, _ = fmt.Fprintf(out, "more than %d: remove a name, or move names that only a provider needs to package provider\n", *limit)
		return 1
	}
	return 0
}

// exported returns the exported names of the package in dir, each type followed by its members.
func exported(dir string) ([]string, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	fset := token.NewFileSet()
	var files []*ast.File
	for _, path := range paths {
		file, err := parser.ParseFile(fset, path, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no Go files in %s", dir)
	}
	pkg, err := doc.NewFromFiles(fset, files, dir) // leaves out the names of _test.go files
	if err != nil {
		return nil, err
	}
	var names []string
	add := func(name string) {
		if ast.IsExported(name[strings.LastIndexByte(name, '.')+1:]) {
			names = append(names, name)
		}
	}
	values := func(all []*doc.Value) {
		for _, value := range all {
			for _, name := range value.Names {
				add(name)
			}
		}
	}
	funcs := func(prefix string, all []*doc.Func) {
		for _, f := range all {
			add(prefix + f.Name)
		}
	}
	values(pkg.Consts)
	values(pkg.Vars)
	funcs("", pkg.Funcs)
	for _, t := range pkg.Types {
		add(t.Name)
		for _, spec := range t.Decl.Specs {
			var members *ast.FieldList
			switch declared := spec.(*ast.TypeSpec).Type.(type) {
			case *ast.StructType:
				members = declared.Fields
			case *ast.InterfaceType:
				members = declared.Methods
			}
			if members == nil {
				continue
			}
			for _, field := range members.List {
				for _, name := range field.Names {
					add(t.Name + "." + name.Name)
				}
			}
		}
		values(t.Consts)
		values(t.Vars)
		funcs("", t.Funcs)
		funcs(t.Name+".", t.Methods)
	}
	return names, nil
}
