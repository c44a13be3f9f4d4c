//go:build unix

package docs_test

import (
	"bytes"
	"errors"
	"fmt"
	"go/format"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
)

// In a module of its own, a reader adds the files of the guide's pages in order. They compile and are formatted, and
// the commands print what the pages show.
func TestGuide(t *testing.T) {
	t.Parallel()
	pages, err := filepath.Glob("guide/[0-9]*.md")
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(pages), 10)
	number := func(path string) (n int) {
		_, err := fmt.Sscanf(filepath.Base(path), "%d-", &n)
		require.NoError(t, err, path)
		return n
	}
	slices.SortFunc(pages, func(a, b string) int { return number(a) - number(b) })
	index, err := os.ReadFile("guide/README.md")
	require.NoError(t, err)
	var parsed [][]any
	for _, path := range pages {
		name := filepath.Base(path)
		require.Contains(t, string(index), fmt.Sprintf("| [%d. ", number(path)))
		require.Contains(t, string(index), "]("+name+")")
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		blocks := parsePage(t, name, string(text))
		require.NotEmpty(t, blocks, "%s has no code", name)
		parsed = append(parsed, blocks)
	}
	narrowBuilds(parsed)
	r := newReader(t, "example.com/reviews")
	for i, path := range pages {
		ok := t.Run(strings.TrimSuffix(filepath.Base(path), ".md"), func(t *testing.T) { r.follow(t, parsed[i]) })
		if !ok {
			return // later pages build on this one
		}
	}
	require.Empty(t, r.run(t, "go vet ./..."))
}

// narrowBuilds lets each build of all commands build those that the pages use before the next such build: to link all
// of them each time would take a minute in all. The others are compiled only.
func narrowBuilds(pages [][]any) {
	const all = "go build -o bin/ ./cmd/..."
	commands := map[string]bool{}
	for _, b := range slices.Concat(pages...) {
		if f, ok := b.(file); ok {
			commands[f.path] = true
		}
	}
	uses := regexp.MustCompile(`\bbin/(\w+)`)
	used := map[string]bool{}
	for _, blocks := range slices.Backward(pages) {
		for _, b := range slices.Backward(blocks) {
			c, _ := b.(console)
			for i, line := range slices.Backward(c.lines) {
				if line[0] == all {
					c.lines[i][0] = strings.Join(append([]string{"go build -o bin/"}, slices.Sorted(maps.Keys(used))...), " ")
					clear(used)
				} else if one, ok := strings.CutPrefix(line[0], "go build -o bin/ "); ok {
					delete(used, one)
				}
				for _, m := range uses.FindAllStringSubmatch(line[0], -1) {
					if commands["cmd/"+m[1]+"/main.go"] {
						used["./cmd/"+m[1]] = true
					}
				}
			}
		}
	}
}

// file is a file that the reader creates or replaces.
type file struct{ path, text string }

// console is a block of commands with their output.
type console struct {
	stays  bool           // the last command runs until ^C
	prints bool           // no command: the output of a command that is still running
	in     string         // that command, also of ^C; "": the last one, and ^C ends all
	varies *regexp.Regexp // parts of the output that differ between runs
	lines  [][2]string    // command and output
}

// The forms of the blocks of a page. A block of "sh" is not run.
var (
	fileForm    = regexp.MustCompile("\\*\\*File `([^`]+)`\\*\\*[^\n]*\n\n$")
	notesForm   = regexp.MustCompile(`(?:<!-- .* -->\n)+$`) // before a console
	noteForm    = regexp.MustCompile(`<!-- (\w+)(?:: (.*))? -->\n`)
	commandForm = regexp.MustCompile(`(?m)^(?:\$ (.*)|(\^C))\n`)
)

// parsePage returns the files and consoles of a page, in order.
func parsePage(t *testing.T, name, page string) (blocks []any) {
	t.Helper()
	for _, at := range fenceForm.FindAllStringSubmatchIndex(page, -1) {
		before, lang, text := page[:at[0]], page[at[2]:at[3]], page[at[4]:at[5]]
		if path := fileForm.FindStringSubmatch(before); path != nil {
			blocks = append(blocks, file{path[1], text})
			continue
		}
		if lang == "sh" {
			continue
		}
		require.Equal(t, "console", lang, "%s: a block must be a file, a console or sh:\n%s", name, text)
		blocks = append(blocks, parseConsole(t, name, before, text))
	}
	return blocks
}

