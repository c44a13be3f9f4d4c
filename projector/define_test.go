package projector_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// Promise: G4.9
func TestRenamedHandlerKeepsItsOldMarkers(t *testing.T) {
	t.Parallel()
	db, f := newDB(t), make(subscription)
	stop := run(t, db, f, projector.RunnerConfig{}, projector.Define("old", types, marked, projector.On("created", add)))
	f.deliver(t, msg("1", "posted", `{"Stars":5}`))
	require.NoError(t, stop())
	for _, h := range []projector.Handler[txn]{
		projector.On("renamed", add).Was("old/created"),
		projector.On("again", add).Was("renamed", "old/created"),
	} {
		f = make(subscription)
		stop = run(t, db, f, projector.RunnerConfig{}, projector.Define("p", types, marked, h))
		f.deliver(t, msg("1", "posted", `{"Stars":5}`))
		require.NoError(t, stop())
		require.Equal(t, 5, total(db, "totals"))
	}
	f = make(subscription)
	stop = run(t, db, f, projector.RunnerConfig{}, projector.Define("p", types, marked, projector.On("forgetful", add)))
	f.deliver(t, msg("1", "posted", `{"Stars":5}`))
	require.NoError(t, stop())
	require.Equal(t, 10, total(db, "totals"), "the control: an undeclared rename applies the message again")
}

// noMarks is a provider that cannot write markers with the read model, as with Redis.
type noMarks struct{ unit }

func (n noMarks) Keeps() provider.Keeps {
	k := n.unit.Keeps()
	k.Markers = false
	return k
}

// Promise: G5.1
func TestMarkersWithoutSupportAreALoggedNoOp(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	db, f := newDB(t), make(subscription)
	unmarked := 0
	cfg := projector.RunnerConfig{
		Logger:   slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Observer: projector.RunnerObserver{Unmarked: func(string) { unmarked++ }},
	}
	stop := run(t, noMarks{db}, f, cfg, define(marked, add))
	for range 2 {
		f.deliver(t, msg("1", "posted", `{"Stars":5}`))
	}
	require.NoError(t, stop())
	require.Equal(t, 10, total(db, "totals"))
	require.Equal(t, 2, unmarked)
	require.Contains(t, log.String(), "level=DEBUG")
	require.Contains(t, log.String(), "no-op")
}

// unitsAlone hides all of a provider except its units.
type unitsAlone struct{ provider.Units[txn] }

type noOutbox struct{ unit }

func (noOutbox) Keeps() provider.Keeps { return provider.Keeps{Markers: true} }

func emit(context.Context, txn, eventstore.Event[posted]) ([]outbox.Message, error) { return nil, nil }

func TestBadNameIsInvalidInput(t *testing.T) {
	db := newDB(t)
	for projectorName, handler := range map[string]string{"p'": "h", "p": `h";--`} {
		_, err := projector.NewRunner(db, projector.Subscribe(make(subscription), "t"), projector.RunnerConfig{}, projector.Define(projectorName, types, marked, projector.On(handler, add)))
		var invalid *eventstore.InvalidError
		require.ErrorAs(t, err, &invalid)
	}
}

// The version is stored with parked messages, which could not be parked with one that cannot be stored.
func TestAVersionMustBeStorable(t *testing.T) {
	for _, version := range []string{"1\x00", "\xff", strings.Repeat("v", 256)} {
		_, err := projector.NewRunner(newDB(t), projector.Subscribe(make(subscription), "t"), projector.RunnerConfig{Version: version}, define(marked, add))
		require.ErrorIs(t, err, eventstore.ErrInvalid)
	}
}

