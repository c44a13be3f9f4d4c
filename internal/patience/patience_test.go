package patience_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/patience"
)

// failing is a test whose end is recorded instead of ending the process's test.
type failing struct {
	testing.TB
	text string
}

func (f *failing) Helper() {}

func (f *failing) Fatalf(format string, _ ...any) {
	f.text = format
	panic(f)
}

// fails reports whether wait ends its test.
func fails(t *testing.T, wait func(testing.TB)) (failed bool) {
	f := &failing{TB: t}
	defer func() { failed = recover() == any(f) && f.text != "" }()
	wait(f)
	return false
}

func TestAWaitEndsAsSoonAsItsConditionHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		patience.Until(t, func() bool { return time.Since(begin) >= 9*time.Minute }, "nine minutes")
		require.Less(t, time.Since(begin), 9*time.Minute+time.Second)
		patience.NoError(t, func() error {
			if time.Since(begin) < 18*time.Minute {
				return errors.New("not yet")
			}
			return nil
		})
		require.Less(t, time.Since(begin), 18*time.Minute+time.Second)
		ready := make(chan int, 1)
		time.AfterFunc(9*time.Minute, func() { ready <- 7 })
		require.Equal(t, 7, patience.Receive(t, ready, "seven"))
		require.NoError(t, patience.Context(t).Err())
	})
}

func TestAWaitThatHangsEndsItsTest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		require.True(t, fails(t, func(t testing.TB) { patience.Until(t, func() bool { return false }, "nothing") }))
		require.Greater(t, time.Since(begin), 10*time.Minute)
		require.True(t, fails(t, func(t testing.TB) { patience.NoError(t, func() error { return errors.New("not yet") }) }))
		require.True(t, fails(t, func(t testing.TB) { patience.Receive(t, make(chan int), "nothing") }))
		limited := patience.Context(t)
		<-limited.Done()
		require.NoError(t, t.Context().Err())
	})
}

// A machine that does other things, so that 199 of 200 calls take seven times as long, breaks no comparison.
func TestABusyMachineIsNotSlower(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		busy := func() {
			if calls++; calls%200 == 0 {
				time.Sleep(time.Millisecond)
			} else {
				time.Sleep(7 * time.Millisecond)
			}
		}
		require.Equal(t, time.Millisecond, patience.Fastest(200, busy))
		require.Equal(t, time.Millisecond, patience.Faster(t, 5*time.Millisecond, busy))
		require.True(t, fails(t, func(t testing.TB) {
			patience.Faster(t, 5*time.Millisecond, func() { time.Sleep(7 * time.Millisecond) })
		}))
	})
}

func TestMutantsSetAShorterLimit(t *testing.T) {
	t.Setenv(patience.Env, "20s")
	require.Equal(t, 20*time.Second, patience.Limit())
	t.Setenv(patience.Env, "soon")
	require.Equal(t, 10*time.Minute, patience.Limit())
}

func TestADeadlinePassesWhenTheTestSaysSo(t *testing.T) {
	t.Parallel()
	ctx, pass := patience.Deadline(t)
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	require.NoError(t, inner.Err())
	pass()
	pass()
	<-inner.Done()
	require.ErrorIs(t, inner.Err(), context.DeadlineExceeded)
}