func parseConsole(t *testing.T, name, before, text string) console {
	t.Helper()
	var c console
	for _, note := range noteForm.FindAllStringSubmatch(notesForm.FindString(before), -1) {
		switch note[1] {
		case "stays":
			c.stays = true
		case "prints":
			c.prints = true
		case "in":
			c.in = note[2]
		case "varies":
			c.varies = regexp.MustCompile(note[2])
		default:
			require.Fail(t, "unknown note", "%s: %s", name, note[0])
		}
	}
	commands := commandForm.FindAllStringSubmatchIndex(text, -1)
	if c.prints {
		require.Empty(t, commands, "%s: the output of a running command contains a command:\n%s", name, text)
		c.lines = [][2]string{{"", text}}
		return c
	}
	require.NotEmpty(t, commands, "%s: a console without a command:\n%s", name, text)
	for n, m := range commands {
		end := len(text)
		if n+1 < len(commands) {
			end = commands[n+1][0]
		}
		command := strings.TrimSuffix(strings.TrimPrefix(text[m[0]:m[1]], "$ "), "\n")
		c.lines = append(c.lines, [2]string{command, text[m[1]:end]})
	}
	return c
}

// reader does what the guide says, in a directory of its own.
type reader struct {
	t       *testing.T // of all pages
	dir     string
	env     []string
	running []*process
	server  bool // REVIEWS_DB names a PostgreSQL database
}

// built compiles Kinora once, before readers do so at the same time.
var built sync.Once

