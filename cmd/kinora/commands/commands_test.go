package commands_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/cmd/kinora/commands"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/task"
)

// A poisoned service is found, understood, tried and repaired with the commands alone. The handlers are in
// the service, and kinora is another program.
func TestAPoisonedServiceIsRepairedFromTheCommandLine(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.runner(), w.relay(&publisher{}))
	w.rate("cup-ann", 5, 0, 4, 3)
	w.rate("tea-ben", 2)

	w.shows([]string{"doctor"}, "Messages of the projector ratings are stuck", "2 wait behind it", "handler ratings/rated, class permanent",
		"> kinora parked dry-run --projector ratings --key review-cup-ann")
	require.Contains(t, w.fails(1, "doctor"), "1. Messages of the projector ratings are stuck")
	list := decode[[]struct{ Seq int64 }](w, w.ok("parked", "ls", "--projector", "ratings", "--json"))
	require.Len(t, list, 3)
	first := fmt.Sprint(list[0].Seq)
	shown := w.ok("parked", "show", first)
	require.Contains(t, shown, "review-cup-ann")
	require.NotContains(t, shown, canary)
	require.Contains(t, shown, "--payload shows them")
	shown = w.ok("parked", "show", first, "--payload")
	require.Contains(t, shown, "no stars: "+canary, "the text of the error")
	require.Regexp(t, `(?m)^header kinora_type +review\.`, shown)
	require.Contains(t, w.fails(1, "parked", "skip", "--yes", "--projector", "ratings", "--all", "--reason", " "), "not only spaces")
	require.Contains(t, w.fails(1, "projectors", "pause", "nosuch", "--reason", "r"), `there is no projector "nosuch"`)

	try := []string{"parked", "dry-run", "--projector", "ratings", "--key", "review-cup-ann", "--reason", "look"}
	require.Contains(t, w.fails(1, try...), "message "+first+" would fail: permanent")
	w.fixed.Store(true) // a fixed program is deployed
	out := w.ok(try...)
	require.Contains(t, out, "ratings: 1 rows would change")
	require.Contains(t, out, "3 would be applied, 0 would fail")
	require.NotContains(t, out, canary)
	require.Contains(t, w.ok(append(try, "--payload")...), canary, "the rows")
	require.Equal(t, 5, w.stars("review-cup-ann"), "a dry run changes nothing")

	out = w.ok("parked", "replay", "--projector", "ratings", "--key", "review-cup-ann", "--reason", "fixed in 1.4", "--by", "ann")
	require.Contains(t, out, "3 selected: 0 still waiting, 0 stuck")
	require.Equal(t, 12, w.stars("review-cup-ann"))
	doctor := []string{"doctor", "--skew", "1m"} // a report of a busy machine has the clock of a while ago
	w.shows(doctor, "Nothing is wrong.")
	w.ok(doctor...)
	require.Contains(t, w.ok("parked", "ls", "--state", "replayed"), "ann", "who decided")
	acts := w.ok("acts", "ls")
	require.Contains(t, acts, "dry-run")
	require.Contains(t, acts, "look")
}

func (w *world) stars(product string) (n int) {
	w.Helper()
	err := w.db.Pool().QueryRow(w.Context(), `select coalesce(sum(stars), 0) from ratings where product = $1`, product).Scan(&n)
	if e, ok := errors.AsType[*pgconn.PgError](err); ok && e.Code == "42P01" { // the runner has not created the table
		return 0
	}
	require.NoError(w, err)
	return n
}

// The same in the binary of a service, without a running one.
func TestABinaryWithHandlersNeedsNoRunner(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stop := w.start(w.runner())
	w.rate("cup-ann", 5, 0, 4)
	w.shows([]string{"parked", "ls"}, "stuck", "waiting")
	stop()
	try := []string{"parked", "dry-run", "--projector", "ratings", "--all", "--reason", "look"}
	require.Contains(t, w.fails(1, append(try, "--wait", "100ms")...), "waits: No runner of ratings runs.")
	require.Contains(t, w.fails(1, append(try, "--wait", "100ms")...), "is canceled")
	w.handlers = []commands.Handlers{commands.HandlersOf(w.ratings(), w.db, nil)}
	require.Contains(t, w.fails(1, try...), "would fail")
	w.fixed.Store(true)
	require.Contains(t, w.ok(try...), "2 would be applied")
	require.Contains(t, w.ok("parked", "replay", "--projector", "ratings", "--all", "--reason", "fixed"), "2 selected: 0 still waiting, 0 stuck")
	require.Equal(t, 9, w.stars("review-cup-ann"))
	require.Contains(t, w.ok("projectors", "verify", "ratings", "--reason", "look"), "0 rows differ")
}

