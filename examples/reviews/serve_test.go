package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora"
)

// databases returns a new database of each kind that the service supports.
var databases = map[string]func(t *testing.T) database{
	"sqlite": func(t *testing.T) database {
		return database{kind: "sqlite", path: filepath.Join(t.TempDir(), "reviews.db")}
	},
	"postgres": func(t *testing.T) database { return database{kind: "postgres", path: postgresDSN(t)} },
}

// onEachDatabase runs a test on each kind of database.
func onEachDatabase(t *testing.T, test func(t *testing.T, db database)) {
	t.Helper()
	for name, make := range databases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, make(t))
		})
	}
}

// testService is a service in this process, where the race detector sees it.
type testService struct {
	*testing.T
	url      string
	db       serviceStore
	pipe     *pipeline
	stopping context.CancelFunc
}

// startService starts a service. With --no-pipeline no events reach the read model.
func startService(t *testing.T, d database, flags pipelineFlags, strongWait time.Duration) *testService {
	t.Helper()
	db, err := d.create(t.Context(), flags.Broker)
	require.NoError(t, err)
	t.Cleanup(func() { _ = db.Close() })
	pipe, err := flags.start(t.Context(), d, db)
	require.NoError(t, err)
	t.Cleanup(func() { _ = pipe.Stop() })
	stopping, stop := context.WithCancel(context.Background())
	handler, err := newService(stopping, db, pipe, strongWait, "127.0.0.1:0")
	require.NoError(t, err)
	url := newTestServer(t, handler)
	t.Cleanup(stop) // ends live pages before the server waits for them
	return &testService{t, url, db, pipe, stop}
}

func newTestServer(t *testing.T, h http.Handler) (url string) {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return server.URL
}

var (
	inProcess  = pipelineFlags{Broker: noneKind, Pipeline: true}
	overMemory = pipelineFlags{Broker: memoryKind, Pipeline: true}
)

// answer is an HTTP response.
type answer struct {
	status int
	header http.Header
	text   string
}

// decode decodes the JSON object of the response.
func (a answer) decode(t *testing.T) map[string]any {
	t.Helper()
	var v map[string]any
	require.NoError(t, json.Unmarshal([]byte(a.text), &v), a.text)
	return v
}

// browser is a client that follows no redirect, so that tests see them.
var browser = &http.Client{
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	Transport:     &http.Transport{MaxIdleConnsPerHost: 500, DisableCompression: true},
}

// call sends a request; headers are "Name: value".
func call(t *testing.T, method, url, body string, headers ...string) answer {
	t.Helper()
	a, err := send(t.Context(), method, url, body, headers...)
	require.NoError(t, err)
	return a
}

func send(ctx context.Context, method, url, body string, headers ...string) (answer, error) {
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		r.Header.Set(name, value)
	}
	res, err := browser.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return answer{res.StatusCode, res.Header, string(text)}, err
}

const strong = "Consistency: strong"

func reviewJSON(author string, stars int, text string) string {
	body, _ := json.Marshal(map[string]any{"author": author, "stars": stars, "text": text})
	return string(body)
}

// postUntilVisible posts until the read model has the review. The service waits for --strong-wait: on a slow machine, the
// review is then written and not visible yet, and the same post again only waits for it. It returns the last status.
func postUntilVisible(t *testing.T, url, body string) (status int) {
	t.Helper()
	require.Eventually(t, func() bool {
		status = call(t, "POST", url, body, strong).status
		return status != http.StatusGatewayTimeout
	}, patience, time.Millisecond)
	return status
}

// serviceProcess is the service in a process of its own.
type serviceProcess struct {
	*exec.Cmd
	url    string
	stderr *bytes.Buffer
	ended  chan struct{}
}

var listening = regexp.MustCompile(`http://\S+`)

// startServiceProcess starts the service in a process and waits until it listens.
func startServiceProcess(t *testing.T, args ...string) *serviceProcess {
	t.Helper()
	p := &serviceProcess{Cmd: exec.Command(reviewsBin, append([]string{"serve"}, args...)...), stderr: &bytes.Buffer{}, ended: make(chan struct{})}
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := p.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, p.Start())
	t.Cleanup(func() {
		_ = p.Process.Kill()
		<-p.ended
	})
	up := make(chan string, 1)
	go func() {
		defer close(p.ended)
		for in := bufio.NewScanner(out); in.Scan(); {
			if url := listening.FindString(in.Text()); url != "" && strings.HasPrefix(in.Text(), "reviews:") {
				up <- url
			}
			p.stderr.WriteString(in.Text() + "\n")
		}
		_ = p.Wait()
	}()
	select {
	case p.url = <-up:
	case <-p.ended:
		require.Fail(t, "the service did not start", p.stderr.String())
	case <-time.After(patience):
		require.Fail(t, "the service does not listen")
	}
	return p
}