func TestNewRunnerRefuses(t *testing.T) {
	t.Parallel()
	db, good := newDB(t), projector.Subscribe(make(subscription), "review")
	ok := define(marked, add)
	type args struct {
		u   provider.Units[txn]
		src projector.Source
		cfg projector.RunnerConfig
		ps  []*projector.Projector[txn]
	}
	one := func(name string, ts *eventstore.Types, hs ...projector.Handler[txn]) args {
		return args{u: db, src: good, ps: []*projector.Projector[txn]{projector.Define(name, ts, marked, hs...)}}
	}
	for name, a := range map[string]args{
		"no unit of work":        {src: good, ps: []*projector.Projector[txn]{ok}},
		"no subscriber":          {u: db, src: projector.Subscribe(nil, "a"), ps: []*projector.Projector[txn]{ok}},
		"no topics":              {u: db, src: projector.Subscribe(make(subscription)), ps: []*projector.Projector[txn]{ok}},
		"an empty topic":         {u: db, src: projector.Subscribe(make(subscription), "a", ""), ps: []*projector.Projector[txn]{ok}},
		"a topic twice":          {u: db, src: projector.Subscribe(make(subscription), "a", "b", "a"), ps: []*projector.Projector[txn]{ok}},
		"no projectors":          {u: db, src: good},
		"a nil projector":        {u: db, src: good, ps: []*projector.Projector[txn]{nil}},
		"a projector twice":      {u: db, src: good, ps: []*projector.Projector[txn]{ok, ok}},
		"nowhere to park":        {u: unitsAlone{db}, src: good, ps: []*projector.Projector[txn]{ok}},
		"no outbox for OnEmit":   {u: noOutbox{db}, src: good, ps: []*projector.Projector[txn]{projector.Define("p", types, marked, projector.OnEmit("a", emit))}},
		"negative timeout":       {u: db, src: good, cfg: projector.RunnerConfig{Timeout: -1}, ps: []*projector.Projector[txn]{ok}},
		"negative drain":         {u: db, src: good, cfg: projector.RunnerConfig{Drain: -1}, ps: []*projector.Projector[txn]{ok}},
		"bad retry":              {u: db, src: good, cfg: projector.RunnerConfig{Retry: claim.Backoff{Jitter: 3}}, ps: []*projector.Projector[txn]{ok}},
		"bad name":               one("P", types, projector.On("a", add)),
		"injected name":          one(`p";--`, types, projector.On("a", add)),
		"bad handler name":       one("p", types, projector.On("a/b", add)),
		"no handlers":            one("p", types),
		"no types":               one("p", nil, projector.On("a", add)),
		"faulty types":           one("p", eventstore.NewTypes(eventstore.Type[*posted]("x")), projector.On("a", add)),
		"matches nothing":        one("p", types, projector.On("a", func(context.Context, txn, eventstore.Event[*posted]) error { return nil })),
		"handler name twice":     one("p", types, projector.On("a", add), projector.On("a", add)),
		"old name in use":        one("p", types, projector.On("a", add), projector.On("b", add).Was("a")),
		"bad old name":           one("p", types, projector.On("a", add).Was("A b")),
		"bad old projector name": one("p", types, projector.On("a", add).Was("P/a")),
		"nil function":           one("p", types, projector.On[txn, posted]("a", nil)),
		"nil emitting function":  one("p", types, projector.OnEmit[txn, posted]("a", nil)),
		"zero handler":           one("p", types, projector.Handler[txn]{}),
	} {
		_, err := projector.NewRunner(a.u, a.src, a.cfg, a.ps...)
		require.Error(t, err, name)
	}
	_, err := projector.NewRunner(db, good, projector.RunnerConfig{}, ok, projector.Define("q", types, projector.Options{}, projector.OnEmit("a", emit)))
	require.NoError(t, err)
}

// A table of which a million generations would not have names is refused before anything is written, and so is the name of an
// index. The error has the length and the limit.
func TestLongNamesOfTablesAreRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		define := func(table, index string) *projector.Projector[txn] {
			return projector.Define("p", types, projector.Options{Markers: true, Tables: []string{"reports." + table}},
				projector.OnCreate(func(ctx context.Context, tx txn) error {
					tx.Put(projector.Table(ctx, index), "made", []int{1})
					return nil
				}), projector.On("a", add))
		}
		refused := func(db *memory.DB, err error, what string) {
			var invalid *eventstore.InvalidError
			require.ErrorAs(t, err, &invalid, what)
			require.Contains(t, invalid.Reason, "56 bytes: at most 55", what)
			generations, err := db.Generations(t.Context(), "p")
			require.NoError(t, err)
			require.Empty(t, generations, what)
		}
		db, fits := newDB(t), strings.Repeat("x", 55)
		_, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, define(fits+"x", "i"))
		refused(db, err, "NewRunner")
		refused(db, define(fits+"x", "i").Create(t.Context(), db, nil), "Create")
		refused(db, define(fits, "reports."+fits+"x").Create(t.Context(), db, nil), "an index")
		require.NoError(t, define(fits, fits).Create(t.Context(), db, nil))
		_, err = projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, projector.Define("q", types, projector.Options{Tables: []string{fits + "x"}}, projector.On("a", add)))
		require.NoError(t, err, "no name is added")
		long := projector.Define("q", types, projector.Options{Tables: []string{strings.Repeat("x", 64)}}, projector.On("a", add))
		_, err = projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, long)
		require.ErrorContains(t, err, "64 bytes: at most 63")
	})
}