func TestSkipNeedsAConfirmation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.runner())
	w.rate("cup-ann", 0, 4)
	w.shows([]string{"parked", "ls"}, "stuck", "waiting")
	seq := fmt.Sprint(decode[[]struct{ Seq int64 }](w, w.ok("parked", "ls", "--state", "stuck", "--json"))[0].Seq)
	skip := []string{"parked", "skip", "--seq", seq, "--reason", "advertising"}
	require.Contains(t, w.fails(2, skip...), "add --yes")
	w.terminal, w.answer = true, "no\n"
	require.Contains(t, w.fails(1, skip...), "nothing was changed")
	w.shows([]string{"parked", "ls"}, "stuck")
	w.answer = "yes\n"
	require.Contains(t, w.ok(skip...), "1 skipped")
	w.eventually(func() error {
		if n := w.stars("review-cup-ann"); n != 4 {
			return fmt.Errorf("%d stars", n)
		}
		return nil
	})
	w.terminal = false
	require.Contains(t, w.fails(1, append(skip, "--yes")...), "nothing was selected")
}

func TestWrongCommandLinesHaveStatus2(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, args := range [][]string{
		{}, {"parked"}, {"nonsense"}, {"parked", "skip", "--yes", "--reason", "r"}, {"parked", "skip", "--projector", "p", "--yes", "--reason", "r"},
		{"parked", "skip", "--projector", "p", "--all"}, {"parked", "replay", "--all", "--reason", "r"}, {"parked", "ls", "--limit", "0"}, {"parked", "show", "x"},
		{"outbox", "requeue", "--reason", "r", "--yes"}, {"outbox", "requeue", "--all", "--seq", "1", "--reason", "r", "--yes"},
		{"outbox", "skip", "--reason", "r", "--yes"}, {"outbox", "prune", "--published", "-1s", "--reason", "r", "--yes"},
		{"markers", "prune", "--projector", "p", "--reason", "r", "--yes"}, {"markers", "prune", "--window", "200h", "--reason", "r", "--yes"},
		{"markers", "prune", "--projector", "p", "--window", "191h", "--reason", "r", "--yes"}, {"markers", "drop", "h", "--yes"}, {"outbox", "ls", "--status", "nonsense"}, {"tasks", "cancel", "--reason", "r", "--yes"},
		{"tasks", "complete", "id", "--result", "{", "--reason", "r", "--yes"}, {"tasks", "patch", "id", "{", "--version", "1", "--reason", "r", "--yes"},
		{"projectors", "rebuild", "p", "--in-place", "--check", "--reason", "r"}, {"projectors", "pause", "p"},
	} {
		w.fails(2, args...)
	}
	w.dsn = ""
	require.Contains(t, w.fails(2, "status"), "--db")
	for _, db := range []string{"mysql://ann:secret@host", "sqlite:", "postgres:x", "secret"} {
		require.NotContains(t, w.fails(2, "status", "--db", db), "secret", "a password")
	}
	w.fails(0, "--help")
	missing := filepath.Join(t.TempDir(), "none.db")
	require.Contains(t, w.fails(1, "status", "--db", "sqlite:"+missing), "migrate up")
	_, err := os.Stat(missing)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// Everything can be read as JSON, and nothing shows data of users.
// Promise: O3.3
func TestPayloadsAreHidden(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.runner(), w.worker())
	w.rate("cup-ann", 5, 0, 4)
	w.enqueue(greet.New("greet-1", canary))
	w.shows([]string{"parked", "ls"}, "stuck", "waiting")
	w.shows([]string{"tasks", "ls"}, "abandoned")
	entries := decode[[]struct{ Seq int64 }](w, w.ok("outbox", "ls", "--json"))
	require.Len(t, entries, 3)
	parked := decode[[]struct{ Seq int64 }](w, w.ok("parked", "ls", "--json"))
	for _, args := range [][]string{
		{"status"}, {"streams", "ls"}, {"streams", "cat", "review-cup-ann"}, {"outbox", "ls"}, {"outbox", "show", fmt.Sprint(entries[0].Seq)},
		{"projectors", "ls"}, {"parked", "ls"}, {"parked", "show", fmt.Sprint(parked[0].Seq)}, {"tasks", "ls"}, {"tasks", "show", "greet-1"}, {"acts", "ls"}, {"markers", "ls"},
		{"migrate", "status"}, {"migrate", "sql"},
	} {
		require.NotContains(t, w.ok(args...), canary, args)
		out := w.ok(append(args, "--json")...)
		require.NotContains(t, out, canary, args)
		decode[any](w, out)
		if args[1%len(args)] == "cat" || args[1%len(args)] == "show" {
			require.Contains(t, w.ok(append(args, "--payload")...), canary, args)
			require.Contains(t, w.ok(append(args, "--payload", "--json")...), canary, args)
		}
	}
	out := w.fails(1, "doctor", "--json")
	require.NotContains(t, out, canary)
	decode[provider.Diagnosis](w, out)
}