// stop sends a signal, waits for the end of the process and returns its exit status.
func (p *serviceProcess) stop(t *testing.T, by os.Signal) (code int) {
	t.Helper()
	require.NoError(t, p.Process.Signal(by))
	select {
	case <-p.ended:
	case <-time.After(patience):
		require.Fail(t, "the service does not stop")
	}
	return p.ProcessState.ExitCode()
}

// TestServeStops: on a signal the service answers requests in flight, ends live pages and applies
// all events. A restart shows every accepted write.
func TestServeStops(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, db database) {
		p := startServiceProcess(t, append(db.args(), "--addr", "127.0.0.1:0")...)
		page, err := http.Get(p.url + "/live")
		require.NoError(t, err)
		defer page.Body.Close()
		const writers = 20
		answers := make(chan answer, writers)
		for i := range writers {
			go func() {
				a, _ := send(context.Background(), "POST", p.url+"/products/p/reviews", reviewJSON(fmt.Sprint("a", i), 5, ""), strong)
				answers <- a
			}()
		}
		written := func(a answer) bool { // the read model of a slow machine may show it later
			return a.status == http.StatusCreated || a.status == http.StatusGatewayTimeout && code(t, a) == "not_visible_yet"
		}
		accepted := 0
		if written(<-answers) { // so the other requests are in flight
			accepted++
		}
		require.Zero(t, p.stop(t, syscall.SIGTERM), p.stderr.String())
		_, err = io.ReadAll(page.Body)
		require.NoError(t, err, "the live page ended without an error")
		for range writers - 1 {
			if a := <-answers; written(a) {
				accepted++
			} else {
				require.Zero(t, a.status, "a request is either answered or never accepted: %s", a.text)
			}
		}
		require.Positive(t, accepted)

		p = startServiceProcess(t, append(db.args(), "--addr", "127.0.0.1:0")...)
		product := call(t, "GET", p.url+"/products/p", "").decode(t)
		require.EqualValues(t, accepted, product["reviews"])
		require.EqualValues(t, 5*accepted, product["stars"])
		require.Zero(t, p.stop(t, os.Interrupt), p.stderr.String())
	})
}

func TestServeRefuses(t *testing.T) {
	t.Parallel()
	db := "sqlite:" + filepath.Join(t.TempDir(), "reviews.db")
	taken := startServiceProcess(t, "--db", db, "--addr", "127.0.0.1:0")
	for _, c := range []struct {
		want string
		args []string
	}{
		{"missing flags: --db", nil},
		{"other commands cannot read it", []string{"--db", "memory"}},
		{"address already in use", []string{"--db", db, "--addr", strings.TrimPrefix(taken.url, "http://")}},
		{"--strong-wait", []string{"--db", db, "--strong-wait", "0s"}},
		{"--strong-wait", []string{"--db", db, "--strong-wait", "1h"}},
		{"--moderator", []string{"--db", db, "--moderator", "localhost:9000"}},
		{"--moderation-timeout", []string{"--db", db, "--moderation-timeout", "0s"}},
	} {
		o := reviews(t, append([]string{"serve"}, c.args...)...)
		require.NotZero(t, o.code, c.args)
		require.Contains(t, o.stderr, c.want)
	}
}

// endedService is a service that ends by itself.
type endedService struct{}

func (endedService) Run(context.Context) error { return nil }

func (endedService) Running() <-chan struct{} { return nil }

func TestReady(t *testing.T) {
	t.Parallel()
	onEachProjection(t, func(t *testing.T, db database) {
		s := startService(t, db, inProcess, patience)
		requireStatus := func(path string, status int) {
			t.Helper()
			require.Eventually(t, func() bool { return call(t, "GET", s.url+path, "").status == status }, patience, 10*time.Millisecond,
				"%s must reply %d; a database that is slow to answer is not ready", path, status)
		}
		requireStatus("/readyz", http.StatusOK)
		requireStatus("/healthz", http.StatusOK)
		s.stopping()
		requireStatus("/readyz", http.StatusServiceUnavailable)
		requireStatus("/healthz", http.StatusOK)

		s = startService(t, db, inProcess, patience)
		ended, err := kinora.Start(t.Context(), endedService{})
		require.NoError(t, err)
		<-ended.Ended()
		handler, err := newService(t.Context(), s.db, &pipeline{Group: ended}, patience, "127.0.0.1:0")
		require.NoError(t, err)
		s.url = newTestServer(t, handler)
		requireStatus("/readyz", http.StatusServiceUnavailable)

		s = startService(t, db, inProcess, patience)
		require.NoError(t, s.pipe.Stop())
		requireStatus("/readyz", http.StatusOK)
		require.NoError(t, s.db.Close())
		requireStatus("/readyz", http.StatusServiceUnavailable)
		requireStatus("/healthz", http.StatusOK)
	})
}
