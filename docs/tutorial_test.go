//go:build unix

package docs_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
)

// The tutorial is true: in a module of its own, each step's files compile, are formatted, vetted and tested, and
// its commands print what the page shows.
func TestTutorial(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("tutorial.md")
	require.NoError(t, err)
	steps := parseTutorial(t, string(page))
	require.Len(t, steps, 8)
	r := newReader(t)
	for _, s := range steps {
		ok := t.Run(s.title, func(t *testing.T) { r.follow(t, s) })
		if !ok {
			break // what follows builds on it
		}
	}
}

// Its links within the repository lead somewhere, and its headings are those that it names.
func TestTutorialLinks(t *testing.T) {
	t.Parallel()
	checkLinks(t, "tutorial.md")
}

// step is a section of the page: its files and consoles, in order.
type step struct {
	title  string
	blocks []any
}

type file struct{ path, text string }

// console is a block of commands with what they print.
type console struct {
	stays  bool           // the last command goes on until ^C
	varies *regexp.Regexp // what differs each time
	lines  [][2]string    // command and output
}

// The forms that the page has its blocks in. Blocks of "sh" without a file are for readers alone.
var (
	fileForm    = regexp.MustCompile("\\*\\*File `([^`]+)`\\*\\*[^\n]*\n\n$")
	staysForm   = regexp.MustCompile(`<!-- stays -->\n$`)
	variesForm  = regexp.MustCompile(`<!-- varies: (.*) -->\n$`)
	commandForm = regexp.MustCompile(`(?m)^(?:\$ (.*)|(\^C))\n`)
)

func parseTutorial(t *testing.T, page string) (steps []step) {
	t.Helper()
	for _, section := range strings.Split(page, "\n## ")[1:] {
		title, _, _ := strings.Cut(section, "\n")
		s := step{title: title}
		for _, at := range fenceForm.FindAllStringSubmatchIndex(section, -1) {
			before, lang, text := section[:at[0]], section[at[2]:at[3]], section[at[4]:at[5]]
			if name := fileForm.FindStringSubmatch(before); name != nil {
				s.blocks = append(s.blocks, file{name[1], text})
				continue
			}
			if lang == "sh" {
				continue
			}
			require.Equal(t, "console", lang, "step %s: a block that is neither a file nor a console:\n%s", title, text)
			c := console{stays: staysForm.MatchString(before)}
			if v := variesForm.FindStringSubmatch(before); v != nil {
				c.varies = regexp.MustCompile(v[1])
			}
			commands := commandForm.FindAllStringSubmatchIndex(text, -1)
			require.NotEmpty(t, commands, "step %s: a console without a command:\n%s", title, text)
			for n, m := range commands {
				end := len(text)
				if n+1 < len(commands) {
					end = commands[n+1][0]
				}
				command := strings.TrimSuffix(strings.TrimPrefix(text[m[0]:m[1]], "$ "), "\n")
				c.lines = append(c.lines, [2]string{command, text[m[1]:end]})
			}
			s.blocks = append(s.blocks, c)
		}
		if len(s.blocks) > 0 {
			steps = append(steps, s)
		}
	}
	return steps
}

// reader is somebody who does what the page says.
type reader struct {
	dir    string
	env    []string
	addr   string // where the service listens
	stays  []*resident
	server bool // there is a PostgreSQL
}

// newReader makes a module that has the versions of Kinora's own, so that the network is not needed.
func newReader(t *testing.T) *reader {
	t.Helper()
	root, err := filepath.Abs("..")
	require.NoError(t, err)
	r := &reader{dir: t.TempDir()}
	mod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	require.NoError(t, err)
	text := regexp.MustCompile(`(?m)^module .*$`).ReplaceAllString(string(mod), "module example.com/reviews")
	text += "\nrequire github.com/kinora-go/kinora v0.0.0\n\nreplace github.com/kinora-go/kinora => " + root + "\n"
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go.mod"), []byte(text), 0o600))
	sum, err := os.ReadFile(filepath.Join(root, "go.sum"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(r.dir, "go.sum"), sum, 0o600))
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); !strings.HasPrefix(name, "REVIEWS_") {
			r.env = append(r.env, v)
		}
	}
	// Without debug information there is less to link.
	r.env = append(r.env, "GOFLAGS=-mod=mod -ldflags=-w", "GOWORK=off", "REVIEWS_ADDR=127.0.0.1:0")
	t.Cleanup(func() {
		for _, p := range r.stays {
			_ = p.cmd.Process.Kill()
			_ = p.cmd.Wait()
		}
	})
	return r
}

func (r *reader) follow(t *testing.T, s step) {
	unchecked := false
	check := func() {
		if unchecked {
			require.Empty(t, r.run(t, "gofmt -l ."))
			require.Empty(t, r.run(t, "go build ./..."))
			require.Empty(t, r.run(t, "go vet ./..."))
			require.NotContains(t, r.run(t, "go test ./..."), "FAIL")
		}
		unchecked = false
	}
	for _, b := range s.blocks {
		switch b := b.(type) {
		case file:
			unchecked = true
			path := filepath.Join(r.dir, b.path)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
			require.NoError(t, os.WriteFile(path, []byte(b.text), 0o600))
		case console:
			check()
			r.play(t, b)
		}
	}
	check()
	require.Empty(t, r.stays, "something is left running")
}