func (w *world) enqueue(tasks ...task.Draft) {
	w.Helper()
	require.NoError(w, w.db.Transact(w.Context(), func(ctx context.Context, tx pgx.Tx) error { return w.db.TasksIn(tx).Enqueue(ctx, tasks...) }))
}

func (w *world) worker() *task.Worker {
	w.Helper()
	r, err := task.NewWorker(w.db, task.WorkerConfig{Logger: quiet}, greet)
	require.NoError(w, err)
	return r
}

func TestTextOfUsersCannotChangeTheTerminal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.ok("outbox", "pause", "t", "--reason", "why\x1b[31m\u202enot\n> rm -rf /")
	_, doctor, _ := w.run("doctor")
	for _, out := range []string{w.ok("status"), w.ok("acts", "ls"), doctor} {
		require.Contains(t, out, "why")
		require.NotContains(t, out, "\x1b")
		require.NotContains(t, out, "\u202e")
		require.NotContains(t, out, "\n> rm")
	}
}

func TestStreamsAreListedInPages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, product := range []string{"a", "b", "c"} {
		w.rate(product, 1, 2)
	}
	drafts, err := types.Encode(t.Context(), Rated{Stars: 1})
	require.NoError(t, err)
	_, err = w.db.Append(t.Context(), "reviewer-1", 0, drafts)
	require.NoError(t, err)
	type stream struct {
		ID      string
		Version int64
	}
	require.Equal(t, []stream{{"review-a", 2}, {"review-b", 2}}, decode[[]stream](w, w.ok("streams", "ls", "--category", "review", "--limit", "2", "--json")))
	require.Equal(t, []stream{{"review-c", 2}}, decode[[]stream](w, w.ok("streams", "ls", "--category", "review", "--after", "review-b", "--json")))
	require.Len(t, decode[[]stream](w, w.ok("streams", "ls", "--json")), 4)
	require.Len(t, decode[[]any](w, w.ok("streams", "cat", "review-a", "--after", "1", "--json")), 1)
	require.Contains(t, w.fails(1, "streams", "cat", "review-none"), "does not exist")
}

// Promise: O1.1
func TestPausesAreFollowed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := &publisher{}
	stop := w.start(w.runner(), w.relay(p))
	w.rate("cup", 1)
	w.eventually(func() error {
		if w.stars("review-cup") != 1 || p.published.Load() != 1 {
			return fmt.Errorf("not applied")
		}
		return nil
	})
	require.Contains(t, w.ok("projectors", "pause", "ratings", "--reason", "r"), "paused")
	require.Contains(t, w.ok("outbox", "pause", "review", "--reason", "r"), "paused")
	require.Contains(t, w.ok("outbox", "pause", "review", "--reason", "r"), "was paused already")
	stop()
	w.start(w.runner(), w.relay(p)) // a new process follows from its start
	w.rate("cup", 2)
	w.shows([]string{"projectors", "ls"}, "paused", " 1 ")
	require.Contains(t, w.fails(1, "doctor", "--lag", "1ms", "--watch", "2s"), "The projector ratings is paused")
	require.Equal(t, 1, w.stars("review-cup"))
	require.Equal(t, int64(1), p.published.Load())
	require.Contains(t, w.ok("projectors", "resume", "ratings", "--reason", "r"), "resumed")
	require.Contains(t, w.ok("outbox", "resume", "review", "--reason", "r"), "resumed")
	w.eventually(func() error {
		if w.stars("review-cup") != 3 || p.published.Load() != 2 {
			return fmt.Errorf("%d stars, %d published", w.stars("review-cup"), p.published.Load())
		}
		return nil
	})
	acts := decode[[]provider.Act](w, w.ok("acts", "ls", "--json"))
	require.Len(t, acts, 4)
	require.Equal(t, "resume", acts[0].Verb)
}

