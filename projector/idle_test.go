package projector_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// A program of an older version than the live read model starts, and gets a delivery. It leaves it to
// the programs that feed the live generation, and applies nothing.
func TestADeliveryToAProgramThatFeedsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		cfg := projector.RunnerConfig{Grace: time.Hour}
		two := built(projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen}, 10)
		stopTwo := start(t, newRunner(t, db, projector.Subscribe(make(subscription), "review"), cfg, two))
		for checkpoint(t, db).Mode != provider.ModeLive {
			time.Sleep(time.Second)
		}
		write(t, db, "k-1", 1)
		stop := start(t, newRunner(t, db, projector.Subscribe(f, "review"), cfg, built(projector.Options{Markers: true}, 1)))
		f.deliver(t, publishedAfter(t, db, "k-1", 0)...)
		time.Sleep(10 * time.Second)
		require.Equal(t, times(10, upTo(1)), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
		require.NoError(t, stopTwo())
	})
}

// A program that feeds no generation logs why, once a minute.
func TestAProgramThatFeedsNothingLogsWhy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, out := newDB(t), &logs{}
		one, opts := built(projector.Options{}, 1), projector.Options{Version: 2, RebuildOnChange: projector.BlueGreen}
		stop := fromLog(t, db, projector.RunnerConfig{}, one)
		two := built(opts, 10)
		stopTwo := fromLog(t, db, projector.RunnerConfig{Logger: out.logger()}, two)
		state(t, db, two, 2, "live")
		require.NoError(t, projector.Control(t.Context(), db, "p", 1, projector.Promote, person))
		state(t, db, two, 1, "live")
		require.NoError(t, projector.Control(t.Context(), db, "p", 2, projector.Drop, person))
		time.Sleep(2*time.Minute + 30*time.Second)
		require.NoError(t, stopTwo())
		require.Equal(t, 3, strings.Count(out.String(), `level=WARN msg="the read model of this version was canceled or dropped: `+
			`request a rebuild, or deploy a newer version" projector=p version=2 live_generation=1 live_versions="[1 1]"`), out)
		require.NoError(t, stop())

		opts.Version = 3
		three := built(opts, 100)
		stop = fromLog(t, db, projector.RunnerConfig{}, three)
		live := state(t, db, three, 3, "live")
		require.NoError(t, stop())
		stop = fromLog(t, db, projector.RunnerConfig{Logger: out.logger()}, one)
		require.NoError(t, projector.Control(t.Context(), db, "p", 1, projector.Drop, person))
		time.Sleep(2*time.Minute + 30*time.Second)
		require.NoError(t, stop())
		require.Equal(t, 3, live.Oldest)
		require.Equal(t, 3, strings.Count(out.String(), `level=WARN msg="this program applies nothing: the live read model is that of a newer version" `+
			`projector=p version=1 live_generation=3 live_versions="[3 3]"`), out)
	})
}

// A program that feeds a generation that stands by logs once a minute that the live one does not move.
func TestALiveReadModelThatDoesNotMoveIsLogged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, out := newDB(t), &logs{}
		write(t, db, "k-1", upTo(10)...)
		stop := fromLog(t, db, projector.RunnerConfig{Logger: out.logger()}, built(projector.Options{}, 1))
		two := built(projector.Options{Version: 2, RebuildOnChange: projector.BlueGreen}, 10)
		stopTwo := fromLog(t, db, projector.RunnerConfig{}, two)
		state(t, db, two, 2, "live")
		const line = `level=WARN msg="the live read model does not move: start a program with its version, or promote another generation" ` +
			"projector=p position=30 generation=1\n"
		for n := range 20 {
			time.Sleep(time.Minute)
			write(t, db, "k-1", 11+n)
		}
		time.Sleep(time.Minute)
		require.NoError(t, stopTwo())
		time.Sleep(time.Minute)
		write(t, db, "k-1", 31)
		time.Sleep(14 * time.Second)
		require.NotContains(t, out.String(), "does not move", "less than a lease")
		time.Sleep(2*time.Minute + 10*time.Second)
		require.Equal(t, 3, strings.Count(out.String(), line), out)
		require.Equal(t, upTo(30), noted(db, "notes_g1", "k-1"))
		require.NoError(t, stop())
	})
}

