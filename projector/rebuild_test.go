package projector_test

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// built defines a projector whose handler appends the stars of each event, times a factor, to the
// list of its stream in the table "notes" of the generation.
func built(opts projector.Options, factor int) *projector.Projector[txn] {
	opts.Tables = []string{"notes"}
	return projector.Define("p", types, opts,
		projector.OnCreate(func(ctx context.Context, tx txn) error { return nil }),
		projector.On("a", func(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
			e.Data.Stars *= factor
			return note(projector.Table(ctx, "notes"))(ctx, tx, e)
		}))
}

func times(factor int, list []int) []int {
	list = slices.Clone(list)
	for i := range list {
		list[i] *= factor
	}
	return list
}

func request(how projector.RebuildHow) projector.Rebuild {
	return projector.Rebuild{How: how, Decision: person}
}

// appending appends the next number to k-1 every 20 ms until the returned function is called, which
// returns the last one. If f is not nil, each event is delivered after the one before it was acked, and
// some are delivered twice.
func appending(t *testing.T, db *memory.DB, f subscription, from int) (stop func() int) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done, queue := make(chan int), make(chan *message.Message, 100_000)
	go func() {
		for m := range queue {
			f.redeliver(m)
			if m.Metadata[provider.HeaderVersion] > "5" {
				f.redeliver(m)
			}
		}
		close(done)
	}()
	last := from - 1
	appended := make(chan struct{})
	go func() {
		defer close(appended)
		for n := from; ctx.Err() == nil; n++ {
			at := write(t, db, "k-1", n)
			if last = n; f != nil {
				queue <- publishedAfter(t, db, "k-1", at.Version-1)[0]
			}
			time.Sleep(20 * time.Millisecond)
		}
		close(queue)
	}()
	return func() int {
		cancel()
		<-appended
		<-done
		return last
	}
}

// sources runs a test with each source.
func sources(t *testing.T, test func(t *testing.T, db *memory.DB, f subscription, src projector.Source)) {
	for name, isLog := range map[string]bool{"log": true, "broker": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newDB(t)
				if isLog {
					test(t, db, nil, projector.FromLog(db))
				} else {
					f := make(subscription)
					test(t, db, f, projector.Subscribe(f, "review"))
				}
			})
		})
	}
}

// Promise: R1.1
func TestRebuildInPlaceUnderLoad(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(1000)...)
		p := built(projector.Options{Markers: true}, 1)
		r := newRunner(t, db, src, projector.RunnerConfig{}, p)
		stop := start(t, r)
		last := appending(t, db, f, 1001)
		time.Sleep(time.Second)
		require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx txn) error {
			tx.Put("notes", "k-1", []int{7}) // a wrong row
			return nil
		}))
		require.NoError(t, rebuild(t, r, request(projector.InPlace)))
		time.Sleep(time.Second)
		n := last()
		time.Sleep(20 * time.Second)
		same(t, upTo(n), noted(db, "notes", "k-1"))
		require.NoError(t, stop())
		same(t, upTo(n), noted(db, "notes", "k-1"))
	})
}

// A reader that polls sees each state of the read model, and never one with fewer events.
// Promise: R1.1, R2.1, R3.1
func TestRebuildBlueGreenUnderLoad(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(1000)...)
		p := built(projector.Options{Markers: true}, 1)
		r := newRunner(t, db, src, projector.RunnerConfig{}, p)
		stop := start(t, r)
		last := appending(t, db, f, 1001)
		time.Sleep(time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		polled := make(chan struct{})
		go func() {
			defer close(polled)
			for most := 1000; ctx.Err() == nil; time.Sleep(25 * time.Millisecond) {
				list := noted(db, "notes", "k-1")
				require.Equal(t, upTo(len(list)), list)
				require.GreaterOrEqual(t, len(list), most)
				most = len(list)
			}
		}()
		require.NoError(t, rebuild(t, r, request(projector.BlueGreen)))
		time.Sleep(time.Second)
		generations, err := p.Generations(t.Context(), db)
		require.NoError(t, err)
		require.Len(t, generations, 2)
		require.Equal(t, "standby", generations[0].State)
		require.Equal(t, "live", generations[1].State)
		// back, and forth again
		for _, n := range []int{1, 2} {
			require.NoError(t, projector.Control(t.Context(), db, "p", n, projector.Promote, person))
			began := time.Now()
			for {
				all, err := p.Generations(t.Context(), db)
				require.NoError(t, err)
				if all[n-1].State == "live" {
					break
				}
				time.Sleep(time.Millisecond)
			}
			require.Less(t, time.Since(began), time.Second)
			time.Sleep(5 * time.Second)
		}
		n := last()
		time.Sleep(20 * time.Second)
		cancel()
		<-polled
		same(t, upTo(n), noted(db, "notes", "k-1"))
		same(t, upTo(n), noted(db, "notes_g1", "k-1"))
		same(t, upTo(n), noted(db, "notes_g2", "k-1"))
		require.NoError(t, stop())
	})
}