func TestRebuildAndVerifyByARunner(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.runner())
	w.rate("cup", 1, 2)
	w.rate("tea", 3)
	w.eventually(func() error {
		if w.stars("review-tea") != 3 {
			return fmt.Errorf("not applied")
		}
		return nil
	})
	require.Contains(t, w.ok("projectors", "verify", "ratings", "--reason", "look"), "3 events applied, 0 of them failed; 0 rows differ")
	_, err := w.db.Pool().Exec(t.Context(), `update ratings_g1 set stars = 77 where product = 'review-tea'`)
	require.NoError(t, err)
	out := w.fails(1, "projectors", "verify", "ratings", "--reason", "look")
	require.Contains(t, out, "ratings: 1 rows differ")
	require.NotContains(t, out, canary)
	require.Contains(t, w.fails(1, "projectors", "verify", "ratings", "--reason", "look", "--payload"), "77")
	require.Contains(t, w.fails(2, "projectors", "verify", "ratings", "--reason", "look", "--repair"), "--yes")
	require.Contains(t, w.ok("projectors", "verify", "ratings", "--reason", "look", "--repair", "--yes"), "1 were repaired")
	require.Equal(t, 3, w.stars("review-tea"))

	n := decode[struct{ Generation int }](w, w.ok("projectors", "rebuild", "ratings", "--reason", "why not", "--json")).Generation
	require.Greater(t, n, 1)
	w.shows([]string{"projectors", "ls"}, "standby")
	require.Contains(t, w.fails(1, "projectors", "cancel", "ratings", "--reason", "r", "--yes"), "no rebuild of ratings is going on")
	w.ok("projectors", "drop", "ratings", "1", "--reason", "r", "--yes")
	w.ok("projectors", "rebuild", "ratings", "--in-place", "--reason", "r", "--yes")
	require.Equal(t, 3, w.stars("review-tea"))
	require.Contains(t, w.fails(1, "projectors", "rebuild", "none", "--reason", "r"), "start a runner that reads the log")
}

// A person sees what a projector has, and confirms before it is deleted.
// Promise: O5.1
func TestAProjectorIsForgottenAndReleased(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stop := w.start(w.runner())
	w.rate("cup", 1, 0)
	w.shows([]string{"parked", "ls"}, "review-cup")
	forget := []string{"projectors", "forget", "ratings", "--by", "ann", "--reason", "not read"}
	require.Contains(t, w.fails(1, append(forget, "--yes")...), "a runner of the projector is alive")
	stop()
	said := w.fails(2, forget...)
	for _, text := range []string{"generation 1 at position 2", "parked messages         1", "tables, which are kept", "ratings_g1, ratings", "--yes"} {
		require.Contains(t, said, text)
	}
	w.terminal, w.answer = true, "no\n"
	require.Contains(t, w.fails(1, forget...), "nothing was changed")
	require.Equal(t, 1, w.stars("review-cup"))
	w.answer = "yes\n"
	require.Contains(t, w.ok(append(forget, "--drop-tables")...), "ratings is forgotten")
	w.shows([]string{"projectors", "ls"}, "ratings", "forgotten")
	w.shows([]string{"acts", "ls"}, "forget", "ann", "not read")
	_, found, _ := w.run("doctor", "--lag", "1ms")
	require.NotContains(t, found, "ratings")
	require.Contains(t, w.fails(1, "projectors", "release", "none", "--reason", "r"), "is not forgotten")
	require.Contains(t, w.ok("projectors", "release", "ratings", "--reason", "r"), "begins at Options.From")
	w.fixed.Store(true)
	w.rate("cup", 5)
	w.start(w.runner())
	patience.Until(t, func() bool { return w.stars("review-cup") == 6 }, "the events from the beginning")
	w.shows([]string{"projectors", "ls"}, "live")
}