// newReader creates a module with the requirements of Kinora's own, so that it needs no network.
func newReader(t *testing.T, module string) *reader {
	t.Helper()
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	r := &reader{t: t, dir: t.TempDir()}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	require.NoError(t, err)
	text := regexp.MustCompile(`(?m)^module .*$`).ReplaceAllString(string(mod), "module "+module)
	text += "\nrequire github.com/kinora-go/kinora v0.0.0\n\nreplace github.com/kinora-go/kinora => " + root + "\n"
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go.mod"), []byte(text), 0o600))
	sum, err := os.ReadFile(filepath.Join(root, "go.sum"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go.sum"), sum, 0o600))
	for _, v := range os.Environ() {
		// With CI, golden files are not written.
		if name, _, _ := strings.Cut(v, "="); !strings.HasPrefix(name, "REVIEWS_") && name != "CI" && name != "KINORA_GOLDEN" {
			r.env = append(r.env, v)
		}
	}
	// -w leaves out debug information, which makes linking faster. Without paths, all clones share the build cache.
	r.env = append(r.env, "GOFLAGS=-mod=mod -ldflags=-w -trimpath", "GOWORK=off")
	built.Do(func() { r.run(t, "go build github.com/kinora-go/kinora/...") })
	t.Cleanup(func() {
		for _, p := range r.running {
			_ = p.cmd.Process.Kill()
			_ = p.cmd.Wait()
		}
	})
	return r
}

// follow creates the files and runs the consoles of a page. It compiles the module with its tests at the end, and before
// it replaces a file that was not compiled. Nothing is linked.
func (r *reader) follow(t *testing.T, blocks []any) {
	unchecked := map[string]bool{}
	check := func() {
		if len(unchecked) > 0 {
			require.Empty(t, r.run(t, "go list -export -test ./... > /dev/null"))
		}
		clear(unchecked)
	}
	for _, b := range blocks {
		switch b := b.(type) {
		case file:
			if strings.HasSuffix(b.path, ".go") {
				formatted, err := format.Source([]byte(b.text))
				require.NoError(t, err, b.path)
				require.Equal(t, string(formatted), b.text, "%s is not formatted", b.path)
				if unchecked[b.path] {
					check()
				}
				unchecked[b.path] = true
			}
			path := filepath.Join(r.dir, b.path)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
			require.NoError(t, os.WriteFile(path, []byte(b.text), 0o600))
		case console:
			r.play(t, b)
		}
	}
	check()
	require.Empty(t, r.running, "a command is left running")
}

func (r *reader) play(t *testing.T, c console) {
	for i, line := range c.lines {
		command, want := line[0], line[1]
		// Tests of the guide take the server from KINORA_POSTGRES, or start one.
		if strings.Contains(command, "bin/pg ") && !r.server {
			r.env = append(r.env, "REVIEWS_DB="+postgrestest.DSN(r.t, &postgres.Config{Route: outbox.ByCategory}))
			r.server = true
		}
		var got string
		switch {
		case c.prints:
			got = r.read(t, c.in, want)
		case command == "^C":
			got = r.interrupt(t, c.in)
		case c.stays && i == len(c.lines)-1:
			got = r.start(t, command, want)
		default:
			got = r.run(t, command)
		}
		require.Equal(t, normalize(want, c.varies), normalize(got, c.varies), "%s\n%s", command, got)
	}
}

// normalize replaces what differs between runs: durations of tests, and what the page declares as varying.
func normalize(output string, varies *regexp.Regexp) string {
	output = regexp.MustCompile(`\d+\.\d\d+s|\(cached\)`).ReplaceAllString(output, "…s")
	if varies != nil {
		output = varies.ReplaceAllString(output, "…")
	}
	lines := strings.Split(strings.TrimSpace(output), "\n")
	for i, line := range lines {
		lines[i] = strings.Join(strings.Fields(line), " ")
	}
	return strings.Join(lines, "\n")
}

// run runs a command in a shell and returns its output. The command may fail: then its output shows that.
func (r *reader) run(t *testing.T, command string) string {
	t.Helper()
	ctx := patience.Context(t) // with an empty build cache the command compiles Kinora
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.Dir, cmd.Env, cmd.WaitDelay = r.dir, r.env, 10*time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	out, err := cmd.CombinedOutput()
	if _, exit := errors.AsType[*exec.ExitError](err); !exit {
		require.NoError(t, err, "%s\n%s", command, out)
	}
	require.NoError(t, ctx.Err(), "%s\n%s", command, out)
	return downloads.ReplaceAllString(string(out), "")
}

// downloads matches what go says about modules that the cache does not have yet.
var downloads = regexp.MustCompile(`(?m)^go: downloading .*\n`)

// process is a command that runs until it is interrupted.
type process struct {
	line string // the command as the page has it
	cmd  *exec.Cmd
	mu   sync.Mutex
	out  bytes.Buffer
	read int // bytes of out that were returned
}

func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

// next returns the output since the last call.
func (p *process) next() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.out.String()[p.read:]
	p.read = p.out.Len()
	return s
}

// start starts a command and returns its output, once that has as many lines as want.
func (r *reader) start(t *testing.T, command, want string) string {
	t.Helper()
	argv := strings.Fields(command)
	p := &process{line: command, cmd: exec.Command(filepath.Join(r.dir, argv[0]), argv[1:]...)}
	p.cmd.Dir, p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = r.dir, r.env, p, p
	require.NoError(t, p.cmd.Start())
	r.running = append(r.running, p)
	return r.read(t, command, want)
}

// runs returns the running commands that line names: all if it is empty.
func (r *reader) runs(t *testing.T, line string) []*process {
	t.Helper()
	named := slices.DeleteFunc(slices.Clone(r.running), func(p *process) bool { return line != "" && p.line != line })
	require.NotEmpty(t, named, "no such command is running: %s", line)
	return named
}

// read returns the further output of a running command, the last one that line names, once that has as many lines as want.
func (r *reader) read(t *testing.T, line, want string) (got string) {
	t.Helper()
	named := r.runs(t, line)
	p := named[len(named)-1]
	patience.Until(t, func() bool {
		got += p.next()
		return strings.Count(got, "\n") >= strings.Count(want, "\n")
	}, "%s", want)
	return got
}

// interrupt presses Ctrl-C in the terminals of the commands that line names, and returns their remaining output. Every
// command must end without an error.
func (r *reader) interrupt(t *testing.T, line string) (got string) {
	t.Helper()
	for _, p := range r.runs(t, line) {
		require.NoError(t, p.cmd.Process.Signal(os.Interrupt))
		late := time.AfterFunc(patience.Limit(), func() { _ = p.cmd.Process.Kill() })
		err := p.cmd.Wait()
		late.Stop()
		got += p.next()
		require.NoError(t, err, got)
		r.running = slices.DeleteFunc(r.running, func(other *process) bool { return other == p })
	}
	return canceled.ReplaceAllString(got, "")
}

// canceled matches what Watermill's SQL subscriber logs if its query is canceled by a stop.
var canceled = regexp.MustCompile(`(?m)^\S+ \S+ ERROR .* subscriber_id=.*(?:context canceled|SQLSTATE 57014).*\n`)