// A projector whose generations cannot be changed is looked at less and less often. Others get theirs.
func TestAProjectorWhoseGenerationsCannotBeChanged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(10)...)
		var fails atomic.Bool
		var tries atomic.Int32
		store := switching{db, db, func(u provider.Unit) error {
			if !fails.Load() || u.Projector != "p" {
				return nil
			}
			tries.Add(1)
			return errBusy
		}}
		p := built(projector.Options{}, 1)
		q := projector.Define("q", types, projector.Options{Tables: []string{"others"}},
			projector.OnReset(func(context.Context, txn) error { return nil }), projector.On("a", note("others")))
		r := newRunner(t, store, projector.FromLog(db), projector.RunnerConfig{}, p, q)
		stop := start(t, r)
		time.Sleep(time.Second)
		fails.Store(true)
		n, err := projector.RequestRebuild(t.Context(), db, "p", request(projector.BlueGreen))
		require.NoError(t, err)
		time.Sleep(30 * time.Second)
		began := time.Now()
		require.NoError(t, r.Rebuild(t.Context(), "q", request(projector.InPlace)))
		require.Less(t, time.Since(began), 3*time.Second)
		time.Sleep(5 * time.Minute)
		require.Greater(t, tries.Load(), int32(10))
		require.Less(t, tries.Load(), int32(30))
		fails.Store(false)
		state(t, db, p, n, "live")

		fails.Store(true)
		tries.Store(0)
		_, err = projector.RequestRebuild(t.Context(), db, "p", request(projector.BlueGreen))
		require.NoError(t, err)
		time.Sleep(10 * time.Second)
		require.Greater(t, tries.Load(), int32(4), "after a success the pauses are short again")
		require.NoError(t, stop())
	})
}

// killed is the store of a process that ends without releasing its leases.
type killed struct{ unit }

func (killed) ReleaseLease(context.Context, string, claim.Token) error { return nil }

// After the process of a verification was killed, the next one waits until its lease has expired.
func TestAVerificationAfterOneThatWasKilled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", upTo(300)...)
		p := built(projector.Options{}, 1)
		stop := fromLog(t, db, projector.RunnerConfig{}, p)
		time.Sleep(time.Second)
		ctx, kill := context.WithTimeout(t.Context(), 10*time.Second)
		defer kill()
		_, err := p.Verify(ctx, killed{db}, projector.Verification{Rate: 10}, &projector.RunnerConfig{Log: db})
		require.Error(t, err)
		began := time.Now()
		_, err = p.Verify(t.Context(), db, projector.Verification{}, nil)
		require.NoError(t, err)
		require.Greater(t, time.Since(began), 10*time.Second)
		require.NoError(t, stop())
	})
}

// polled counts the questions to a log.
type polled struct {
	*memory.DB
	pages, heads atomic.Int64
}

func (p *polled) LogPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	p.pages.Add(1)
	return p.DB.LogPage(ctx, q)
}

func (p *polled) LogPosition(ctx context.Context, from eventstore.From) (int64, error) {
	p.heads.Add(1)
	return p.DB.LogPosition(ctx, from)
}

// Readers that have no work ask once a second where the log ends, all projectors of a runner together. An event
// of another process is seen within a second and a half.
// Promise: G7.1
func TestIdleProjectorsShareAQuestion(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		own := newDB(t)
		db := &polled{DB: own}
		var ps []*projector.Projector[txn]
		for i := range 50 {
			ps = append(ps, named(fmt.Sprint("p", i), projector.Options{}, note(fmt.Sprint("p", i))))
		}
		write(t, own, "a-1", 1)
		log := struct{ provider.Log }{db} // it does not wake readers, as if the appends were of another process
		stop := start(t, newRunner(t, own, projector.FromLog(log), projector.RunnerConfig{}, ps...))
		time.Sleep(time.Minute)
		pages, heads := db.pages.Load(), db.heads.Load()
		time.Sleep(time.Minute)
		require.Equal(t, pages, db.pages.Load(), "no reader has read a page")
		require.InDelta(t, 60, db.heads.Load()-heads, 10)
		write(t, own, "a-1", 2)
		time.Sleep(1500 * time.Millisecond)
		for i := range ps {
			require.Equal(t, upTo(2), noted(own, fmt.Sprint("p", i), "a-1"))
		}
		require.NoError(t, stop())
	})
}
