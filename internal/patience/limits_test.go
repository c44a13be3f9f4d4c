package patience_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// notCovered are the directories that the check does not read. Measurements of bench take time.
var notCovered = []string{"bench"}

// No test sleeps, ends a wait after less than ten minutes, or compares the fastest of some calls by itself, except in a
// bubble of testing/synctest, whose clock is virtual. A comment on the line or on the line before it gives the reason for
// an exception: why a slow machine does not break the test.
func TestNoTestMeasuresTheMachine(t *testing.T) {
	t.Parallel()
	root := filepath.Join("..", "..")
	packages := map[string]map[string]string{} // by directory, the text of each file
	require.NoError(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, path)
		if err == nil && entry.IsDir() && (slices.Contains(notCovered, name) || strings.HasPrefix(entry.Name(), ".") && name != ".") {
			return filepath.SkipDir
		}
		if err != nil || filepath.Ext(path) != ".go" {
			return err
		}
		text, err := os.ReadFile(path)
		dir := filepath.Dir(name)
		if packages[dir] == nil {
			packages[dir] = map[string]string{}
		}
		packages[dir][name] = string(text)
		return err
	}))
	require.Greater(t, len(packages), 40)
	var found []string
	for _, files := range packages {
		found = append(found, measuring(t, files)...)
	}
	slices.Sort(found)
	require.Empty(t, found, "use package patience, or give the reason in a comment:\n%s", strings.Join(found, "\n"))
}

// tests is the test code of a directory: its test files, or all files if the package is for tests. Functions of one
// name count as one.
type tests struct {
	*token.FileSet
	files    []*ast.File
	values   map[string]ast.Expr // constants and variables
	bubbling map[string]bool     // functions that call a parameter in a bubble
	virtual  map[string]bool     // functions that are used in bubbles only
}

var importsTesting = regexp.MustCompile(`(?m)^(import |\t)"testing"$`)

// measuring returns the calls in test code that measure the machine.
func measuring(t *testing.T, files map[string]string) (found []string) {
	p := &tests{FileSet: token.NewFileSet(), values: map[string]ast.Expr{}, bubbling: map[string]bool{"synctest.Test": true}}
	isTest := func(name string) bool { return strings.HasSuffix(name, "_test.go") }
	kit := false
	for name, text := range files {
		kit = kit || !isTest(name) && importsTesting.MatchString(text)
	}
	for name, text := range files {
		f, err := parser.ParseFile(p.FileSet, name, text, parser.ParseComments)
		require.NoError(t, err)
		ast.Inspect(f, func(n ast.Node) bool {
			if spec, ok := n.(*ast.ValueSpec); ok && len(spec.Names) == len(spec.Values) {
				for i, id := range spec.Names {
					p.values[id.Name] = spec.Values[i]
				}
			}
			return true
		})
		if kit || isTest(name) {
			p.files = append(p.files, f)
		}
	}
	for before := -1; before != len(p.bubbling)+len(p.virtual); p.classify() {
		before = len(p.bubbling) + len(p.virtual)
	}
	for _, f := range p.files {
		p.walk(f, func(_ *ast.FuncDecl, n ast.Node, virtual bool) {
			if call, ok := n.(*ast.CallExpr); ok && !virtual && p.measures(call) && !p.commented(f, call) {
				found = append(found, fmt.Sprintf("%s: %s", p.Position(call.Pos()), types.ExprString(call.Fun)))
			}
		})
	}
	return found
}

// walk visits the nodes of a file: the declaration of a function that has the node, and whether it runs in a bubble.
func (p *tests) walk(f *ast.File, visit func(in *ast.FuncDecl, n ast.Node, virtual bool)) {
	for _, d := range f.Decls {
		in, _ := d.(*ast.FuncDecl)
		var below func(n ast.Node, virtual bool)
		below = func(n ast.Node, virtual bool) {
			ast.Inspect(n, func(n ast.Node) bool {
				if n != nil {
					visit(in, n, virtual)
				}
				call, ok := n.(*ast.CallExpr)
				if !ok || virtual || !p.bubbling[types.ExprString(call.Fun)] {
					return true
				}
				for _, arg := range call.Args {
					below(arg, true)
				}
				return false
			})
		}
		below(d, in != nil && p.virtual[in.Name.Name])
	}
}

// classify finds more functions of bubbles: those that are known make others known.
func (p *tests) classify() {
	inBubble, outside := map[string]bool{}, map[string]bool{}
	for _, f := range p.files {
		p.walk(f, func(in *ast.FuncDecl, n ast.Node, virtual bool) {
			id, ok := n.(*ast.Ident)
			switch {
			case !ok || in != nil && id == in.Name:
			case !virtual:
				outside[id.Name] = true
			default:
				inBubble[id.Name] = true
				if in != nil && slices.ContainsFunc(in.Type.Params.List, func(param *ast.Field) bool {
					_, isFunc := param.Type.(*ast.FuncType)
					return isFunc && len(param.Names) > 0 && param.Names[0].Name == id.Name
				}) {
					p.bubbling[in.Name.Name] = true
				}
			}
		})
	}
	p.virtual = map[string]bool{}
	for name := range inBubble {
		p.virtual[name] = !outside[name]
	}
}

var limits = regexp.MustCompile(`^((require|assert)\.(Eventually|EventuallyWithT|Never|Less|LessOrEqual|WithinDuration)f?|context\.With(Timeout|Deadline)|` +
	`time\.(After|AfterFunc|NewTimer)|time\.Now\(\)\.Add|.*\.Set(Read|Write)?Deadline|.*\.ReadyForConnections|chromedp\.WithPollingTimeout)$`)

