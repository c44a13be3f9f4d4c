package redis_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
)

// While the projector catches up, an event may have markers of some handlers only.
func TestInCatchUpOnlyHandlersWithoutMarkersRun(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	units := s.own(t)
	b := provider.Build{Projector: "p", Generation: 1}
	ctx := t.Context()
	token := claim.NewToken()
	c := provider.Checkpoint{Mode: provider.ModeLive, Lineage: "l", Token: token}
	set, err := units.SetCheckpoint(ctx, b, provider.Checkpoint{}, c)
	require.NoError(t, err)
	require.True(t, set)
	a, bb := provider.Handler{Name: "p/a"}, provider.Handler{Name: "p/b"}
	run := func(ctx context.Context, tx pipe, f provider.Found) (provider.Closing, error) {
		f.Begin(0)
		for j, fresh := range f.Fresh[0] {
			if fresh {
				tx.Incr(ctx, s.prefix+fmt.Sprint("h", j))
			}
		}
		return provider.Closing{}, nil
	}
	m := provider.Message{ID: "m1", Mark: true, Position: 5, Handlers: []provider.Handler{a}}
	_, err = units.DoCombined(ctx, provider.Unit{Projector: "p", Generation: 1, Messages: []provider.Message{m}}, run)
	require.NoError(t, err)
	to := c
	to.Mode = provider.ModeCatchUp
	set, err = units.SetCheckpoint(ctx, b, c, to)
	require.NoError(t, err)
	require.True(t, set)
	m.Handlers = []provider.Handler{a, bb}
	_, err = units.DoCombined(ctx, provider.Unit{Projector: "p", Generation: 1, Messages: []provider.Message{m},
		Reader:  &provider.Reader{Mode: provider.ModeCatchUp, Token: token},
		Advance: &provider.Advance{From: 0, To: provider.LogPlace{Position: 5, ID: "m1"}, Mode: provider.ModeCatchUp, Token: token}}, run)
	require.NoError(t, err)
	require.Equal(t, "1", s.client.Get(ctx, s.prefix+"h0").Val(), "handler a")
	require.Equal(t, "1", s.client.Get(ctx, s.prefix+"h1").Val(), "handler b was never applied, and the checkpoint has passed the event")
}

// Output belongs to the generation of its unit, not to the first one.
func TestOutputAfterARebuildInPlace(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), newRouted(t)
	w, u := newWriter(t, db), provider.Combine(s.own(t), db)
	p := projector.Define("stars", types, projector.Options{},
		projector.OnReset(func(ctx context.Context, tx pipe) error {
			tx.Unlink(ctx, s.prefix+"list:review-0", s.prefix+"sums")
			return nil
		}),
		projector.OnEmit("posted", func(ctx context.Context, tx pipe, e eventstore.Event[posted]) ([]outbox.Message, error) {
			return []outbox.Message{{Topic: "thanks", Payload: []byte(e.ID)}}, s.list(ctx, tx, e)
		}))
	r, err := projector.NewRunner(u, projector.FromLog(db), projector.RunnerConfig{Lease: time.Second, Logger: slog.New(slog.DiscardHandler)}, p)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	defer func() { cancel(); <-done }()
	w.write(5, "review-0")
	eventually(t, "all is applied", func() bool { return len(s.listed(t, "review-0")) == 5 })
	require.NoError(t, r.Rebuild(t.Context(), "stars", projector.Rebuild{How: projector.InPlace, Decision: because}))
	w.write(1, "review-0")
	eventually(t, "the next one is applied", func() bool { return len(s.listed(t, "review-0")) == 6 })
	entries, err := db.Entries(t.Context(), provider.EntryFilter{Topic: "thanks", Limit: 100})
	require.NoError(t, err)
	require.Len(t, entries, 6)
}

// A handler with Watch and output fails once in the middle of a unit.
// Promise: G5.6
func TestWatchAndOutput(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), newRouted(t)
	w, u := newWriter(t, db), provider.Combine(s.own(t), db)
	var fails atomic.Int64
	p := projector.Define("stars", types, projector.Options{}, projector.OnEmit("posted",
		func(ctx context.Context, tx pipe, e eventstore.Event[posted]) ([]outbox.Message, error) {
			err := redis.Watch(ctx, tx, func(ctx context.Context, c goredis.Cmdable) error { return c.Get(ctx, s.prefix+"n").Err() }, s.prefix+"n")
			if err != nil && !errors.Is(err, goredis.Nil) {
				return nil, err
			}
			if e.Data.Stars == 4 && fails.Add(1) == 1 {
				return nil, errors.New("once")
			}
			return []outbox.Message{{Topic: "thanks", Payload: []byte(e.ID)}}, s.list(ctx, tx, e)
		}))
	w.write(6, "review-0")
	fromLog(t, u, db, projector.RunnerConfig{Lease: time.Second}, p)
	eventually(t, "all is applied", func() bool { return len(s.listed(t, "review-0")) == 6 })
	entries, err := db.Entries(t.Context(), provider.EntryFilter{Topic: "thanks", Limit: 1000})
	require.NoError(t, err)
	require.Len(t, entries, 6, "outputs of 6 applied events")
}

