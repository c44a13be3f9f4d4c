package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/stretchr/testify/require"
)

// A publisher that waits for acks may not return for long: entries that are not being published are
// released meanwhile.
// Promise: G9.2
func TestRelayReleasesAtOnceWhenStopped(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		let := make(chan struct{})
		db, pub := newDB(t), newPublisher(func(int, string, []*message.Message) error { <-let; return nil })
		enqueue(t, db, "a1", "a2", "a3")
		stop := start(t, db, pub, outbox.RelayConfig{Drain: time.Second})
		synctest.Wait()
		done := make(chan error)
		go func() { done <- stop() }()
		synctest.Wait()
		all := entries(t, db)
		require.Equal(t, outbox.Claimed, all["a1"].Status, "a1's call is in flight")
		for _, id := range []string{"a2", "a3"} {
			require.Equal(t, outbox.Pending, all[id].Status, id)
			require.Zero(t, all[id].Attempts, id)
		}
		require.ErrorIs(t, <-done, outbox.ErrDrain)
		close(let)
		synctest.Wait()
	})
}

// locked is a store whose claims wait for a lock.
type locked struct {
	provider.Outbox
	waited chan error
}

func (l *locked) ClaimEntries(ctx context.Context, _ provider.EntryQuery, _ claim.Terms) ([]outbox.Entry, error) {
	<-ctx.Done()
	l.waited <- ctx.Err()
	return nil, ctx.Err()
}

func TestRelayCancelsAWaitingClaim(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := &locked{newDB(t), make(chan error, 1)}
		stop := start(t, l, newPublisher(nil), outbox.RelayConfig{Drain: 2 * time.Second})
		synctest.Wait()
		begin := time.Now()
		require.NoError(t, stop())
		require.Equal(t, time.Second, time.Since(begin))
		require.Error(t, <-l.waited)
	})
}

// unready is a store whose schema does not exist.
type unready struct{ provider.Outbox }

var errUnready = errors.New("not migrated")

func (unready) ReadyFor(context.Context, provider.Service) error { return errUnready }

func TestRelayReturnsTheErrorOfReadyAtOnce(t *testing.T) {
	t.Parallel()
	r, err := outbox.NewRelay(unready{newDB(t)}, newPublisher(nil), nil)
	require.NoError(t, err)
	require.ErrorIs(t, r.Run(t.Context()), errUnready)
}

// stopped is a store whose check fails because the relay is stopped meanwhile.
type stopped struct {
	provider.Outbox
	stop context.CancelFunc
}

func (s stopped) ReadyFor(ctx context.Context, _ provider.Service) error {
	s.stop()
	return ctx.Err()
}

func TestRelayStoppedWhileItStartsReturnsNil(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(t.Context())
	r, err := outbox.NewRelay(stopped{newDB(t), stop}, newPublisher(nil), nil)
	require.NoError(t, err)
	require.NoError(t, r.Run(ctx))
}

type sqlError struct{}

func (sqlError) Error() string    { return "a secret" }
func (sqlError) SQLState() string { return "57P03" }

// The stored and logged text of an error is its class and code, however it was wrapped.
func TestRelayKeepsClassAndCode(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want string
	}{
		{fmt.Errorf("publish: %w", fmt.Errorf("%w: %w", errors.New("secret"), sqlError{})), "outbox_test.sqlError 57P03"},
		{errors.Join(errors.New("secret"), context.Canceled), "*errors.errorString"},
		{context.DeadlineExceeded, "deadline exceeded"},
	} {
		synctest.Test(t, func(t *testing.T) {
			db, pub := newDB(t), newPublisher(func(int, string, []*message.Message) error { return c.err })
			enqueue(t, db, "a1")
			stop := start(t, db, pub, outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler)})
			synctest.Wait()
			require.NoError(t, stop())
			require.Equal(t, c.want, entries(t, db)["a1"].LastError)
		})
	}
}

// While a full batch of many keys is published, the next one is claimed. When the relay stops, the
// next batch is released at once, even if the call in flight takes long.
func TestRelayClaimsAheadAndReleasesOnStop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		let := make(chan struct{})
		db, pub := newDB(t), newPublisher(func(int, string, []*message.Message) error { <-let; return nil })
		enqueue(t, db, "a1", "b1", "c1", "d1", "e1")
		stop := start(t, db, pub, outbox.RelayConfig{Batch: 2, Drain: time.Minute})
		synctest.Wait()
		all := entries(t, db)
		for id, status := range map[string]outbox.Status{"a1": outbox.Claimed, "b1": outbox.Claimed, "c1": outbox.Claimed, "d1": outbox.Claimed, "e1": outbox.Pending} {
			require.Equal(t, status, all[id].Status, id)
		}
		done := make(chan error)
		go func() { done <- stop() }()
		synctest.Wait()
		all = entries(t, db)
		for _, id := range []string{"c1", "d1", "e1"} {
			require.Equal(t, outbox.Pending, all[id].Status, id)
			require.Zero(t, all[id].Attempts, id)
		}
		close(let)
		require.NoError(t, <-done)
		require.Equal(t, []string{"a1", "b1"}, pub.ids())
	})
}

// Entries that wait behind those being published are not claimed: with few keys nothing is claimed
// ahead.
func TestRelayWithFewKeysClaimsNothingAhead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		let := make(chan struct{})
		db, pub := newDB(t), newPublisher(func(int, string, []*message.Message) error { <-let; return nil })
		enqueue(t, db, "a1", "a2", "a3", "a4", "b1")
		stop := start(t, db, pub, outbox.RelayConfig{Batch: 4})
		synctest.Wait()
		require.Equal(t, outbox.Pending, entries(t, db)["b1"].Status)
		close(let)
		synctest.Wait()
		require.Equal(t, outbox.Published, entries(t, db)["b1"].Status)
		require.NoError(t, stop())
	})
}

// If a topic pauses after its entries were claimed ahead, they are released without a try.
func TestRelayReleasesEntriesAheadOfAPausedTopic(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, pub := newDB(t), newPublisher(func(int, string, []*message.Message) error { return errors.New("down") })
		enqueue(t, db, "a1", "b1", "c1", "d1", "e1", "f1", "g1", "h1")
		stop := start(t, db, pub, outbox.RelayConfig{Batch: 4})
		synctest.Wait()
		require.Equal(t, 1+3, pub.calls, "the batch, and three keys one by one")
		for id, e := range entries(t, db) {
			require.Equal(t, outbox.Pending, e.Status, id)
			require.Zero(t, e.Attempts, id)
		}
		require.NoError(t, stop())
	})
}
