package projector_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

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
