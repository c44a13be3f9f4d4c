package redis_test

import (
	"context"
	"errors"
	"regexp"
	"runtime"
	"strconv"
	"sync"
	"testing"

	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
)

// do runs a unit without messages.
func do(ctx context.Context, u *redis.Units, fn func(ctx context.Context, tx pipe) error) error {
	return u.Do(ctx, provider.Unit{Projector: "p"}, func(ctx context.Context, tx pipe, _ provider.Found) (provider.Closing, error) {
		return provider.Closing{}, fn(ctx, tx)
	})
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, err := redis.New(nil, nil)
	require.ErrorContains(t, err, "no client")
	ring := goredis.NewRing(&goredis.RingOptions{Addrs: map[string]string{"one": "127.0.0.1:1"}})
	defer ring.Close()
	_, err = redis.New(ring, nil)
	require.ErrorContains(t, err, "Ring")
}

// The test uses the command statistics of the server.
// Promise: G5.10
func TestAUnitIsOneTransaction(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t)
	s := newSpace(redistest.Client(t, server.URL))
	calls := func(command string) int {
		info, err := s.client.Info(t.Context(), "commandstats").Result()
		require.NoError(t, err)
		m := regexp.MustCompile(`cmdstat_` + command + `:calls=(\d+)`).FindStringSubmatch(info)
		if m == nil {
			return 0
		}
		n, err := strconv.Atoi(m[1])
		require.NoError(t, err)
		return n
	}
	u := s.units(t)
	require.NoError(t, do(t.Context(), u, func(ctx context.Context, tx pipe) error {
		tx.Set(ctx, s.prefix+"a", 1, 0)
		// a nested pipeline is the same pipeline
		tx.TxPipeline().Incr(ctx, s.prefix+"b")
		tx.Pipeline().Incr(ctx, s.prefix+"b")
		require.Zero(t, calls("set"), "no command is sent before run returns")
		require.Equal(t, 3, tx.Len())
		return nil
	}))
	require.Equal(t, []int{1, 1, 1, 2}, []int{calls("multi"), calls("exec"), calls("set"), calls("incr")})
	require.NoError(t, do(t.Context(), u, func(context.Context, pipe) error { return nil }))
	require.Equal(t, 1, calls("multi"), "a unit without commands sends none")
}

// Promise: G5.10
func TestAUnitThatFailsSendsNothing(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	u := s.units(t)
	cause := errors.New("cause")
	queue := func(ctx context.Context, tx pipe) { tx.Incr(ctx, s.prefix+"k") }

	err := do(t.Context(), u, func(ctx context.Context, tx pipe) error { queue(ctx, tx); return cause })
	require.ErrorIs(t, err, cause)
	requireClass(t, err, provider.ClassUnknown, "")
	require.PanicsWithValue(t, "poison", func() {
		_ = do(t.Context(), u, func(ctx context.Context, tx pipe) error { queue(ctx, tx); panic("poison") })
	})
	var all sync.WaitGroup
	all.Go(func() {
		_ = do(t.Context(), u, func(ctx context.Context, tx pipe) error { queue(ctx, tx); runtime.Goexit(); return nil })
	})
	all.Wait()
	canceled, cancel := context.WithCancel(t.Context())
	err = do(canceled, u, func(ctx context.Context, tx pipe) error { queue(ctx, tx); cancel(); return nil })
	require.ErrorIs(t, err, context.Canceled)
	requireClass(t, err, provider.ClassShutdown, "")
	late, pass := patience.Deadline(t)
	err = do(late, u, func(ctx context.Context, tx pipe) error { queue(ctx, tx); pass(); <-ctx.Done(); return nil })
	require.ErrorIs(t, err, context.DeadlineExceeded)
	requireClass(t, err, provider.ClassUnknown, provider.CodeDeadline)

	require.Zero(t, s.client.Exists(t.Context(), s.prefix+"k").Val())
	require.NoError(t, do(t.Context(), u, func(ctx context.Context, tx pipe) error { queue(ctx, tx); return nil }))
	require.Equal(t, "1", s.client.Get(t.Context(), s.prefix+"k").Val())
}