func TestEntriesAreRequeuedAndSkipped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.rate("cup", 1)
	w.rate("tea", 2)
	entries, err := provider.ClaimEntries(t.Context(), w.db, provider.EntryQuery{}, claim.Terms{Holder: "r"})
	require.NoError(t, err)
	require.Len(t, entries, 2)
	for _, e := range entries {
		_, err = w.db.MarkEntries(t.Context(), []provider.EntryMark{{Seq: e.Seq, Token: e.Token, To: outbox.Abandoned, Error: "refused"}})
		require.NoError(t, err)
	}
	require.Contains(t, w.fails(1, "doctor"), "Entries of the outbox are abandoned")
	first, second := fmt.Sprint(entries[0].Seq), fmt.Sprint(entries[1].Seq)
	require.Contains(t, w.ok("outbox", "ls", "--status", "abandoned"), "refused")
	require.Contains(t, w.fails(2, "outbox", "requeue", "--seq", first, "--reason", "r"), "--yes")
	require.Contains(t, w.ok("outbox", "requeue", "--seq", first, "--reason", "r", "--yes"), "1 requeued")
	require.Contains(t, w.ok("outbox", "skip", "--seq", second, "--reason", "r", "--yes"), "1 skipped")
	require.Contains(t, w.ok("outbox", "show", second), "skipped")
	p := &publisher{}
	w.start(w.relay(p))
	w.shows([]string{"outbox", "ls"}, "none")
	require.Equal(t, int64(1), p.published.Load())
	require.Contains(t, w.fails(1, "outbox", "show", first), "does not exist")
}

// Old entries and markers are deleted from the command line, with a record, and nothing else is.
func TestOldEntriesAndMarkersArePruned(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, product := range []string{"cup", "tea", "mug"} {
		w.rate(product, 1)
	}
	entries, err := provider.ClaimEntries(t.Context(), w.db, provider.EntryQuery{}, claim.Terms{Holder: "r"})
	require.NoError(t, err)
	for _, e := range entries[:2] {
		_, err = w.db.MarkEntries(t.Context(), []provider.EntryMark{{Seq: e.Seq, Token: e.Token, To: outbox.Published}})
		require.NoError(t, err)
	}
	w.exec(`update kinora.outbox set published_at = published_at - interval '2 days' where id = $1`, entries[0].Seq)
	prune := []string{"outbox", "prune", "--published", "24h", "--reason", "space"}
	require.Contains(t, w.fails(2, prune...), "add --yes")
	require.Contains(t, w.ok(append(prune, "--yes")...), "1 deleted")
	require.Contains(t, w.ok(append(prune, "--yes", "--json")...), `"deleted": 0`)
	require.Len(t, decode[[]any](w, w.ok("outbox", "ls", "--status", "published,claimed", "--json")), 2)

	for _, name := range []string{"ratings/rated", "ratings/old", "ratingsx/rated", "mailer"} {
		for _, id := range []string{"m-old", "m-new"} {
			m := provider.Message{ID: id, Mark: true, Handlers: []provider.Handler{{Name: name}}}
			projector, _, _ := strings.Cut(name, "/")
			require.NoError(t, w.db.Do(t.Context(), provider.Unit{Projector: projector, Messages: []provider.Message{m}},
				func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
					return provider.Closing{}, nil
				}))
		}
	}
	w.exec(`update kinora.markers set processed_at = processed_at - interval '9 days' where message_id = 'm-old'`)
	type handler struct {
		Handler string
		Runners int
	}
	require.Equal(t, []handler{{"mailer", 0}, {"ratings/old", 0}, {"ratings/rated", 0}, {"ratingsx/rated", 0}},
		decode[[]handler](w, w.ok("markers", "ls", "--json")))
	prune = []string{"markers", "prune", "--projector", "ratings", "--window", "192h", "--reason", "space"}
	require.Contains(t, w.fails(2, prune...), "add --yes")
	require.Contains(t, w.ok(append(prune, "--yes")...), "2 deleted")
	require.Contains(t, w.ok(append(prune, "--yes")...), "0 deleted")
	require.Contains(t, w.ok("markers", "prune", "--handler", "mailer", "--window", "192h", "--reason", "r", "--yes"), "1 deleted")
	require.Contains(t, w.ok("markers", "drop", "ratings/old", "--reason", "it is gone", "--yes"), "1 deleted")
	require.Equal(t, []handler{{"mailer", 0}, {"ratings/rated", 0}, {"ratingsx/rated", 0}}, decode[[]handler](w, w.ok("markers", "ls", "--json")))

	acts := decode[[]provider.Act](w, w.ok("acts", "ls", "--json", "--payload"))
	require.Len(t, acts, 6)
	require.Equal(t, []any{"drop", "markers", "ratings/old", "it is gone", provider.ActDone, int64(1)},
		[]any{acts[0].Verb, acts[0].Kind, acts[0].Name, acts[0].Reason, acts[0].State, acts[0].Applied})
	require.Equal(t, []any{"prune", "outbox", int64(1)}, []any{acts[5].Verb, acts[5].Kind, acts[5].Applied})
	require.Contains(t, string(acts[5].Detail), "24h0m0s")
}

