package projector_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/projector"
	"github.com/stretchr/testify/require"
)

// Promise: G6.6
func TestHaltEndsTheRunnerUntilTheMessageIsResolved(t *testing.T) {
	t.Parallel()
	for _, opts := range []projector.Options{{Markers: true, Parking: projector.Halt}, {Parking: projector.Halt}} {
		t.Run(fmt.Sprint("markers ", opts.Markers), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription)
				bad := newFaults(map[string]error{"k-1": errNever})
				p := define(opts, bad.run)
				r := newRunner(t, db, projector.Subscribe(f, "review"), projector.RunnerConfig{}, p)
				done := make(chan error, 1)
				go func() { done <- r.Run(t.Context()) }()
				time.Sleep(300 * time.Millisecond)
				began := time.Now()
				f.deliver(t, keyed("k", 1)) // acked, because the row keeps the message
				require.ErrorIs(t, ended(done), projector.ErrHalted)
				require.Zero(t, time.Since(began), "at once")
				require.Equal(t, []string{"k-1 stuck permanent 1"}, rows(parked(t, db)))
				require.ErrorIs(t, newRunner(t, db, projector.Subscribe(f, "review"), projector.RunnerConfig{}, p).Run(t.Context()),
					projector.ErrHalted, "the runner does not start")
				require.ErrorIs(t, applyParked(t, db, projector.RunnerConfig{}, p), projector.ErrHalted)
				bad.fix()
				replayAll(t, db, all)
				stop := run(t, db, f, projector.RunnerConfig{}, p)
				f.deliver(t, keyed("k", 2))
				time.Sleep(5 * time.Second)
				require.NoError(t, stop())
				require.Equal(t, upTo(2), noted(db, "a", "k"))
			})
		})
	}
}

// ended returns the error of a runner, or nil if the runner does not end.
func ended(done <-chan error) error {
	select {
	case err := <-done:
		return err
	case <-time.After(patience.Limit()):
		return nil
	}
}

// A message that waits for a retry is not stuck. Its last attempt halts the runner, and also
// another process that finds it stuck.
func TestHaltEndsTheRunnerWhenAMessageBecomesStuckLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, f := newDB(t), make(subscription)
		bad := newFaults(map[string]error{"k-1": errNo})
		p := define(projector.Options{Markers: true, Parking: projector.Halt}, bad.run)
		one := newRunner(t, db, projector.Subscribe(f, "review"), projector.RunnerConfig{}, p)
		other := newRunner(t, db, projector.Subscribe(make(subscription), "review"), projector.RunnerConfig{}, p)
		done := make(chan error, 2)
		go func() { done <- one.Run(t.Context()) }()
		go func() { done <- other.Run(t.Context()) }()
		f.deliver(t, keyed("k", 1))
		time.Sleep(time.Second)
		require.Empty(t, done)
		require.ErrorIs(t, ended(done), projector.ErrHalted)
		require.ErrorIs(t, ended(done), projector.ErrHalted)
		require.Equal(t, []string{"k-1 stuck unknown 5"}, rows(parked(t, db)))
		require.Equal(t, 5, bad.tried("k-1"))
	})
}

// A message that does not reach a handler halts the runner once. After it is skipped it does not
// halt the runner again, unless it has no id to recognize it by.
func TestHaltEndsWhenTheMessageIsSkipped(t *testing.T) {
	t.Parallel()
	for name, m := range map[string]*message.Message{
		"unregistered": msg("1", "who knows", "{}"), "malformed": msg("1", "", "{}"), "without an id": msg("", "posted", "{}"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db, f := newDB(t), make(subscription, 1)
				p := define(projector.Options{Markers: true, Parking: projector.Halt}, note("a"))
				first := f.send(m)[0]
				for range 2 { // halted twice
					r := newRunner(t, db, projector.Subscribe(f, "review"), projector.RunnerConfig{}, p)
					ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
					require.ErrorIs(t, r.Run(ctx), projector.ErrHalted)
					cancel()
				}
				require.True(t, isAcked(first))
				require.Len(t, parked(t, db), 1)
				require.Equal(t, 1, skip(t, db, all))
				stop := run(t, db, f, projector.RunnerConfig{}, p)
				if m.UUID != "" {
					f.deliver(t, m)
				}
				f.deliver(t, keyed("k", 2))
				require.NoError(t, stop())
				require.Equal(t, []int{2}, noted(db, "a", "k"))
				require.Empty(t, parked(t, db))
			})
		})
	}
}