func TestAHandlerCannotEndItsTransaction(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	u := s.units(t)
	fn := func(goredis.Pipeliner) error { t.Error("the function was called"); return nil }
	for name, end := range map[string]func(context.Context, pipe) error{
		"Exec":                      func(ctx context.Context, tx pipe) error { _, err := tx.Exec(ctx); return err },
		"a nested Exec":             func(ctx context.Context, tx pipe) error { _, err := tx.TxPipeline().Exec(ctx); return err },
		"an ignored Exec":           func(ctx context.Context, tx pipe) error { _, _ = tx.Exec(ctx); return nil },
		"Discard":                   func(_ context.Context, tx pipe) error { tx.Discard(); return nil },
		"Pipelined":                 func(ctx context.Context, tx pipe) error { _, err := tx.Pipelined(ctx, fn); return err },
		"TxPipelined":               func(ctx context.Context, tx pipe) error { _, err := tx.TxPipelined(ctx, fn); return err },
		"EXEC by name":              func(ctx context.Context, tx pipe) error { tx.Do(ctx, "EXEC"); return nil },
		"multi by name":             func(ctx context.Context, tx pipe) error { tx.Do(ctx, "multi"); return nil },
		"a watch by name":           func(ctx context.Context, tx pipe) error { tx.Do(ctx, "watch", s.prefix+"k"); return nil },
		"discard by name":           func(ctx context.Context, tx pipe) error { tx.Do(ctx, "discard"); return nil },
		"another database":          func(ctx context.Context, tx pipe) error { tx.Select(ctx, 1); return nil },
		"another name":              func(ctx context.Context, tx pipe) error { tx.ClientSetName(ctx, "other"); return nil },
		"another user":              func(ctx context.Context, tx pipe) error { tx.Auth(ctx, "secret"); return nil },
		"the end of the connection": func(ctx context.Context, tx pipe) error { tx.Do(ctx, "quit"); return nil },
		"a subscription":            func(ctx context.Context, tx pipe) error { tx.Do(ctx, "subscribe", "c"); return nil },
		"client replies off":        func(ctx context.Context, tx pipe) error { tx.Do(ctx, "client", "reply", "off"); return nil },
	} {
		err := do(t.Context(), u, func(ctx context.Context, tx pipe) error {
			tx.Incr(ctx, s.prefix+"k")
			return end(ctx, tx)
		})
		requireClass(t, err, provider.ClassPermanent, "tx_ended")
		require.ErrorIs(t, err, redis.ErrEnded, name)
		require.Zero(t, s.client.Exists(t.Context(), s.prefix+"k").Val(), name)
	}
}

// messages returns a unit of n messages with one handler.
func messages(n int) provider.Unit {
	u := provider.Unit{Projector: "p"}
	for i := range n {
		u.Messages = append(u.Messages, provider.Message{ID: strconv.Itoa(i), Handlers: []provider.Handler{{Name: "p/h"}}})
	}
	return u
}

// Promise: G5.12
func TestTheErrorNamesTheMessageOfTheCommandThatFailed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fail    func(ctx context.Context, tx pipe, key string)
		class   provider.Class
		code    string
		applied int64 // number of other commands
	}{
		"inside EXEC, which applies the others": {func(ctx context.Context, tx pipe, key string) { tx.LPush(ctx, key, 1) }, provider.ClassPermanent, provider.CodePartly, 3},
		"before EXEC, which applies none":       {func(ctx context.Context, tx pipe, key string) { tx.Do(ctx, "set", key) }, provider.ClassUnknown, "ERR", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := sharedSpace(t)
			require.NoError(t, s.client.Set(t.Context(), s.prefix+"string", "s", 0).Err())
			for bad := range 3 {
				err := s.units(t).Do(t.Context(), messages(3), func(ctx context.Context, tx pipe, found provider.Found) (provider.Closing, error) {
					require.Equal(t, [][]bool{{true}, {true}, {true}}, found.Fresh)
					require.Equal(t, []bool{false, false, false}, found.Held)
					for i := range 3 {
						found.Begin(i)
						tx.SAdd(ctx, s.prefix+"set", strconv.Itoa(i))
						if i == bad {
							c.fail(ctx, tx, s.prefix+"string")
						}
					}
					return provider.Closing{}, nil
				})
				requireClass(t, err, c.class, c.code)
				e := new(provider.MessageError)
				require.ErrorAs(t, err, &e)
				require.Equal(t, bad, e.Message)
				require.Equal(t, c.applied > 0, e.Others)
				require.Equal(t, c.applied, s.client.SCard(t.Context(), s.prefix+"set").Val())
			}
		})
	}
}

