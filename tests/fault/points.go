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

// eachFile has f see each file of the module's source that may have points.
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

// pointOf is the name of the point, if n is one.
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

// pointless are statements that need no points, by a part of each.
var pointless = []struct{ sql, why string }{
	{"begin", "nothing has happened yet"},
	{"rollback", "nothing has happened"},
	{"select ", "a read, unless it takes part in a batch"},
	{"with known as materialized (", "a read: why an append was refused"},
	{"with ck as materialized (select clock_timestamp() t), keep as materialized (", "once a minute: entries that nobody reads any more"},
	{"with ck as materialized (select clock_timestamp() t), h as materialized ( select n.projector", "a read: which parked messages are due"},
	{"-- ping", "nothing"},
	{"listen ", "what is not heard is polled for"},
	{"unlisten ", "what is not heard is polled for"},
}

// needsNone tells whether a statement needs no points. Of a batch, all parts are in sql.
func needsNone(sql string) bool {
	if strings.Contains(sql, "; ") || strings.Contains(sql, "insert into") || strings.Contains(sql, "delete from") || strings.Contains(sql, "update kinora") {
		return false
	}
	return slices.ContainsFunc(pointless, func(p struct{ sql, why string }) bool { return strings.HasPrefix(sql, p.sql) })
}

type bareStep struct {
	n     int
	where string
}

// walk is what a goroutine did last.
type walk struct {
	point string // the last thing was to pass this one
	said  string // or this statement, which has yet to meet a point
	exact bool   // which counts
}

// bareSteps are the statements, of all processes, that have no point right before or right after them. Within a
// transaction of the library's own that it begins and commits in one go ("transaction") only the whole has points: until
// its commit nobody sees any of it.
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

// readSteps reads those of one process, in all its lives. A number of a goroutine may be another one's in the next life:
// then it begins at no point, and a statement that its process died after is not counted.
func readSteps(from io.Reader, bare map[string]*bareStep) (passed int, err error) {
	note := func(sql, where string) {
		if bare[sql] == nil {
			bare[sql] = &bareStep{where: where}
		}
		bare[sql].n++
	}
	all := map[string]*walk{}
	lines := bufio.NewScanner(from)
	for lines.Scan() {
		_, line, _ := strings.Cut(lines.Text(), " ")
		what, line, _ := strings.Cut(line, " ")
		number, rest, _ := strings.Cut(line, " ")
		if what == "life" || what == "shut" {
			for _, w := range all {
				if w.said != "" && what == "shut" {
					note(w.said, "no point right after")
				}
			}
			clear(all)
			continue
		}
		if what != "point" && what != "says" && what != "said" {
			continue
		}
		w := all[number]
		if w == nil {
			w = &walk{}
			all[number] = w
		}
		switch what {
		case "point":
			w.point, w.said = rest, ""
			passed++
		case "says":
			if w.exact = !needsNone(rest) && w.point != "transaction: before"; !w.exact {
				break
			}
			if w.said != "" {
				note(w.said, "no point right after")
			}
			if w.point == "" {
				note(rest, "no point right before")
			}
			w.point, w.said = "", rest
		}
	}
	return passed, lines.Err()
}
