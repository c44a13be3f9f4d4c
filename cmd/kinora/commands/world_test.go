package commands_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/cmd/kinora/commands"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/task"
)

func TestMain(m *testing.M) {
	// the shared server lives as long as the process
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"),
		goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"))
}

// canary is data of a user. It must be shown only with --payload.
const canary = "canary-7f3a"

type Rated struct {
	Stars int
	Text  string
}

var types = eventstore.NewTypes(eventstore.Type[Rated]("review.rated"))

var quiet = slog.New(slog.DiscardHandler)

// world is a service on PostgreSQL, and a terminal.
type world struct {
	*testing.T
	db       *postgres.DB
	dsn      string
	text     string // of reviews; empty: canary
	fixed    atomic.Bool
	handlers []commands.Handlers // of the binary; nil: kinora itself
	terminal bool
	answer   string
}

func newWorld(t *testing.T) *world {
	t.Helper()
	dsn := postgrestest.DSN(t, nil)
	db, err := postgres.Open(t.Context(), dsn, &postgres.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	t.Cleanup(db.Close)
	return &world{T: t, db: db, dsn: dsn}
}

// ratings refuses zero stars, unless it is fixed.
func (w *world) ratings() *projector.Projector[pgx.Tx] {
	return projector.Define("ratings", types, projector.Options{Tables: []string{"ratings"}},
		projector.OnCreate(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `create table `+projector.Table(ctx, "ratings")+` (product text primary key, stars int not null, text text not null)`)
			return err
		}),
		projector.On("rated", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[Rated]) error {
			if e.Data.Stars == 0 && !w.fixed.Load() {
				return projector.Permanent(errors.New("no stars: " + e.Data.Text))
			}
			_, err := tx.Exec(ctx, `insert into `+projector.Table(ctx, "ratings")+` as r values ($1, $2, $3)
				on conflict (product) do update set stars = r.stars + excluded.stars, text = excluded.text`, e.Stream, e.Data.Stars, e.Data.Text)
			return err
		}))
}

func (w *world) runner() kinora.Service {
	w.Helper()
	r, err := projector.NewRunner(w.db, projector.FromLog(w.db), projector.RunnerConfig{Logger: quiet}, w.ratings())
	require.NoError(w, err)
	return r
}

type publisher struct{ published atomic.Int64 }

func (p *publisher) Publish(_ string, ms ...*message.Message) error {
	p.published.Add(int64(len(ms)))
	return nil
}

func (*publisher) Close() error { return nil }

func (w *world) relay(p *publisher) kinora.Service {
	w.Helper()
	r, err := outbox.NewRelay(w.db, p, &outbox.RelayConfig{Logger: quiet, Poll: 50 * time.Millisecond})
	require.NoError(w, err)
	return r
}

var greet = task.Define("mail/greet", func(_ context.Context, _ *task.Run[pgx.Tx], name string) (string, error) {
	if name == canary {
		return "", task.Permanent(errors.New("no name"))
	}
	return name, nil
})

// start runs services until the test or stop ends.
func (w *world) start(services ...kinora.Service) (stop func()) {
	w.Helper()
	ctx, cancel := context.WithCancel(w.Context())
	done := make(chan error, 1)
	go func() { done <- kinora.Run(ctx, services...) }()
	ended := false
	stop = func() {
		if !ended {
			ended = true
			cancel()
			require.NoError(w, <-done)
		}
	}
	w.Cleanup(stop)
	return stop
}

func (w *world) rate(product string, stars ...int) {
	w.Helper()
	var events []any
	for _, n := range stars {
		events = append(events, Rated{n, cmp.Or(w.text, canary)})
	}
	drafts, err := types.Encode(w.Context(), events...)
	require.NoError(w, err)
	_, err = w.db.Append(w.Context(), "review-"+product, eventstore.Any, drafts)
	require.NoError(w, err)
}

// run runs a command line, and returns its exit status and what it printed.
func (w *world) run(args ...string) (status int, out, said string) {
	w.Helper()
	var o, e bytes.Buffer
	app := &commands.App{Out: &o, Err: &e, In: strings.NewReader(w.answer), Terminal: func() bool { return w.terminal }}
	if w.handlers != nil {
		app.Open = func(ctx context.Context, db commands.Database) (*commands.Session, error) {
			s, err := commands.Open(ctx, db)
			if err == nil {
				s.Handlers = w.handlers
			}
			return s, err
		}
	}
	if w.dsn != "" {
		args = append(args, "--db", w.dsn)
	}
	status = commands.Main(w.Context(), app, args)
	return status, o.String(), e.String()
}

// ok runs a command that must succeed, and returns what it printed.
func (w *world) ok(args ...string) string {
	w.Helper()
	status, out, said := w.run(args...)
	require.Zero(w, status, "%v: %s%s", args, out, said)
	return out
}

// fails runs a command that must have this exit status, and returns everything that it printed.
func (w *world) fails(want int, args ...string) string {
	w.Helper()
	status, out, said := w.run(args...)
	require.Equal(w, want, status, "%v: %s%s", args, out, said)
	return out + said
}

// eventually waits until is returns no error.
func (w *world) eventually(is func() error) {
	w.Helper()
	patience.NoError(w, is)
}

// shows waits until a command prints all of these texts.
func (w *world) shows(args []string, texts ...string) (out string) {
	w.Helper()
	w.eventually(func() error {
		_, printed, said := w.run(args...)
		out = printed
		for _, text := range texts {
			if !strings.Contains(printed, text) {
				return fmt.Errorf("%v does not show %q: %s%s", args, text, printed, said)
			}
		}
		return nil
	})
	return out
}

func decode[T any](t *world, text string) (v T) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(text), &v), text)
	return v
}