func (r *reader) play(t *testing.T, c console) {
	for i, line := range c.lines {
		command, want := line[0], line[1]
		if strings.Contains(command, "reviews-pg ") && !r.server {
			r.env = append(r.env, "REVIEWS_DB="+postgrestest.DSN(t, &postgres.Config{Route: outbox.ByCategory}))
			r.server = true
		}
		var got string
		switch {
		case command == "^C":
			got = r.interrupt(t)
		case c.stays && i == len(c.lines)-1:
			got = r.start(t, command, want)
		case strings.HasPrefix(command, "curl "):
			got = r.curl(t, words(t, command)[1:], want)
		default:
			got = r.run(t, command)
		}
		require.Equal(t, even(want, c.varies), even(got, c.varies), "%s\n%s", command, got)
	}
}

// even leaves out what differs each time: how long a test took, and what the page says that it differs.
func even(output string, varies *regexp.Regexp) string {
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

const patience = 2 * time.Minute // for one command: a cold build cache is slow

// run runs a command in a shell, and returns what it prints. It may fail: that shows in what it prints.
func (r *reader) run(t *testing.T, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.Dir, cmd.Env, cmd.WaitDelay = r.dir, r.env, 10*time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	out, err := cmd.CombinedOutput()
	if _, exit := errors.AsType[*exec.ExitError](err); !exit {
		require.NoError(t, err, "%s\n%s", command, out)
	}
	require.NoError(t, ctx.Err(), "%s\n%s", command, out)
	return string(out)
}

// resident is a command that goes on until it is interrupted.
type resident struct {
	cmd  *exec.Cmd
	mu   sync.Mutex
	out  bytes.Buffer
	seen int // how much of out was compared
}

func (p *resident) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

// news is what was printed since it was last asked.
func (p *resident) news() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.out.String()[p.seen:]
	p.seen = p.out.Len()
	return s
}

var listeningForm = regexp.MustCompile(`(listening on http://)(127\.0\.0\.1:\d+)`)

// start starts a command, and returns what it prints once that is as many lines as wanted.
func (r *reader) start(t *testing.T, command, want string) (got string) {
	t.Helper()
	argv := words(t, command)
	p := &resident{cmd: exec.Command(filepath.Join(r.dir, argv[0]), argv[1:]...)}
	p.cmd.Dir, p.cmd.Env, p.cmd.Stdout, p.cmd.Stderr = r.dir, r.env, p, p
	require.NoError(t, p.cmd.Start())
	r.stays = append(r.stays, p)
	require.Eventually(t, func() bool {
		got += p.news()
		return strings.Count(got, "\n") >= strings.Count(want, "\n")
	}, time.Minute, 5*time.Millisecond, command)
	if m := listeningForm.FindStringSubmatch(got); m != nil {
		r.addr = m[2]
		got = listeningForm.ReplaceAllString(got, "${1}127.0.0.1:8080") // a port that is free stands for it
	}
	return got
}

// interrupt is Ctrl-C in every terminal: all end in good order.
func (r *reader) interrupt(t *testing.T) (got string) {
	t.Helper()
	for ; len(r.stays) > 0; r.stays = r.stays[1:] {
		p := r.stays[0]
		require.NoError(t, p.cmd.Process.Signal(os.Interrupt))
		late := time.AfterFunc(time.Minute, func() { _ = p.cmd.Process.Kill() })
		err := p.cmd.Wait()
		late.Stop()
		got += p.news()
		require.NoError(t, err, got)
	}
	return canceled.ReplaceAllString(got, "")
}

// canceled is what Watermill's SQL subscriber says of a query that its end has broken off.
var canceled = regexp.MustCompile(`(?m)^\S+ \S+ ERROR .* subscriber_id=.*(?:context canceled|SQLSTATE 57014).*\n`)

// curl does what curl does with these arguments, at the address where the service listens.
func (r *reader) curl(t *testing.T, args []string, want string) string {
	t.Helper()
	method, url, body, format, endless, silent := "", "", "", "", false, false
	header := http.Header{}
	for i := 0; i < len(args); i++ {
		next := func() string { i++; return args[i] }
		switch args[i] {
		case "-s":
		case "-sN":
			endless = true
		case "-X":
			method = next()
		case "-d":
			body = next()
			header.Set("Content-Type", "application/x-www-form-urlencoded")
		case "-H":
			name, value, _ := strings.Cut(next(), ": ")
			header.Set(name, value)
		case "-o":
			_, silent = next(), true
		case "-w":
			format = next()
		default:
			require.True(t, strings.HasPrefix(args[i], "localhost:8080/"), "curl %s", args[i])
			url = "http://" + strings.Replace(args[i], "localhost:8080", r.addr, 1)
		}
	}
	if method == "" && body != "" {
		method = http.MethodPost
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	require.NoError(t, err)
	req.Header = header
	answer, err := http.DefaultTransport.RoundTrip(req) // follows no redirection, as curl
	require.NoError(t, err)
	defer func() { _ = answer.Body.Close() }()
	if endless {
		got := make([]byte, len(want))
		n, err := io.ReadFull(answer.Body, got)
		require.NoError(t, err, "%s", got[:n])
		return string(got)
	}
	got, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	if silent {
		got = nil
	}
	return string(got) + strings.NewReplacer("%{http_code}", answer.Status[:3], `\n`, "\n").Replace(format)
}

// words splits a command as a shell does, as far as the page needs it.
func words(t *testing.T, command string) (all []string) {
	t.Helper()
	for _, m := range regexp.MustCompile(`'([^']*)'|"([^"]*)"|([^\s'"]+)`).FindAllStringSubmatch(command, -1) {
		all = append(all, m[1]+m[2]+m[3])
	}
	require.NotEmpty(t, all)
	return all
}