// A change of a generation that is not one of its state leaves the reader of the generation alone.
func TestABeatKeepsTheTokenOfAStandby(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), newRouted(t)
	u := provider.Combine(s.own(t), db)
	b := provider.Build{Projector: "p", Generation: 2}
	g := provider.Generation{Build: b, State: provider.GenerationStandby, Data: []byte("{}")}
	set, err := u.SetGeneration(t.Context(), g)
	require.NoError(t, err)
	require.True(t, set)
	token := claim.NewToken()
	set, err = u.SetCheckpoint(t.Context(), b, provider.Checkpoint{}, provider.Checkpoint{Mode: provider.ModeCatchUp, Token: token})
	require.NoError(t, err)
	require.True(t, set)
	g.Revision = 1 // the beat of its reader
	set, err = u.SetGeneration(t.Context(), g)
	require.NoError(t, err)
	require.True(t, set)
	c, err := u.Checkpoint(t.Context(), b)
	require.NoError(t, err)
	require.Equal(t, token, c.Token, "the token of the standby's reader")
}

// A client may send a script again after a lost reply.
func TestAReplayThatWasPartlyAppliedIsNotRepeated(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	units := s.own(t)
	require.NoError(t, s.client.Set(t.Context(), s.prefix+"str", "x", 0).Err())
	m := provider.Message{ID: "m1", Mark: true, Handlers: []provider.Handler{{Name: "p/a"}}, Parked: &provider.Parked{MessageID: "m1", Class: provider.ClassUnknown, Attempts: 1}}
	u := provider.Unit{Projector: "p", Generation: 1, Messages: []provider.Message{m}}
	for range 2 { // the second: the client sends EVALSHA again after a lost reply, or try() runs the attempt again as it is ambiguous
		_, err := units.DoCombined(t.Context(), u, func(ctx context.Context, tx pipe, f provider.Found) (provider.Closing, error) {
			if !f.Fresh[0][0] {
				return provider.Closing{}, nil
			}
			f.Begin(0)
			tx.Incr(ctx, s.prefix+"part")
			tx.LPush(ctx, s.prefix+"str", 1)
			return provider.Closing{}, nil
		})
		t.Log(err)
	}
	require.Equal(t, "1", s.client.Get(t.Context(), s.prefix+"part").Val())
}

// Numbers of Lua have 53 bits, and are printed with 14 digits.
func TestRecordsOfLargePositions(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	units := s.own(t)
	ctx := t.Context()
	b := provider.Build{Projector: "p", Generation: 1}
	_, err := units.SetCheckpoint(ctx, b, provider.Checkpoint{}, provider.Checkpoint{Mode: provider.ModeLive, Lineage: "l"})
	require.NoError(t, err)
	m := provider.Message{ID: "m1", Mark: true, Position: 123456789012345678, Handlers: []provider.Handler{{Name: "p/a"}}}
	f, err := units.DoCombined(ctx, provider.Unit{Projector: "p", Generation: 1, Messages: []provider.Message{m}}, func(context.Context, pipe, provider.Found) (provider.Closing, error) {
		return provider.Closing{Park: []provider.Aside{{Message: 0}}}, nil
	})
	require.NoError(t, err)
	require.NoError(t, f(ctx))
	asides, err := units.Asides(ctx, b)
	require.NoError(t, err)
	require.Equal(t, map[string]int64{"m1": m.Position}, asides)
}

