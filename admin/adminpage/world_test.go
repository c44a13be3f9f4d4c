package adminpage_test

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"errors"
	"html"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/admin/adminpage"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/kinora-go/kinora/task"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type Rated struct {
	Stars int
	Text  string
}

var types = eventstore.NewTypes(eventstore.Type[Rated]("review.rated"))

var by = provider.Decision{By: "bea", Reason: "a test"}

// world is a service on SQLite, with its page.
type world struct {
	*testing.T
	db    *sqlite.DB
	topic string // of entries; empty: none
	fixed atomic.Bool
	logs  safeBuffer
}

type safeBuffer struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.String()
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{T: t}
	db, err := sqlite.Open(t.Context(), t.TempDir()+"/a.db", &sqlite.Config{Route: func(string, eventstore.Draft) []string {
		if w.topic == "" {
			return nil
		}
		return []string{w.topic}
	}})
	require.NoError(t, err)
	w.db = db
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, db.Migrate(t.Context()))
	return w
}

func (w *world) logger() *slog.Logger { return slog.New(slog.NewTextHandler(&w.logs, nil)) }

// ratings refuses zero stars, unless it is fixed.
func (w *world) ratings() *projector.Projector[*sql.Tx] {
	return projector.Define("ratings", types, projector.Options{Tables: []string{"ratings"}},
		projector.OnCreate(func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `create table `+projector.Table(ctx, "ratings")+` (product text primary key, stars int not null, text text not null)`)
			return err
		}),
		projector.On("rated", func(ctx context.Context, tx *sql.Tx, e eventstore.Event[Rated]) error {
			if e.Data.Stars == 0 && !w.fixed.Load() {
				return projector.Permanent(errors.New("no stars: " + e.Data.Text))
			}
			_, err := tx.ExecContext(ctx, `insert into `+projector.Table(ctx, "ratings")+` values (?1, ?2, ?3)
				on conflict (product) do update set stars = stars + excluded.stars, text = excluded.text`, e.Stream, e.Data.Stars, e.Data.Text)
			return err
		}))
}

func (w *world) rate(stream, text string, stars ...int) (ids []string) {
	w.Helper()
	var events []any
	for _, n := range stars {
		events = append(events, Rated{n, text})
	}
	drafts, err := types.Encode(eventstore.WithMetadata(w.Context(), eventstore.Metadata{Actor: text, Traceparent: text, Extra: map[string]string{"note": text}}), events...)
	require.NoError(w, err)
	_, err = w.db.Append(w.Context(), stream, eventstore.Any, drafts)
	require.NoError(w, err)
	for _, d := range drafts {
		ids = append(ids, d.ID)
	}
	return ids
}

// stars is the sum of the read model; 0 before its table exists.
func (w *world) stars() (n int) {
	_ = w.db.SQL().QueryRowContext(w.Context(), `select coalesce(sum(stars), 0) from ratings_g1`).Scan(&n)
	return n
}

func (w *world) runner() kinora.Service {
	w.Helper()
	r, err := projector.NewRunner(w.db, projector.FromLog(w.db), projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}, w.ratings())
	require.NoError(w, err)
	return r
}

var greet = task.Define("mail/greet", func(context.Context, *task.Run[*sql.Tx], string) (string, error) {
	return "", task.Permanent(errors.New("no mail today"))
})

func (w *world) worker() kinora.Service {
	w.Helper()
	r, err := task.NewWorker(w.db, task.WorkerConfig{Logger: slog.New(slog.DiscardHandler)}, greet)
	require.NoError(w, err)
	return r
}

func (w *world) enqueue(id, input string) {
	w.Helper()
	require.NoError(w, w.db.Transact(w.Context(), func(ctx context.Context, tx *sql.Tx) error {
		return w.db.TasksIn(tx).Enqueue(ctx, greet.New(id, input))
	}))
}

func (w *world) start(services ...kinora.Service) {
	w.Helper()
	ctx, cancel := context.WithCancel(w.Context())
	done := make(chan error, 1)
	go func() { done <- kinora.Run(ctx, services...) }()
	w.Cleanup(func() { cancel(); require.NoError(w, <-done) })
}

