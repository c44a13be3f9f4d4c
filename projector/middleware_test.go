package projector_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/marker"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

// bump adds one to the total in the transaction of the message.
func bump(m *message.Message) {
	tx, _ := projector.TxFrom[txn](m.Context())
	n, _ := tx.Get("totals", "stars")
	sum, _ := n.(int)
	tx.Put("totals", "stars", sum+1)
}

// withMarker returns a handler in the middleware "count".
func withMarker(t *testing.T, u unit, h message.HandlerFunc) message.NoPublishHandlerFunc {
	t.Helper()
	wrap, err := projector.Middleware(u, "count", marker.Retention{})
	require.NoError(t, err)
	wrapped := wrap(h)
	return func(m *message.Message) error {
		out, err := wrapped(m)
		require.Empty(t, out)
		return err
	}
}

func TestMiddlewareRefusesItsArguments(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for _, name := range []string{"", "A", "a/b", "a b", "0", string(make([]byte, 42))} {
		_, err := projector.Middleware(db, name, marker.Retention{})
		require.ErrorContains(t, err, "must match")
	}
	_, err := projector.Middleware[txn](nil, "a", marker.Retention{})
	require.ErrorContains(t, err, "the store is nil")
	_, err = projector.Middleware(db, "a", marker.Retention{Window: time.Hour})
	require.ErrorIs(t, err, marker.ErrUnsafe)
	for _, k := range []provider.Keeps{{Atomic: true, Markers: true}, {Atomic: true, Output: true}, {Markers: true, Output: true}} {
		_, err = projector.Middleware(keeping{db, k}, "a", marker.Retention{})
		require.ErrorContains(t, err, "the store must commit markers and output")
	}
}

// keeping is a provider that keeps less.
type keeping struct {
	unit
	keeps provider.Keeps
}

func (k keeping) Keeps() provider.Keeps { return k.keeps }

// Errors of handlers are returned unchanged, after a rollback. The message is handled again.
func TestMiddlewareReturnsTheErrorOfTheHandler(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	var fails error
	handle := withMarker(t, db, func(m *message.Message) ([]*message.Message, error) {
		bump(m)
		return []*message.Message{message.NewMessage("o", nil)}, fails
	})
	m := message.NewMessage("m-1", nil)
	ctx := m.Context()
	for _, fails = range []error{errNo, errNever, errBusy} {
		require.Equal(t, fails, handle(m))
		require.Equal(t, ctx, m.Context())
	}
	fails = nil
	err := handle(m) // outside of a router there is no topic
	require.ErrorIs(t, err, message.ErrOutputInNoPublisherHandler)
	requireClass(t, projector.ClassPermanent, err)
	require.Zero(t, total(db, "totals"))
	entries, err := db.Entries(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestMiddlewareRefusesInvalidMessages(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	handle := withMarker(t, db, func(m *message.Message) ([]*message.Message, error) {
		bump(m)
		return nil, nil
	})
	for _, id := range []string{"", "a\x00", string(make([]byte, 256))} {
		requireClass(t, projector.ClassPermanent, handle(message.NewMessage(id, nil)))
	}
	require.Zero(t, total(db, "totals"))
	_, ok := projector.TxFrom[txn](t.Context())
	require.False(t, ok)
}

// Of concurrent deliveries one at a time runs: the others wait, and run only if it fails.
func TestMiddlewareOfConcurrentDeliveries(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	calls := make(chan struct{}, 100)
	handle := withMarker(t, db, func(m *message.Message) ([]*message.Message, error) {
		bump(m)
		calls <- struct{}{}
		if len(calls) == 1 {
			return nil, errNo
		}
		return nil, nil
	})
	results := make(chan error, 20)
	for range cap(results) {
		go func() { results <- handle(message.NewMessage("m-1", nil)) }()
	}
	failed := 0
	for range cap(results) {
		if err := <-results; err != nil {
			require.Equal(t, errNo, err)
			failed++
		}
	}
	require.Equal(t, 1, failed)
	require.Len(t, calls, 2)
	require.Equal(t, 1, total(db, "totals"))
}

// After a lost reply to COMMIT the next delivery finds the marker, or runs again.
// Promise: G4.6
func TestMiddlewareAfterAnAmbiguousCommit(t *testing.T) {
	t.Parallel()
	for name, committed := range map[string]bool{"committed": true, "not committed": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, lost := newDB(t), true
			store := &faulty{unit: db}
			store.do = func(ctx context.Context, u provider.Unit, run handle) error {
				if !lost {
					return db.Do(ctx, u, run)
				}
				lost = false
				err := db.Do(ctx, u, func(ctx context.Context, tx *memory.Model, found provider.Found) (provider.Closing, error) {
					c, err := run(ctx, tx, found)
					if err == nil && !committed {
						err = errNo
					}
					return c, err
				})
				return &projector.Error{Class: provider.ClassAmbiguous, Code: "commit", Err: err}
			}
			calls := 0
			handle := withMarker(t, store, func(m *message.Message) ([]*message.Message, error) {
				calls++
				bump(m)
				return nil, nil
			})
			requireClass(t, provider.ClassAmbiguous, handle(message.NewMessage("m-1", nil)))
			require.NoError(t, handle(message.NewMessage("m-1", nil)))
			require.Equal(t, 1, total(db, "totals"))
			require.Equal(t, map[bool]int{true: 1, false: 2}[committed], calls)
		})
	}
}

func TestMiddlewareAfterAPanic(t *testing.T) {
	t.Parallel()
	db, panics := newDB(t), true
	handle := withMarker(t, db, func(m *message.Message) ([]*message.Message, error) {
		if bump(m); panics {
			panic("no")
		}
		return nil, nil
	})
	m := message.NewMessage("m-1", nil)
	require.PanicsWithValue(t, "no", func() { _ = handle(m) })
	panics = false
	require.NoError(t, handle(m))
	require.Equal(t, 1, total(db, "totals"))
}

// The handler has until the deadline of the message, or 30 seconds. The end of the message's context by
// itself does not end it.
func TestMiddlewareDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db, ignores := newDB(t), false
		handle := withMarker(t, db, func(m *message.Message) ([]*message.Message, error) {
			bump(m)
			<-m.Context().Done()
			if ignores {
				return nil, nil
			}
			return nil, m.Context().Err()
		})
		for _, ignores = range []bool{false, true} {
			canceled, cancel := context.WithCancel(t.Context())
			cancel()
			m, began := message.NewMessage("m-1", nil), time.Now()
			m.SetContext(canceled)
			err := handle(m)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			requireClass(t, projector.ClassUnknown, err)
			require.Equal(t, 30*time.Second, time.Since(began).Round(time.Second))
			limited, cancel := context.WithTimeout(t.Context(), time.Minute)
			m.SetContext(limited)
			require.ErrorIs(t, handle(m), context.DeadlineExceeded)
			require.Equal(t, 90*time.Second, time.Since(began).Round(time.Second))
			cancel()
		}
		require.Zero(t, total(db, "totals"))
	})
}

// A message that waits too long for another delivery is not to blame.
func TestMiddlewareThatCannotBegin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newDB(t)
		store := &faulty{unit: db, do: func(ctx context.Context, _ provider.Unit, _ handle) error {
			<-ctx.Done()
			return &projector.Error{Class: projector.ClassUnknown, Code: provider.CodeDeadline, Err: ctx.Err()}
		}}
		handle := withMarker(t, store, func(m *message.Message) ([]*message.Message, error) { return nil, errors.New("called") })
		err := handle(message.NewMessage("m-1", nil))
		requireClass(t, projector.ClassTransient, err)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}