// measures reports whether a call sleeps, or has a limit from a second to ten minutes.
func (p *tests) measures(call *ast.CallExpr) bool {
	fun := types.ExprString(call.Fun)
	if strings.Contains(fun, ".Less") && !strings.Contains(types.ExprString(call), "time.Since(") {
		return false // compares other values
	}
	if fun == "min" && strings.Contains(types.ExprString(call), "time.Since(") {
		return true // the shortest time of some calls: Fastest and Faster are for that
	}
	return fun == "time.Sleep" || limits.MatchString(fun) && slices.ContainsFunc(call.Args, func(arg ast.Expr) bool {
		d := p.duration(arg)
		return d >= time.Second && d < 10*time.Minute
	})
}

// duration returns the value of a constant such as 2*time.Minute, or 0.
func (p *tests) duration(e ast.Expr) time.Duration {
	switch e := e.(type) {
	case *ast.Ident:
		if value := p.values[e.Name]; value != nil {
			return p.duration(value)
		}
	case *ast.BasicLit:
		n, _ := strconv.Atoi(strings.ReplaceAll(e.Value, "_", ""))
		return time.Duration(n)
	case *ast.BinaryExpr:
		x, y := p.duration(e.X), p.duration(e.Y)
		return map[token.Token]time.Duration{token.MUL: x * y, token.ADD: x + y, token.SUB: x - y, token.QUO: x / max(y, 1)}[e.Op]
	case *ast.CallExpr:
		if types.ExprString(e.Fun) == "longtest.Or" {
			return p.duration(e.Args[0])
		}
	case *ast.SelectorExpr:
		return map[string]time.Duration{"time.Millisecond": time.Millisecond, "time.Second": time.Second, "time.Minute": time.Minute, "time.Hour": time.Hour}[types.ExprString(e)]
	}
	return 0
}

// commented reports whether a comment is on the line of a call or on the line before.
func (p *tests) commented(f *ast.File, call *ast.CallExpr) bool {
	line := p.Position(call.Pos()).Line
	return slices.ContainsFunc(f.Comments, func(c *ast.CommentGroup) bool {
		return p.Position(c.Pos()).Line <= line && p.Position(c.End()).Line >= line-1
	})
}

func TestSleepsAndLimitsOfTestsAreFound(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"func TestA(t *testing.T) {\n\tbest = min(best, time.Since(begin))\n}":                                                                                                                 "min",
		"func TestA(t *testing.T) {\n\ttime.Sleep(d)\n}":                                                                                                                                       "time.Sleep",
		"func TestA(t *testing.T) {\n\ttime.Sleep(d) // so that times differ\n}":                                                                                                               "",
		"func TestA(t *testing.T) {\n\t// So that times differ.\n\ttime.Sleep(d)\n}":                                                                                                           "",
		"func TestA(t *testing.T) {\n\t// A comment.\n\n\ttime.Sleep(d)\n}":                                                                                                                    "time.Sleep",
		"func TestA(t *testing.T) {\n\tsynctest.Test(t, func() { time.Sleep(d) })\n}":                                                                                                          "",
		"func TestA(t *testing.T) {\n\trequire.Eventually(t, f, time.Minute, x)\n}":                                                                                                            "require.Eventually",
		"func TestA(t *testing.T) {\n\trequire.Eventually(t, f, 10*time.Minute, x)\n}":                                                                                                         "",
		"func TestA(t *testing.T) {\n\t<-time.After(soon)\n}\n\nconst soon = 30 * time.Second":                                                                                                 "time.After",
		"func TestA(t *testing.T) {\n\trequire.Never(t, f, 300*time.Millisecond, x)\n}":                                                                                                        "",
		"func TestA(t *testing.T) {\n\tctx, end := context.WithTimeout(t.Context(), longtest.Or(3*time.Minute, time.Hour))\n}":                                                                 "context.WithTimeout",
		"func TestA(t *testing.T) {\n\tfor end := time.Now().Add(time.Minute); time.Now().Before(end); {\n\t}\n}":                                                                              "time.Now().Add",
		"func TestA(t *testing.T) {\n\trequire.Less(t, time.Since(began), 3*time.Second)\n}":                                                                                                   "require.Less",
		"func TestA(t *testing.T) {\n\trequire.Less(t, b.Delay(1), 3*time.Second)\n}":                                                                                                          "",
		"func TestA(t *testing.T) {\n\tbubble(t, func() { help() })\n}\n\nfunc bubble(t *testing.T, do func()) {\n\tsynctest.Test(t, func() { do() })\n}\n\nfunc help() {\n\ttime.Sleep(d)\n}": "",
		"func TestA(t *testing.T) {\n\tsynctest.Test(t, func() { help() })\n\thelp()\n}\n\nfunc help() {\n\ttime.Sleep(d)\n}":                                                                  "time.Sleep",
	} {
		found := measuring(t, map[string]string{"a_test.go": "package a\n\n" + text, "b.go": "package a\n\nfunc b() { time.Sleep(d) }"})
		if want == "" {
			require.Empty(t, found, text)
			continue
		}
		require.Len(t, found, 1, text)
		require.Regexp(t, `^a_test\.go:\d+:\d+: `+regexp.QuoteMeta(want)+`$`, found[0], text)
	}
	kit := "package kit\n\nimport \"testing\"\n\nfunc Wait(t *testing.T) { time.Sleep(d) }"
	require.Len(t, measuring(t, map[string]string{"kit.go": kit}), 1)
}
