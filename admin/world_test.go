package admin_test

import (
	"context"
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
	"github.com/kinora-go/kinora/admin"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/task"
)

func TestMain(m *testing.M) {
	// the shared server lives as long as the process
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/exec.(*Cmd).Wait"),
		goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"))
}

var by = provider.Decision{By: "ann", Reason: "a test"}

// soon are limits with which a test need not wait for long.
var soon = provider.DiagnosisLimits{OpenTransaction: 100 * time.Millisecond, Snapshot: 100 * time.Millisecond, Lag: 100 * time.Millisecond, Watch: 300 * time.Millisecond}

type Priced struct{ Cents int }

var types = eventstore.NewTypes(eventstore.Type[Priced]("product.priced"))

const setup = `create table prices (product text primary key, cents int not null); create table totals (key text primary key, n int not null)`

// fixed makes the projector accept a price of zero.
func prices(fixed *atomic.Bool) *projector.Projector[pgx.Tx] {
	return projector.Define("prices", types, projector.Options{}, projector.On("priced", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[Priced]) error {
		if e.Data.Cents == 0 && !fixed.Load() {
			return projector.Permanent(errors.New("nothing is free"))
		}
		if e.Data.Cents < 0 && !fixed.Load() {
			return errors.New("the exchange is away")
		}
		_, err := tx.Exec(ctx, `insert into prices values ($1, $2) on conflict (product) do update set cents = excluded.cents`, e.Stream, e.Data.Cents)
		return err
	}))
}

// world is a service on PostgreSQL, with its operators.
type world struct {
	*testing.T
	db    *postgres.DB
	ops   *admin.Admin
	fixed atomic.Bool
	deaf  atomic.Bool // the broker refuses everything
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{T: t, db: postgrestest.OpenBusy(t, &postgres.Config{Route: outbox.ByCategory}, setup)}
	w.ops = adminOf(t, w.db)
	return w
}

func adminOf(t *testing.T, store admin.Store) *admin.Admin {
	t.Helper()
	ops, err := admin.New(store)
	require.NoError(t, err)
	return ops
}

var quiet = slog.New(slog.DiscardHandler)

func (w *world) runner(cfg projector.RunnerConfig) kinora.Service {
	w.Helper()
	cfg.Logger = quiet
	r, err := projector.NewRunner(w.db, projector.FromLog(w.db), cfg, prices(&w.fixed))
	require.NoError(w, err)
	return r
}

type publisher struct{ w *world }

func (p publisher) Publish(string, ...*message.Message) error {
	if p.w.deaf.Load() {
		return errors.New("the broker is away")
	}
	return nil
}

func (publisher) Close() error { return nil }

func (w *world) relay(cfg outbox.RelayConfig) kinora.Service {
	w.Helper()
	cfg.Logger, cfg.Poll = quiet, 50*time.Millisecond
	r, err := outbox.NewRelay(w.db, publisher{w}, &cfg)
	require.NoError(w, err)
	return r
}

var greet = task.Define("mail/greet", func(_ context.Context, _ *task.Run[pgx.Tx], name string) (bool, error) {
	if name == "" {
		return false, task.Permanent(errors.New("no name"))
	}
	return true, nil
})

func (w *world) worker() kinora.Service {
	w.Helper()
	r, err := task.NewWorker(w.db, task.WorkerConfig{Logger: quiet}, greet)
	require.NoError(w, err)
	return r
}

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

func drafts(t testing.TB, cents ...int) []eventstore.Draft {
	t.Helper()
	var all []any
	for _, c := range cents {
		all = append(all, Priced{c})
	}
	encoded, err := types.Encode(t.Context(), all...)
	require.NoError(t, err)
	return encoded
}

func (w *world) price(product string, cents ...int) {
	w.Helper()
	_, err := w.db.Append(w.Context(), "product-"+product, eventstore.Any, drafts(w, cents...))
	require.NoError(w, err)
}

func (w *world) enqueue(tasks ...task.Draft) {
	w.Helper()
	require.NoError(w, w.db.Transact(w.Context(), func(ctx context.Context, tx pgx.Tx) error { return w.db.TasksIn(tx).Enqueue(ctx, tasks...) }))
}

// eventually waits until is returns no error.
func (w *world) eventually(is func() error) {
	w.Helper()
	patience.NoError(w, is)
}

func (w *world) facts() *admin.Facts {
	w.Helper()
	f, err := w.ops.Facts(w.Context())
	require.NoError(w, err)
	return f
}

func (w *world) exec(sql string, args ...any) {
	w.Helper()
	_, err := w.db.Pool().Exec(w.Context(), sql, args...)
	require.NoError(w, err)
}

func findings(d provider.Diagnosis, err error) ([]provider.Finding, error) { return d.Findings, err }

// finds waits until the doctor has a finding of this check, and returns it. Until then it must find
// nothing of another one.
func (w *world) finds(l provider.DiagnosisLimits, check provider.Urgency, title string) (found provider.Finding) {
	w.Helper()
	w.eventually(func() error {
		all, err := findings(w.ops.Doctor(w.Context(), l))
		require.NoError(w, err)
		for _, f := range all {
			if f.Check == check && strings.Contains(f.Title, title) {
				found = f
				return nil
			}
		}
		return fmt.Errorf("no finding %d %q in %v", check, title, titles(all))
	})
	require.NotEmpty(w, found.Meaning)
	require.NotEmpty(w, found.Remedy)
	return found
}

// quietly waits until the doctor has no finding of these checks.
func (w *world) quietly(l provider.DiagnosisLimits, checks ...provider.Urgency) {
	w.Helper()
	w.eventually(func() error {
		all, err := findings(w.ops.Doctor(w.Context(), l))
		require.NoError(w, err)
		for _, f := range all {
			for _, c := range checks {
				if f.Check == c {
					return fmt.Errorf("still finds %v", titles(all))
				}
			}
		}
		return nil
	})
}

func titles(all []provider.Finding) (list []string) {
	for _, f := range all {
		list = append(list, fmt.Sprint(f.Check, " ", f.Title, " ", f.Facts))
	}
	return list
}

func value(f provider.Finding, name string) string {
	for _, fact := range f.Facts {
		if fact.Name == name {
			return fact.Value
		}
	}
	return ""
}
