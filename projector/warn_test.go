package projector_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/projector"
	"github.com/stretchr/testify/require"
)

// warnings runs a runner until it has started, and returns what it has logged.
func warnings(t *testing.T, db unit, src projector.Source, p *projector.Projector[txn]) string {
	t.Helper()
	var log bytes.Buffer
	stop := start(t, newRunner(t, db, src, projector.RunnerConfig{Logger: slog.New(slog.NewTextHandler(&log, nil))}, p))
	require.NoError(t, stop())
	return log.String()
}

// TestRunnerWarnsOfRepeatedEffects: a projector over a broker without markers is reported once, unless its
// handlers may run again.
func TestRunnerWarnsOfRepeatedEffects(t *testing.T) {
	t.Parallel()
	const warning = "redelivered messages take effect again: the projector has no markers"
	for name, c := range map[string]struct {
		log  bool
		opts projector.Options
		want int
	}{
		"broker":               {false, projector.Options{}, 1},
		"broker, repeat-safe":  {false, projector.Options{RepeatSafe: true}, 0},
		"broker, with markers": {false, marked, 0},
		"log":                  {true, projector.Options{}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			db := newDB(t)
			src := projector.Subscribe(make(subscription), "review")
			if c.log {
				src = projector.FromLog(db)
			}
			require.Equal(t, c.want, strings.Count(warnings(t, db, src, define(c.opts, note("a"))), warning))
		})
	}
}

// TestRunnerWarnsOfRenamedHandlers: a handler that was renamed without Was has no markers of its own.
func TestRunnerWarnsOfRenamedHandlers(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	f := make(subscription)
	stop := run(t, db, f, projector.RunnerConfig{}, define(delivered, note("a"), note("b")))
	f.deliver(t, keyed("k", 1))
	require.NoError(t, stop())
	for name, c := range map[string]struct {
		p    *projector.Projector[txn]
		want []string
	}{
		"same":          {define(delivered, note("a"), note("b")), nil},
		"renamed":       {projector.Define("p", types, delivered, projector.On("c", note("a"))), []string{"handler=p/a", "handler=p/b"}},
		"declared":      {projector.Define("p", types, delivered, projector.On("c", note("a")).Was("a", "b")), nil},
		"another":       {projector.Define("q", types, delivered, projector.On("c", note("a"))), nil},
		"name in front": {projector.Define("p2", types, delivered, projector.On("c", note("a"))), nil},
	} {
		t.Run(name, func(t *testing.T) {
			log := warnings(t, db, projector.Subscribe(make(subscription), "review"), c.p)
			require.Equal(t, len(c.want), strings.Count(log, "declare the name with Was"))
			for _, want := range c.want {
				require.Contains(t, log, want)
			}
		})
	}
}

// A program that is deployed in place of a newer one is told at its start what it lacks.
// Promise: G6.9
func TestRunnerWarnsOfWhatItLacks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		var opts projector.Options
		src := projector.FromLog(db)
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, knowing(2, 3, opts)))
		for schema := 1; schema <= 3; schema++ {
			rate(t, db, "rated", min(schema, 2), "review-1", schema)
			rate(t, db, "renamed", schema, "review-2", schema)
		}
		time.Sleep(5 * time.Second)
		require.NoError(t, stop())
		require.Equal(t, upTo(3), noted(db, "a", "review-1"))
		require.Equal(t, upTo(3), noted(db, "a", "review-2"))

		const warning = "the read model has what this program does not have"
		log := warnings(t, db, src, knowing(1, 1, opts))
		require.Equal(t, 1, strings.Count(log, warning), "once for each projector: %s", log)
		require.Contains(t, log, `projector=p generation=1 lacks="[event rated 2 event renamed 2 event renamed 3]"`)
		require.Contains(t, warnings(t, db, src, knowing(2, 0, opts)), `lacks="[event renamed 1 event renamed 2 event renamed 3 handler p/renamed of renamed]"`)
		require.NotContains(t, warnings(t, db, src, knowing(2, 3, opts)), warning)
	})
}

// What messages need that no program has is logged once a minute.
func TestRunnerWarnsOfWhatMessagesNeed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f, out := newDB(t), make(subscription), &logs{}
		stop := run(t, db, f, projector.RunnerConfig{Logger: out.logger()}, older())
		f.deliver(t, keyed("k", 1), keyed("l", 1))
		time.Sleep(150 * time.Second)
		require.NoError(t, stop())
		const warning = `level=WARN msg="messages wait for a program that meets their needs" projector=p generation=1 needs="[event posted 1]"`
		require.Equal(t, 3, strings.Count(out.String(), warning), "%s", out)
	})
}
