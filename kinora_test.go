package kinora_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/kinora-go/kinora"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// journal is what happened, in order.
type journal struct {
	mu    sync.Mutex
	lines []string
}

func (j *journal) add(line string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, line)
}

// service runs until its ctx ends or the test makes it fail.
type service struct {
	name    string
	j       *journal
	running chan struct{}
	fail    chan error
	atStart error
	atStop  error
}

func newService(j *journal, name string) *service {
	return &service{name: name, j: j, running: make(chan struct{}), fail: make(chan error)}
}

func (s *service) Running() <-chan struct{} { return s.running }

func (s *service) Run(ctx context.Context) error {
	if s.atStart != nil {
		return s.atStart
	}
	s.j.add(s.name + " up")
	close(s.running)
	select {
	case err := <-s.fail:
		s.j.add(s.name + " failed")
		return err
	case <-ctx.Done():
		s.j.add(s.name + " down")
		return s.atStop
	}
}

// Promise: G9.1
func TestStartInOrderStopInReverse(t *testing.T) {
	t.Parallel()
	j := &journal{}
	g, err := kinora.Start(t.Context(), newService(j, "runner"), newService(j, "relay"))
	require.NoError(t, err)
	require.NoError(t, g.Stop())
	require.Equal(t, []string{"runner up", "relay up", "relay down", "runner down"}, j.lines)
	require.NoError(t, g.Stop(), "a second Stop is the first one's answer")
}

func TestStartStopsWhatItStartedWhenOneFails(t *testing.T) {
	t.Parallel()
	j, broken := &journal{}, errors.New("broken")
	bad := newService(j, "relay")
	bad.atStart = broken
	_, err := kinora.Start(t.Context(), newService(j, "runner"), bad)
	require.ErrorIs(t, err, broken)
	require.Equal(t, []string{"runner up", "runner down"}, j.lines)

	_, err = kinora.Start(t.Context(), newService(j, "runner"), nil)
	require.Error(t, err)
}

func TestStartGivesUpWithItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		never := &hangs{}
		done := make(chan error)
		go func() {
			_, err := kinora.Start(ctx, never)
			done <- err
		}()
		synctest.Wait()
		cancel()
		require.ErrorIs(t, <-done, context.Canceled)
	})
}

func TestRunIsACleanStopAlsoWhileServicesStart(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, kinora.Run(ctx, &hangs{}))
}

func TestEndedTellsOfAServiceThatEndsByItself(t *testing.T) {
	t.Parallel()
	j, broken := &journal{}, errors.New("broken")
	a, b := newService(j, "runner"), newService(j, "relay")
	g, err := kinora.Start(t.Context(), a, b)
	require.NoError(t, err)
	a.fail <- broken
	<-g.Ended()
	require.ErrorIs(t, g.Stop(), broken)
}

// hangs never gets up, but stops when told.
type hangs struct{}

func (*hangs) Running() <-chan struct{}      { return make(chan struct{}) }
func (*hangs) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func TestRunEndsWithItsContext(t *testing.T) {
	t.Parallel()
	j := &journal{}
	ctx, cancel := context.WithCancel(t.Context())
	a, b := newService(j, "runner"), newService(j, "relay")
	b.atStop = errors.New("not drained")
	go func() {
		<-b.running
		cancel()
	}()
	require.ErrorIs(t, kinora.Run(ctx, a, b), b.atStop)
	require.Equal(t, []string{"runner up", "relay up", "relay down", "runner down"}, j.lines)
}

func TestRunEndsWithItsFirstFailure(t *testing.T) {
	t.Parallel()
	j, broken := &journal{}, errors.New("broken")
	a, b := newService(j, "runner"), newService(j, "relay")
	go func() {
		<-b.running // b is started after a
		a.fail <- broken
	}()
	require.ErrorIs(t, kinora.Run(t.Context(), a, b), broken)
	require.Contains(t, j.lines, "relay down")
}
