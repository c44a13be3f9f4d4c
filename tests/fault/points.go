package main

import (
	"bufio"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// findPoints finds the crash points in the module's source.
func findPoints() (points []string, err error) {
	err = eachFile(func(_ string, file *ast.File) {
		ast.Inspect(file, func(n ast.Node) bool {
			if point, ok := pointOf(n); ok {
				points = append(points, point)
			}
			return true
		})
	})
	slices.Sort(points)
	return slices.Compact(points), err
}

// eachFile calls f for each source file of the module that may have points.
func eachFile(f func(path string, file *ast.File)) error {
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/kinora-go/kinora").Output()
	if err != nil {
		return err
	}
	return filepath.WalkDir(strings.TrimSpace(string(root)), func(path string, d fs.DirEntry, err error) error {
		switch name := d.Name(); {
		case err != nil:
			return err
		case d.IsDir() && (name == "tests" || name == "bench" || name == "examples" || strings.HasPrefix(name, ".")):
			return filepath.SkipDir
		case strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go"):
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			if err != nil {
				return err
			}
			f(path, file)
		}
		return nil
	})
}

// pointOf returns the name of the crash point if n is a call of crash.Point.
func pointOf(n ast.Node) (name string, ok bool) {
	call, ok := n.(*ast.CallExpr)
	if !ok || len(call.Args) != 1 {
		return "", false
	}
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || f.Sel.Name != "Point" {
		return "", false
	}
	text, ok := call.Args[0].(*ast.BasicLit)
	if pack, is := f.X.(*ast.Ident); !ok || !is || pack.Name != "crash" {
		return "", false
	}
	name, err := strconv.Unquote(text.Value)
	return name, err == nil
}

// exempt lists parts of statements that need no points.
var exempt = []struct{ sql, why string }{
	{"with q as materialized ( select n.*, coalesce(nullif(n.generation", "outcomes are only read"},
	{"begin", "nothing is written yet"},
	{"rollback", "nothing is written"},
	{"select ", "a read"},
	{"with known as materialized (", "a read: why an append was refused"},
	{"with b as materialized (", "a read: which events are not applied"},
	{"with ck as materialized (select clock_timestamp() t), keep as materialized (", "once a minute: deletes entries that are no longer read"},
	{"with ck as materialized (select clock_timestamp() t), h as materialized ( select n.projector", "a read: which parked messages are due"},
	{"with ck as materialized (select clock_timestamp() t), seen as materialized ( select p.*, row_number()", "a read: which tasks are due"},
	{"with f as materialized (", "a read: a list of tasks"},
	{"with recursive k(", "a read: the kinds of tasks"},
	{"with t as (select to_regclass", "a read: the columns of tables to compare"},
	{"-- ping", "no effect"},
	{"listen ", "polling finds what a notification misses"},
	{"unlisten ", "polling finds what a notification misses"},
}

// isExempt reports whether a statement needs no points. The sql of a batch contains all its
// statements: it needs none if all of them read, and none takes a lock or moves a checkpoint.
func isExempt(sql string) bool {
	for _, write := range []string{"insert into", "delete from", "update kinora"} {
		if strings.Contains(sql, write) {
			return false
		}
	}
	parts := strings.Split(sql, "; ")
	if len(parts) == 1 {
		return slices.ContainsFunc(exempt, func(p struct{ sql, why string }) bool { return strings.HasPrefix(sql, p.sql) })
	}
	return !slices.ContainsFunc(parts, func(part string) bool {
		return !strings.HasPrefix(strings.TrimSpace(part), "select ") || strings.Contains(part, "_lock") || strings.Contains(part, "kinora.advance")
	})
}

// whole lists the points before a transaction that the library begins and commits in one call.
var whole = []string{"transaction: before", "set checkpoint: before"}

type bareStep struct {
	n     int
	where string
}

// lastStep is the last traced step of a goroutine.
type lastStep struct {
	point string // the name of the point, if the last step passed one
	query string // the statement, if it has not been followed by a point yet
	exact bool   // the statement must have points
}

// bareSteps returns the statements of all processes without a point right before or right after
// them. A transaction that the library begins and commits in one call (whole) has points
// only around the whole, because its statements are invisible until its commit.
func bareSteps(dir string) (bare map[string]*bareStep, passed int, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "trace-*-[0-9]*"))
	if err != nil {
		return nil, 0, err
	}
	bare = map[string]*bareStep{}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, 0, err
		}
		n, err := readSteps(f, bare)
		_ = f.Close()
		if err != nil {
			return nil, 0, err
		}
		passed += n
	}
	return bare, passed, nil
}

// readSteps reads the steps of one process in all its lives. A goroutine number may belong to
// another goroutine in the next life, so a life starts without points, and a statement that its
// process died after is not counted.
func readSteps(from io.Reader, bare map[string]*bareStep) (passed int, err error) {
	note := func(sql, where string) {
		if bare[sql] == nil {
			bare[sql] = &bareStep{where: where}
		}
		bare[sql].n++
	}
	all := map[string]*lastStep{}
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		_, line, _ := strings.Cut(lines.Text(), " ")
		what, line, _ := strings.Cut(line, " ")
		number, rest, _ := strings.Cut(line, " ")
		if what == "life" || what == "shut" {
			for _, w := range all {
				if w.query != "" && what == "shut" {
					note(w.query, "no point right after")
				}
			}
			clear(all)
			continue
		}
		if what != "point" && what != "query" && what != "result" {
			continue
		}
		w := all[number]
		if w == nil {
			w = &lastStep{}
			all[number] = w
		}
		switch what {
		case "point":
			w.point, w.query = rest, ""
			passed++
		case "query":
			if w.exact = !isExempt(rest) && !slices.Contains(whole, w.point); !w.exact {
				break
			}
			if w.query != "" {
				note(w.query, "no point right after")
			}
			if w.point == "" {
				note(rest, "no point right before")
			}
			w.point, w.query = "", rest
		}
	}
	return passed, lines.Err()
}