func (w *world) exec(sql string, args ...any) {
	w.Helper()
	_, err := w.db.Pool().Exec(w.Context(), sql, args...)
	require.NoError(w, err)
}

func TestTasksAreDecided(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.start(w.worker())
	w.enqueue(greet.New("a", canary), greet.New("b", canary), greet.New("c", canary), greet.New("d", "dan").Later(1<<40))
	w.eventually(func() error {
		if list := decode[[]any](w, w.ok("tasks", "ls", "--status", "abandoned", "--json")); len(list) != 3 {
			return fmt.Errorf("%d abandoned", len(list))
		}
		return nil
	})
	require.Contains(t, w.ok("tasks", "show", "a"), "abandoned")
	for _, shown := range []string{w.ok("tasks", "ls"), w.ok("tasks", "show", "a")} {
		require.Contains(t, shown, "last attempt")
	}
	require.Contains(t, w.ok("tasks", "show", "a", "--json"), "last_attempted_at")
	require.Contains(t, w.ok("tasks", "complete", "a", "--result", `"ann"`, "--reason", "called", "--yes"), "1 completed")
	w.shows([]string{"tasks", "show", "a", "--payload"}, "done", `"ann"`, "called")
	require.Contains(t, w.ok("tasks", "requeue", "--id", "b", "--reason", "r", "--yes"), "1 requeued")
	w.eventually(func() error {
		if out := w.ok("tasks", "show", "b"); strings.Count(out, "abandoned") < 3 {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	require.Contains(t, w.ok("tasks", "cancel", "--id", "c", "--reason", "r", "--yes"), "1 canceled")
	w.shows([]string{"tasks", "show", "c"}, "undone")
	require.Contains(t, w.fails(1, "tasks", "patch", "d", `{"x":{"out":1}}`, "--version", "77", "--reason", "r", "--yes"), "tasks show")
	require.Contains(t, w.ok("tasks", "patch", "d", `{"x":{"out":1}}`, "--version", "1", "--reason", "r", "--yes"), "1 changed")
	require.Contains(t, w.ok("tasks", "show", "d", "--payload"), `"x"`)
	refused := w.fails(1, "tasks", "patch", "a", `{"x":{"out":1}}`, "--version", "77", "--reason", "r", "--yes")
	require.Contains(t, refused, "has ended")
	require.NotContains(t, refused, "look at it again")
	require.Contains(t, w.fails(1, "tasks", "complete", "d", "--reason", "r", "--yes"), "tasks show")
	require.Contains(t, w.fails(1, "tasks", "show", "none"), "does not exist")
}

// The program itself, on a file.
func TestTheProgram(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bin := filepath.Join(dir, "kinora")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", bin, "..").CombinedOutput()
	require.NoError(t, err, string(out))
	run := func(want int, args ...string) string {
		cmd := exec.CommandContext(t.Context(), bin, args...)
		cmd.Env = append(os.Environ(), "KINORA_DB=sqlite:"+dir+"/a.db")
		out, _ := cmd.CombinedOutput()
		require.Equal(t, want, cmd.ProcessState.ExitCode(), "%v: %s", args, out)
		return string(out)
	}
	run(1, "status")
	require.Contains(t, run(0, "migrate", "up"), "have version")
	run(0, "migrate", "status")
	require.Contains(t, run(0, "migrate", "sql"), "create table kinora_events")
	run(0, "status")
	require.Contains(t, run(0, "doctor"), "Nothing is wrong.")
	run(2, "doctor", "--nonsense")
	run(1, "projectors", "pause", "p", "--reason", "r")
	run(0, "outbox", "pause", "p", "--reason", "r")
	require.Contains(t, run(1, "doctor"), "kinora outbox resume p")
}