// Two versions run side by side: each feeds its own generation only.
// Promise: R5.1
func TestRollingDeployment(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		write(t, db, "k-1", upTo(1000)...)
		one := newRunner(t, db, src, projector.RunnerConfig{}, built(projector.Options{Markers: true}, 1))
		stop := start(t, one)
		last := appending(t, db, f, 1001)
		time.Sleep(time.Second)
		two := newRunner(t, db, src, projector.RunnerConfig{},
			built(projector.Options{Markers: true, Version: 2, RebuildOnChange: projector.BlueGreen}, 10))
		stopTwo := start(t, two)
		time.Sleep(10 * time.Second)
		list := noted(db, "notes", "k-1")
		require.Equal(t, times(10, upTo(len(list))), list)
		n := last()
		time.Sleep(20 * time.Second)
		same(t, times(10, upTo(n)), noted(db, "notes", "k-1"))
		same(t, upTo(n), noted(db, "notes_g1", "k-1"))
		require.NoError(t, stop())
		last = appending(t, db, f, n+1)
		time.Sleep(5 * time.Second)
		n = last()
		time.Sleep(20 * time.Second)
		same(t, times(10, upTo(n)), noted(db, "notes", "k-1"))
		require.NoError(t, stopTwo())
	})
}

// Promise: R7.1
func TestVerifyFindsAndRepairsExactlyTheWrongRows(t *testing.T) {
	t.Parallel()
	sources(t, func(t *testing.T, db *memory.DB, f subscription, src projector.Source) {
		for _, stream := range []string{"k-1", "k-2", "k-3", "k-4"} {
			write(t, db, stream, upTo(100)...)
		}
		p := built(projector.Options{Markers: true}, 1)
		stop := start(t, newRunner(t, db, src, projector.RunnerConfig{}, p))
		last := appending(t, db, f, 101)
		time.Sleep(time.Second)
		result, err := p.Verify(t.Context(), db, projector.Verification{}, nil)
		require.NoError(t, err)
		require.Empty(t, result.Differences)
		require.Greater(t, result.Events, int64(400))
		require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx txn) error {
			tx.Put("notes", "k-2", []int{7})
			tx.Delete("notes", "k-3")
			tx.Put("notes", "k-5", []int{1})
			return nil
		}))
		result, err = p.Verify(t.Context(), db, projector.Verification{Repair: person}, nil)
		require.NoError(t, err)
		require.Len(t, result.Differences, 3)
		require.Len(t, result.Repaired, 3)
		result, err = p.Verify(t.Context(), db, projector.Verification{}, nil)
		require.NoError(t, err)
		require.Empty(t, result.Differences)
		n := last()
		time.Sleep(20 * time.Second)
		require.NoError(t, stop())
		same(t, upTo(n), noted(db, "notes", "k-1"))
		require.Equal(t, upTo(100), noted(db, "notes", "k-2"))
	})
}

// unclearing is a store that drops no tables.
type unclearing struct{ unit }

func (unclearing) ClearGeneration(context.Context, provider.Build, []string, []provider.TablePair, int) (int, error) {
	return 0, errNever
}

// A repair that was committed is reported, also if the tables of the verification cannot be dropped. The next one drops them.
// Promise: R7.1
func TestVerifyReportsARepairThoughItsTablesStay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		write(t, db, "k-1", 1, 2)
		p := built(projector.Options{Markers: true}, 1)
		stop := start(t, newRunner(t, db, projector.FromLog(db), projector.RunnerConfig{}, p))
		time.Sleep(5 * time.Second)
		require.NoError(t, stop())
		require.NoError(t, db.Transact(t.Context(), func(_ context.Context, tx txn) error {
			tx.Delete("notes_g1", "k-1")
			return nil
		}))
		var log bytes.Buffer
		cfg := &projector.RunnerConfig{Log: db, Logger: slog.New(slog.NewTextHandler(&log, nil))}
		result, err := p.Verify(t.Context(), unclearing{db}, projector.Verification{Repair: person}, cfg)
		require.NoError(t, err)
		require.Len(t, result.Repaired, 1)
		require.Equal(t, upTo(2), noted(db, "notes", "k-1"))
		require.Equal(t, upTo(2), noted(db, "notes_g2", "k-1"))
		require.Contains(t, log.String(), "the tables of a verification not dropped")
		_, err = p.Verify(t.Context(), db, projector.Verification{}, nil)
		require.NoError(t, err)
		require.Empty(t, noted(db, "notes_g2", "k-1"))
	})
}

// same is require.Equal for long lists, with a short message.
func same(t *testing.T, want, got []int) {
	t.Helper()
	if !slices.Equal(want, got) {
		for i := range want {
			if i >= len(got) || got[i] != want[i] {
				require.Failf(t, "lists differ", "%d values, not %d; at index %d: %v, not %v", len(got), len(want), i, got[i:min(i+10, len(got))], want[i:min(i+10, len(want))])
			}
		}
		require.Failf(t, "lists differ", "%d values, not %d: %v", len(got), len(want), got[len(want):min(len(want)+10, len(got))])
	}
}
