package projector_test

import (
	"context"
	"encoding/json"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// failures describes the messages that would fail.
func failures(d *projector.DryRun) (text []string) {
	for _, f := range d.Failures {
		text = append(text, f.Parked.MessageID+": "+f.Err.Error())
	}
	return text
}

// change returns a row of table "a" that a dry run inserted.
func change(row string) provider.Change {
	return provider.Change{Table: "a", After: json.RawMessage(row)}
}

// Promise: G6.14
func TestDryRunShowsReplayAndWritesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		bad := newFaults(map[string]error{"x-1": errNever, "y-1": errNever})
		parkFirst(t, db, bad, "x", "y")
		bad.set("x-1", nil)
		before := parked(t, db)
		p := define(marked, bad.run)
		got, err := p.DryRun(t.Context(), db, projector.ParkedFilter{}, nil)
		require.NoError(t, err)
		require.Equal(t, 3, got.Messages)
		require.Equal(t, 2, got.Waiting)
		require.Equal(t, []string{"y-1: permanent: never"}, failures(got))
		require.Equal(t, []provider.Change{change(`{"key":"x","value":[1,2,3]}`)}, got.Changes)
		require.Equal(t, before, parked(t, db), "it counts no attempt and decides nothing")
		require.Empty(t, noted(db, "a", "x"))

		replayAll(t, db, all)
		drain(t, db, projector.RunnerConfig{}, p)
		require.Equal(t, upTo(3), noted(db, "a", "x"), "the replay has the effects that the dry run showed")
		require.Equal(t, []string{"y-1 stuck permanent 1", "y-2 waiting held 0", "y-3 waiting held 0"}, rows(parked(t, db)))
	})
}

// An event that cannot be decoded would fail, and the messages behind it would wait.
// Promise: G6.14
func TestADryRunNamesWhatCannotBeDecoded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		bad := newFaults(map[string]error{"x-2": errNever})
		f := make(subscription)
		stop := run(t, db, f, projector.RunnerConfig{}, define(marked, bad.run))
		for n := 1; n <= 4; n++ {
			f.deliver(t, keyed("x", n))
			m := keyed("y", n)
			if n == 1 {
				m.Payload = []byte(`{"Stars":"many"}`)
			}
			f.deliver(t, m)
		}
		require.NoError(t, stop())
		require.Len(t, parked(t, db), 7)
		bad.fix()
		got, err := define(marked, bad.run).DryRun(t.Context(), db, projector.ParkedFilter{}, nil)
		require.NoError(t, err)
		require.Equal(t, []int{3, 3}, []int{got.Messages, got.Waiting})
		require.Len(t, got.Failures, 1)
		require.Equal(t, "y-1", got.Failures[0].Parked.MessageID)
		require.Equal(t, "undecodable", provider.CodeOf(got.Failures[0].Err))
	})
}

// A message that is not selected holds the messages behind it.
func TestDryRunCoversSelectedMessages(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		filter                   projector.ParkedFilter
		messages, waiting, fails int
	}{
		"the first":       {projector.ParkedFilter{Seqs: []int64{1}}, 1, 0, 0},
		"those behind it": {projector.ParkedFilter{Seqs: []int64{2, 3}}, 0, 2, 0},
		"at most two":     {projector.ParkedFilter{Limit: 2}, 2, 0, 0},
		"none":            {projector.ParkedFilter{Key: "other"}, 0, 0, 0},
		"stuck ones":      {projector.ParkedFilter{States: []projector.ParkedState{projector.StateStuck}}, 1, 0, 0},
		"waiting ones":    {projector.ParkedFilter{States: []projector.ParkedState{projector.StateWaiting}}, 0, 2, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				bad := newFaults(map[string]error{"x-1": errNever})
				parkFirst(t, db, bad, "x")
				bad.fix()
				got, err := define(marked, bad.run).DryRun(t.Context(), db, c.filter, nil)
				require.NoError(t, err)
				require.Equal(t, []int{c.messages, c.waiting, c.fails}, []int{got.Messages, got.Waiting, len(got.Failures)})
			})
		})
	}
}

// Each message has its own timeout. A handler that never returns, exits its goroutine or panics
// fails only its message.
func TestDryRunSurvivesBadHandlers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		parkFirst(t, db, newFaults(map[string]error{"w-1": errNever, "x-1": errNever, "y-1": errNever, "z-1": errNever}), "w", "x", "y", "z")
		release := make(chan struct{})
		defer close(release)
		p := define(marked, func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			switch e.Stream {
			case "w":
				panic("oh")
			case "x":
				runtime.Goexit()
			case "y":
				<-release
			default:
				time.Sleep(12 * time.Second) // three of them take longer than one timeout
			}
			return note("a")(ctx, tx, e)
		})
		got, err := p.DryRun(t.Context(), db, projector.ParkedFilter{}, nil)
		require.NoError(t, err)
		require.Equal(t, 3, got.Messages)
		require.Equal(t, 6, got.Waiting)
		require.Equal(t, []string{
			"w-1: unknown (panic): panic: oh",
			"x-1: unknown (goexit): the handler called runtime.Goexit",
			"y-1: permanent (stuck): the handler did not return after its timeout, and may still run",
		}, failures(got))
		require.Equal(t, []provider.Change{change(`{"key":"z","value":[1,2,3]}`)}, got.Changes)
	})
}

func TestDryRunShowsOutputWithoutSendingIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		parkFirst(t, db, newFaults(map[string]error{"x-1": errNever}), "x")
		p := projector.Define("p", types, marked, projector.OnEmit("a",
			func(_ context.Context, _ txn, e eventstore.Event[posted]) ([]outbox.Message, error) {
				return []outbox.Message{{Topic: "flags", Payload: []byte(e.ID)}}, nil
			}))
		got, err := p.DryRun(t.Context(), db, projector.ParkedFilter{}, nil)
		require.NoError(t, err)
		var sent []string
		for _, m := range got.Output {
			sent = append(sent, string(m.Payload))
		}
		require.Equal(t, []string{"x-1", "x-2", "x-3"}, sent)
		entries, err := db.Entries(t.Context(), outbox.Filter{})
		require.NoError(t, err)
		require.Empty(t, entries)
	})
}

// Messages that this program cannot apply would fail, and hold the messages behind them.
func TestDryRunReportsMessagesThisProgramCannotApply(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		parkFirst(t, db, newFaults(map[string]error{"x-1": errNever}), "x")
		for reason, p := range map[string]*projector.Projector[txn]{
			"no_handler":   projector.Define("p", types, marked, projector.On("other", note("a"))),
			"unregistered": older(),
		} {
			got, err := p.DryRun(t.Context(), db, projector.ParkedFilter{}, nil)
			require.NoError(t, err)
			require.Zero(t, got.Messages)
			require.Len(t, got.Failures, 3)
			require.ErrorContains(t, got.Failures[0].Err, reason)
		}
	})
}

// Output that the outbox refuses is the failure of its message, and not of the dry run.
func TestDryRunReportsInvalidOutput(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		parkFirst(t, db, newFaults(map[string]error{"x-1": errNever, "y-1": errNever, "z-1": errNever}), "x", "y", "z")
		p := projector.Define("p", types, marked, projector.OnEmit("a",
			func(_ context.Context, _ txn, e eventstore.Event[posted]) ([]outbox.Message, error) {
				if e.Stream == "y" {
					return []outbox.Message{{}}, nil // it has no topic
				}
				return []outbox.Message{{Topic: "flags"}}, nil
			}))
		got, err := p.DryRun(t.Context(), db, projector.ParkedFilter{}, nil)
		require.NoError(t, err)
		require.Equal(t, 6, got.Messages)
		require.Equal(t, 2, got.Waiting)
		require.Len(t, got.Failures, 1)
		require.Equal(t, "y-1", got.Failures[0].Parked.MessageID)
		require.ErrorIs(t, got.Failures[0].Err, eventstore.ErrInvalid)
	})
}

// noDryRuns is a provider that cannot report the changes of a unit.
type noDryRuns struct{ unit }

func (n noDryRuns) Keeps() provider.Keeps {
	k := n.unit.Keeps()
	k.DryRun = false
	return k
}

func TestDryRunRefusesBadFilters(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		bad := newFaults(map[string]error{"x-1": errNever})
		parkFirst(t, db, bad, "x")
		p := define(marked, bad.run)
		for name, f := range map[string]projector.ParkedFilter{
			"another projector":          {Projector: "q"},
			"a negative number":          {Projector: "p", Limit: -1},
			"messages that are resolved": {Projector: "p", States: []projector.ParkedState{projector.StateSkipped}},
			"resolved ones and others":   {Projector: "p", States: []projector.ParkedState{projector.StateStuck, projector.StateReplayed}},
		} {
			_, err := p.DryRun(t.Context(), db, f, nil)
			require.ErrorIs(t, err, projector.ErrInput, name)
		}
		_, err := p.DryRun(t.Context(), noDryRuns{db}, projector.ParkedFilter{}, nil)
		require.ErrorIs(t, err, projector.ErrNoDryRun)
	})
}

// An error that is not a message's own ends the dry run.
func TestDryRunReturnsErrorsOfTheStore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		bad := newFaults(map[string]error{"x-1": errNever})
		parkFirst(t, db, bad, "x")
		p := define(marked, bad.run)
		for _, fault := range []error{errBusy, errors.New("the commit failed")} {
			store := &faulty{unit: db, do: func(context.Context, provider.Unit, handle) error { return fault }}
			_, err := p.DryRun(t.Context(), store, projector.ParkedFilter{}, nil)
			require.ErrorIs(t, err, fault)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := p.DryRun(ctx, db, projector.ParkedFilter{}, nil)
		require.ErrorIs(t, err, context.Canceled)
	})
}

func TestDryRunWorksNextToARunner(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNever})
		p := define(marked, bad.run)
		r := newRunner(t, db, projector.Subscribe(f, "review"), projector.RunnerConfig{}, p)
		stop := start(t, r)
		f.deliver(t, series("k", 1, 3)...)
		bad.fix()
		got, err := p.DryRun(t.Context(), db, projector.ParkedFilter{}, nil)
		require.NoError(t, err)
		require.Equal(t, 3, got.Messages)
		f.deliver(t, keyed("other", 1))
		require.NoError(t, stop())
		require.Equal(t, upTo(1), noted(db, "a", "other"))
		db.View(func(m *memory.Model) {
			_, there := m.Get("a", "k")
			require.False(t, there)
		})
	})
}