// Promise: G4.13
func TestOutputCommitsWithItsEffectOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		failures := 2
		p := projector.Define("p", types, marked, projector.OnEmit("a",
			func(ctx context.Context, tx txn, e eventstore.Event[posted]) ([]outbox.Message, error) {
				out := []outbox.Message{
					{Topic: "flags", Payload: []byte("one")},
					{ID: "my-own", Topic: "flags", Key: "k", Payload: []byte("two"), Headers: map[string]string{provider.HeaderCausation: "mine"}},
				}
				if failures--; failures >= 0 {
					return out, context.DeadlineExceeded
				}
				return out, add(ctx, tx, e)
			}))
		stop := run(t, db, f, projector.RunnerConfig{}, p)
		m := msg("1", "posted", `{"Stars":5}`)
		m.Metadata[provider.HeaderCorrelation] = "corr"
		f.deliver(t, m)
		time.Sleep(5 * time.Second) // its retries are finished
		f.deliver(t, m)
		require.NoError(t, stop())
		list, err := db.Entries(t.Context(), outbox.Filter{})
		require.NoError(t, err)
		require.Len(t, list, 2, "once, without the failed attempts")
		require.Len(t, list[0].ID, 36)
		require.Equal(t, "review-1", list[0].Key, "the cause's stream")
		require.Equal(t, "1", list[0].Headers[provider.HeaderCausation])
		require.Equal(t, "corr", list[0].Headers[provider.HeaderCorrelation])
		require.Equal(t, []string{"my-own", "k", "mine"}, []string{list[1].ID, list[1].Key, list[1].Headers[provider.HeaderCausation]})
		require.Equal(t, 5, total(db, "totals"))
	})
}