func TestANullReplyIsNoError(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	require.NoError(t, do(t.Context(), s.units(t), func(ctx context.Context, tx pipe) error {
		tx.Get(ctx, s.prefix+"missing")
		tx.Incr(ctx, s.prefix+"k")
		tx.LPop(ctx, s.prefix+"missing")
		return nil
	}))
	require.Equal(t, "1", s.client.Get(t.Context(), s.prefix+"k").Val())
	require.NoError(t, s.client.Set(t.Context(), s.prefix+"string", "s", 0).Err())
	err := do(t.Context(), s.units(t), func(ctx context.Context, tx pipe) error {
		tx.Get(ctx, s.prefix+"missing")
		tx.Incr(ctx, s.prefix+"string")
		return nil
	})
	// the null reply before it does not hide it
	requireClass(t, err, provider.ClassUnknown, "ERR")
}

func TestWhatRedisDoesNotKeepIsRefused(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	u := s.units(t)
	require.Equal(t, provider.Keeps{}, u.Keeps())
	for _, c := range []provider.Closing{{Output: []outbox.Message{{Topic: "t"}}}, {Park: []provider.Aside{{}}}} {
		err := u.Do(t.Context(), messages(1), func(ctx context.Context, tx pipe, _ provider.Found) (provider.Closing, error) {
			tx.Incr(ctx, s.prefix+"k")
			return c, nil
		})
		requireClass(t, err, provider.ClassPermanent, "not_kept")
	}
	dry := messages(1)
	dry.DryRun = func([]provider.Change) { t.Error("DryRun was called") }
	err := u.Do(t.Context(), dry, func(context.Context, pipe, provider.Found) (provider.Closing, error) {
		t.Error("run was called")
		return provider.Closing{}, nil
	})
	requireClass(t, err, provider.ClassPermanent, "dry_run")
	err = u.Do(t.Context(), provider.Unit{Once: true, Switch: &provider.Switch{}}, func(context.Context, pipe, provider.Found) (provider.Closing, error) {
		t.Error("run was called")
		return provider.Closing{}, nil
	})
	requireClass(t, err, provider.ClassPermanent, "not_kept")
	require.Zero(t, s.client.Exists(t.Context(), s.prefix+"k").Val())
}

type panics struct{}

func (panics) MarshalBinary() ([]byte, error) { panic("poison") }

type exits struct{}

func (exits) MarshalBinary() ([]byte, error) { runtime.Goexit(); return nil, nil }

// The client encodes values when it sends them: a value that cannot be encoded fails only its
// unit.
func TestAValueThatCannotBeEncodedSendsNothing(t *testing.T) {
	t.Parallel()
	for name, value := range map[string]any{"a channel": make(chan int), "a panic": panics{}, "an ended goroutine": exits{}} {
		s := sharedSpace(t)
		for range 20 { // more often than a pool has connections
			err := do(t.Context(), s.units(t), func(ctx context.Context, tx pipe) error {
				tx.Incr(ctx, s.prefix+"k")
				tx.Set(ctx, s.prefix+"l", value, 0)
				return nil
			})
			requireClass(t, err, provider.ClassUnknown, "")
		}
		require.Zero(t, s.client.Exists(t.Context(), s.prefix+"k").Val(), name)
	}
}