// abandon gives up all entries.
func (w *world) abandon() {
	w.Helper()
	entries, err := provider.ClaimEntries(w.Context(), w.db, provider.EntryQuery{}, claim.Terms{Holder: "r"})
	require.NoError(w, err)
	for _, e := range entries {
		_, err = w.db.MarkEntries(w.Context(), []provider.EntryMark{{Seq: e.Seq, Token: e.Token, To: outbox.Abandoned, Error: "refused"}})
		require.NoError(w, err)
	}
}

func everyone(name string) func(*http.Request) string {
	return func(*http.Request) string { return name }
}

func allowed(*http.Request) bool { return true }

// serve serves the page under a prefix, and returns its address.
func (w *world) serve(cfg adminpage.Config, prefix string) string {
	w.Helper()
	cfg.Logger = w.logger()
	h, err := adminpage.New(w.db, cfg)
	require.NoError(w, err)
	server := httptest.NewServer(http.StripPrefix(prefix, h))
	w.Cleanup(server.Close)
	return server.URL + (&url.URL{Path: prefix}).EscapedPath() + "/"
}

type answer struct {
	status int
	header http.Header
	body   string
	url    string // after redirects
}

// send sends a request and follows redirects. Each pair sets a header.
func (w *world) send(method, address, body string, pairs ...string) answer {
	w.Helper()
	r, err := http.NewRequestWithContext(w.Context(), method, address, strings.NewReader(body))
	require.NoError(w, err)
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for i := 0; i < len(pairs); i += 2 {
		r.Header.Set(pairs[i], pairs[i+1])
		if pairs[i] == "Host" {
			r.Host = pairs[i+1]
		}
	}
	got, err := http.DefaultClient.Do(r)
	require.NoError(w, err, address)
	defer got.Body.Close()
	text, err := io.ReadAll(got.Body)
	require.NoError(w, err)
	return answer{got.StatusCode, got.Header, string(text), got.Request.URL.String()}
}

func (w *world) get(address string) answer { w.Helper(); return w.send(http.MethodGet, address, "") }

func (w *world) post(address string, pairs ...string) answer {
	w.Helper()
	values := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		values.Set(pairs[i], pairs[i+1])
	}
	return w.send(http.MethodPost, address, values.Encode())
}

// event returns the first server-sent event of a page.
func (w *world) event(address string) string {
	w.Helper()
	ctx, cancel := context.WithCancel(w.Context())
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	require.NoError(w, err)
	r.Header.Set("Accept", "text/event-stream")
	got, err := http.DefaultClient.Do(r)
	require.NoError(w, err)
	defer got.Body.Close()
	require.Equal(w, "text/event-stream", got.Header.Get("Content-Type"), address)
	var text strings.Builder
	for lines := bufio.NewReader(got.Body); ; {
		line, err := lines.ReadString('\n')
		require.NoError(w, err)
		if strings.HasPrefix(line, "data: ") {
			text.WriteString(strings.TrimPrefix(line, "data: "))
		} else if text.Len() > 0 {
			return text.String()
		}
	}
}

var hrefs = regexp.MustCompile(`(?:href|action)="([^"]*)"`)

// crawl reads every page that links lead to, and returns their texts by address, and the addresses of forms.
func (w *world) crawl(from string) map[string]string {
	w.Helper()
	all := map[string]string{}
	for next := []string{from}; len(next) > 0 && len(all) < 150; next = next[1:] {
		if _, known := all[next[0]]; known {
			continue
		}
		got := w.get(next[0])
		require.Contains(w, []int{http.StatusOK, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusBadRequest}, got.status, "%s: %s", next[0], got.body)
		all[next[0]] = got.body
		base, err := url.Parse(next[0])
		require.NoError(w, err)
		for _, m := range hrefs.FindAllStringSubmatch(got.body, -1) {
			to, err := base.Parse(html.UnescapeString(m[1]))
			require.NoError(w, err, m[1])
			if to.Scheme == "data" || to.Fragment != "" {
				continue
			}
			require.True(w, strings.HasPrefix(to.String(), from), "%s leads away: %s", next[0], to)
			next = append(next, to.String())
		}
	}
	return all
}
