package projector_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/stretchr/testify/require"
)

// A new program brings an event type while the old one reads the log. With categories, the old one leaves these events to it.
// Without, it passes them, and the new handler begins behind them.
func TestANewTypeBesideAnOldReader(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		categories []string
		want       []int
	}{
		"categories":    {[]string{"k"}, []int{1, 2, 3, 4}},
		"no categories": {nil, []int{1, 3, 4}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				begin := func(p *projector.Projector[txn]) func() error {
					return start(t, newRunner(t, db, projector.FromLog(db, c.categories...), projector.RunnerConfig{}, p))
				}
				stopOld := begin(knowing(1, 0, projector.Options{}))
				rate(t, db, "rated", 1, "k-1", 1)
				time.Sleep(time.Second)
				stopNew := begin(knowing(1, 1, projector.Options{}))
				time.Sleep(time.Second)
				rate(t, db, "renamed", 1, "k-1", 2)
				rate(t, db, "rated", 1, "k-1", 3)
				time.Sleep(time.Minute)
				require.NoError(t, stopOld())
				time.Sleep(time.Minute)
				rate(t, db, "renamed", 1, "k-1", 4)
				time.Sleep(time.Minute)
				require.NoError(t, stopNew())
				require.Equal(t, c.want, noted(db, "a", "k-1"))
				require.Empty(t, parked(t, db))
			})
		})
	}
}

// A handler that did two things is split in two, one with its name. Over the log, and with nothing parked, each thing is done
// once for each event, also across a rollback. What was parked before is only for the handler that has its name.
func TestASplitHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, failing := newDB(t), true
		both := func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			if e.Stream == "k-2" && failing {
				return projector.Permanent(errNever)
			}
			if err := note("a")(ctx, tx, e); err != nil {
				return err
			}
			return note("b")(ctx, tx, e)
		}
		before, after := define(projector.Options{}, both), define(projector.Options{}, note("a"), note("b"))
		write(t, db, "k-2", 1)
		n := 0
		next := func() {
			time.Sleep(time.Minute)
			n++
			write(t, db, "k-1", n)
			time.Sleep(time.Minute)
		}
		stopOld := fromLog(t, db, projector.RunnerConfig{}, before)
		next()
		stopNew := fromLog(t, db, projector.RunnerConfig{}, after)
		next()
		require.NoError(t, stopOld())
		next()
		stopOld = fromLog(t, db, projector.RunnerConfig{}, before)
		next()
		require.NoError(t, stopNew())
		next()
		require.Equal(t, upTo(4), noted(db, "a", "k-1"), "the program before waits for the one that has both")
		stopNew = fromLog(t, db, projector.RunnerConfig{}, after)
		next()
		require.NoError(t, stopOld())
		failing = false
		replayAll(t, db, all)
		time.Sleep(time.Minute)
		require.NoError(t, stopNew())
		require.Equal(t, upTo(n), noted(db, "a", "k-1"))
		require.Equal(t, upTo(n), noted(db, "b", "k-1"))
		require.Equal(t, upTo(1), noted(db, "a", "k-2"))
		require.Empty(t, noted(db, "b", "k-2"))
		require.Empty(t, parked(t, db))
	})
}

// A projector with a new name has no checkpoint: it begins at Options.From, whatever its handlers were named.
func TestAProjectorWithANewNameBeginsAnew(t *testing.T) {
	t.Parallel()
	for name, fromLog := range map[string]bool{"from the log": true, "from a broker": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				apply := func(p *projector.Projector[txn]) {
					src := projector.Subscribe(make(subscription), "k")
					if fromLog {
						src = projector.FromLog(db)
					}
					stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, p))
					time.Sleep(time.Minute)
					require.NoError(t, stop())
				}
				of := func(name string, from int64, was ...string) *projector.Projector[txn] {
					opts := projector.Options{Markers: true, From: eventstore.From{Position: from}}
					return projector.Define(name, types, opts, projector.On("a", note(name)).Was(was...))
				}
				write(t, db, "k-1", 1, 2, 3)
				apply(of("p", 0))
				write(t, db, "k-1", 4)
				apply(of("anew", 0, "p/a"))
				require.Equal(t, upTo(4), noted(db, "anew", "k-1"))
				apply(of("behind", checkpoint(t, db).Place.Position, "p/a"))
				require.Equal(t, []int{4}, noted(db, "behind", "k-1"))
			})
		})
	}
}