// Output inherits headers only if they are valid and fit. The handler's own slice and maps are not changed.
func TestOutputInheritsOnlyValidHeaders(t *testing.T) {
	t.Parallel()
	db, f := newDB(t), make(subscription)
	mine := []outbox.Message{{Topic: "flags", Headers: map[string]string{}}}
	for i := range 63 {
		mine[0].Headers[fmt.Sprint("h", i)] = "v"
	}
	p := projector.Define("p", types, marked, projector.OnEmit("a",
		func(context.Context, txn, eventstore.Event[posted]) ([]outbox.Message, error) { return mine, nil }))
	stop := run(t, db, f, projector.RunnerConfig{}, p)
	for _, id := range []string{"1", "2"} {
		m := msg(id, "posted", `{}`)
		m.Metadata[provider.HeaderCorrelation] = strings.Repeat("c", 2000)
		m.Metadata[provider.HeaderStream] = strings.Repeat("s", 2000)
		f.deliver(t, m)
	}
	require.NoError(t, stop())
	require.Empty(t, parked(t, db))
	list, err := db.Entries(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	require.Len(t, list, 2, "each has its own id")
	for i, e := range list {
		require.Equal(t, fmt.Sprint(i+1), e.Headers[provider.HeaderCausation])
		require.Equal(t, e.ID, e.Key)
		require.Len(t, e.Headers, 64)
	}
	require.Empty(t, mine[0].ID)
	require.Len(t, mine[0].Headers, 63)
}

func TestOutputIDsAreStableWithoutMarkers(t *testing.T) {
	t.Parallel()
	db, f := newDB(t), make(subscription)
	p := projector.Define("p", types, projector.Options{}, projector.OnEmit("a",
		func(context.Context, txn, eventstore.Event[posted]) ([]outbox.Message, error) {
			return []outbox.Message{{Topic: "flags"}, {Topic: "flags"}}, nil
		}))
	stop := run(t, db, f, projector.RunnerConfig{}, p)
	f.deliver(t, msg("1", "posted", `{}`))
	f.deliver(t, msg("1", "posted", `{}`))
	f.deliver(t, msg("2", "posted", `{}`))
	require.NoError(t, stop())
	list, err := db.Entries(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	require.Len(t, list, 4, "the output of one event has the same ids each time")
}

func TestInvalidOutputIsParked(t *testing.T) {
	t.Parallel()
	db, f := newDB(t), make(subscription)
	p := projector.Define("p", types, marked, projector.OnEmit("a",
		func(ctx context.Context, tx txn, e eventstore.Event[posted]) ([]outbox.Message, error) {
			return []outbox.Message{{Topic: ""}}, add(ctx, tx, e)
		}))
	stop := run(t, db, f, projector.RunnerConfig{}, p)
	f.deliver(t, msg("1", "posted", `{"Stars":5}`))
	require.NoError(t, stop())
	require.Len(t, parked(t, db), 1)
	require.Zero(t, total(db, "totals"), "output and effect are committed together or not at all")
}

type review struct{}

func (*review) Apply(any) {}

func TestWaitFollowsAnAppendThroughRelayAndBroker(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
	t.Cleanup(func() { require.NoError(t, broker.Close()) })
	poison := func(_ context.Context, _ txn, e eventstore.Event[posted]) error {
		if e.Data.Stars == 0 {
			return projector.Permanent(context.Canceled)
		}
		return nil
	}
	p := define(marked, add, poison)
	quiet := slog.New(slog.DiscardHandler)
	runner, err := projector.NewRunner(db, projector.Subscribe(broker, "review"), projector.RunnerConfig{Logger: quiet}, p)
	require.NoError(t, err)
	relay, err := outbox.NewRelay(db, broker, &outbox.RelayConfig{Logger: quiet})
	require.NoError(t, err)
	reviews, err := eventstore.NewRepository(db, types, "review", func(string) *review { return &review{} }, nil)
	require.NoError(t, err)

	at, err := reviews.Update(t.Context(), "1", func(*review) ([]any, error) { return []any{posted{5}, unhandled{}, posted{3}}, nil })
	require.NoError(t, err)
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, p.Wait(soon, db, at), context.DeadlineExceeded, "nothing runs yet")

	g, err := kinora.Start(t.Context(), runner, relay)
	require.NoError(t, err)
	require.NoError(t, p.Wait(t.Context(), db, at))
	require.Equal(t, 8, total(db, "totals"))

	same, err := reviews.Update(t.Context(), "1", func(*review) ([]any, error) { return nil, nil })
	require.NoError(t, err)
	require.NoError(t, p.Wait(t.Context(), db, same), "nothing appended: the stream's last event")
	none, err := reviews.Update(t.Context(), "2", func(*review) ([]any, error) { return nil, nil })
	require.NoError(t, err)
	require.NoError(t, p.Wait(t.Context(), db, none), "no stream at all")

	bad, err := reviews.Update(t.Context(), "1", func(*review) ([]any, error) { return []any{posted{0}, posted{1}}, nil })
	require.NoError(t, err)
	require.ErrorIs(t, p.Wait(t.Context(), db, bad), projector.ErrParked)
	require.ErrorIs(t, named("other", projector.Options{}, add).Wait(t.Context(), db, at), projector.ErrNoMarkers)
	require.NoError(t, g.Stop())
}

// Types, Options and Takes return what the projector was defined with.
func TestDefinitionIsReadable(t *testing.T) {
	t.Parallel()
	p := define(marked, add)
	require.Same(t, types, p.Types())
	require.Equal(t, marked, p.Options())
	require.Equal(t, []string{"posted"}, p.Takes())
	renamed := eventstore.NewTypes(eventstore.Type[posted]("review.posted").Was("posted"), eventstore.Type[unhandled]("unhandled"))
	require.Equal(t, []string{"posted", "review.posted"}, projector.Define("p", renamed, marked, projector.On("a", add)).Takes())
}