// A delivery of a type that no handler takes is parked ahead of the checkpoint, and the reader does not read it: once the
// checkpoint has passed it, a program that takes it applies it.
// Promise: G7.10
func TestWhatTheReaderDoesNotReadIsAppliedLater(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	units := s.own(t)
	ctx := t.Context()
	b, token := provider.Build{Projector: "p", Generation: 1}, claim.NewToken()
	_, err := units.SetCheckpoint(ctx, b, provider.Checkpoint{}, provider.Checkpoint{Mode: provider.ModeCatchUp, Lineage: "l", Token: token})
	require.NoError(t, err)
	m := provider.Message{ID: "m1", Mark: true, Position: 9}
	do := func(u provider.Unit, c provider.Closing) (found provider.Found) {
		u.Projector, u.Generation = "p", 1
		commit, err := units.DoCombined(ctx, u, func(_ context.Context, _ pipe, f provider.Found) (provider.Closing, error) {
			found = f
			return c, nil
		})
		require.NoError(t, err)
		if commit != nil {
			require.NoError(t, commit(ctx))
		}
		return found
	}
	do(provider.Unit{Messages: []provider.Message{m}}, provider.Closing{Park: []provider.Aside{{Message: 0}}})
	do(provider.Unit{
		Reader:  &provider.Reader{Mode: provider.ModeCatchUp, Token: token},
		Advance: &provider.Advance{To: provider.LogPlace{Position: 10}, Mode: provider.ModeCatchUp, Token: token},
	}, provider.Closing{})
	m.Position, m.Handlers = 0, []provider.Handler{{Name: "p/a"}}
	m.Parked = &provider.Parked{MessageID: "m1", Headers: map[string]string{provider.HeaderLog: "l/1", provider.HeaderPosition: "9"}}
	found := do(provider.Unit{Messages: []provider.Message{m}}, provider.Closing{})
	require.Equal(t, [][]bool{{true}}, found.Fresh)
}

// A rebuild in place empties the read model, and the second store does not commit: the markers end too, also
// those of earlier names of handlers.
func TestMarkersEndWithTheReadModel(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	units := s.own(t)
	ctx := t.Context()
	b := provider.Build{Projector: "p", Generation: 1}
	token := claim.NewToken()
	c := provider.Checkpoint{Mode: provider.ModeLive, Lineage: "l", Token: token, Handlers: []provider.Began{{Handler: "p/new", Type: "posted"}}}
	_, err := units.SetCheckpoint(ctx, b, provider.Checkpoint{}, c)
	require.NoError(t, err)
	m := provider.Message{ID: "m1", Mark: true, Position: 5, Handlers: []provider.Handler{{Name: "p/new", Was: []string{"p/old"}}}}
	run := func(ctx context.Context, tx pipe, f provider.Found) (provider.Closing, error) {
		if f.Fresh[0][0] {
			f.Begin(0)
			tx.Incr(ctx, s.prefix+"n")
		}
		return provider.Closing{}, nil
	}
	_, err = units.DoCombined(ctx, provider.Unit{Projector: "p", Generation: 1, Messages: []provider.Message{m}}, run)
	require.NoError(t, err)
	old, next := provider.Generation{Build: b, State: provider.GenerationRetired}, provider.Generation{Build: provider.Build{Projector: "p", Generation: 2}, State: provider.GenerationLive}
	_, err = units.DoCombined(ctx, provider.Unit{Projector: "p", Generation: 2, Once: true, Switch: &provider.Switch{Set: []provider.Generation{old, next}}}, func(ctx context.Context, tx pipe, _ provider.Found) (provider.Closing, error) {
		tx.Unlink(ctx, s.prefix+"n")
		return provider.Closing{}, nil
	})
	require.NoError(t, err) // and the second store does not commit: the generation goes on, from the beginning
	c.Mode = provider.ModeCatchUp
	set, err := units.SetCheckpoint(ctx, b, provider.Checkpoint{}, c)
	require.NoError(t, err)
	require.True(t, set)
	_, err = units.DoCombined(ctx, provider.Unit{Projector: "p", Generation: 1, Messages: []provider.Message{m},
		Reader:  &provider.Reader{Mode: provider.ModeCatchUp, Token: token},
		Advance: &provider.Advance{From: 0, To: provider.LogPlace{Position: 5, ID: "m1"}, Mode: provider.ModeCatchUp, Token: token}}, run)
	require.NoError(t, err)
	require.Equal(t, "1", s.client.Get(ctx, s.prefix+"n").Val())
}

// A read model that was built without markers of its own does not show which events it has.
// Promise: G5.8
func TestOwnMarkersAreRefusedForAnOlderReadModel(t *testing.T) {
	t.Parallel()
	s, db := sharedSpace(t), newRouted(t)
	w, p := newWriter(t, db), define(projector.Options{}, s.list)
	w.write(5, "review-0")
	stop := fromLog(t, provider.Combine(s.units(t), db), db, projector.RunnerConfig{Lease: time.Second}, p)
	eventually(t, "all is applied", func() bool { return len(s.listed(t, "review-0")) == 5 })
	stop()
	r, err := projector.NewRunner(provider.Combine(s.own(t), db), projector.FromLog(db), projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}, p)
	require.NoError(t, err)
	err = r.Run(t.Context())
	require.ErrorIs(t, err, eventstore.ErrInvalid)
	require.ErrorContains(t, err, "another name")
	s.requireLists(t, w.n)
}
