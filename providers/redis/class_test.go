package redis_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/redis"
)

// oneTry disables the retries of the client, so that tests of outages are fast.
func oneTry(o *goredis.Options) { o.MaxRetries, o.DialerRetries = -1, 1 }

// incr increments one key.
func (s space) incr(ctx context.Context, tx pipe) error {
	tx.Incr(ctx, s.prefix+"k")
	return nil
}

// A server that is not ready refuses every command: no message is to blame.
// Promise: G5.13
func TestAServerThatIsNotReadyIsTransient(t *testing.T) {
	t.Parallel()
	for code, c := range map[string]struct {
		settings []string
		make     func(t *testing.T, server *redistest.Server, admin *goredis.Client)
	}{
		"OOM":         {make: set("maxmemory", "1")},
		"READONLY":    {make: replicaOfNobody},
		"MASTERDOWN":  {settings: []string{"--replica-serve-stale-data", "no", "--replica-read-only", "no"}, make: replicaOfNobody},
		"NOREPLICAS":  {make: set("min-replicas-to-write", "1")},
		"NOAUTH":      {make: set("requirepass", "secret")},
		"LOADING":     {settings: []string{"--key-load-delay", "5000", "--loading-process-events-interval-bytes", "1024"}, make: restartedWithMuch},
		"CLUSTERDOWN": {settings: []string{"--cluster-enabled", "yes"}},
		"BUSY":        {settings: []string{"--busy-reply-threshold", "1"}, make: busy},
		"MISCONF":     {settings: []string{"--save", "3600 1", "--enable-protected-configs", "yes"}, make: failedSave},
	} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			server := redistest.Private(t, c.settings...)
			s := newSpace(redistest.Client(t, server.URL, oneTry))
			if c.make != nil {
				c.make(t, server, redistest.Client(t, server.URL))
			}
			requireClass(t, do(t.Context(), s.units(t), s.incr), provider.ClassTransient, code)
			if code == "NOAUTH" {
				return // the client authenticates once for each connection
			}
			err := do(t.Context(), s.units(t), func(ctx context.Context, _ pipe) error { return s.client.Incr(ctx, s.prefix+"k").Err() })
			// a handler that uses the client directly
			requireClass(t, err, provider.ClassTransient, code)
		})
	}
}

func set(name, value string) func(*testing.T, *redistest.Server, *goredis.Client) {
	return func(t *testing.T, _ *redistest.Server, admin *goredis.Client) {
		require.NoError(t, admin.ConfigSet(t.Context(), name, value).Err())
	}
}

func replicaOfNobody(t *testing.T, _ *redistest.Server, admin *goredis.Client) {
	require.NoError(t, admin.Do(t.Context(), "replicaof", "127.0.0.1", "1").Err())
}

// busy keeps the server in a script until t ends.
func busy(t *testing.T, _ *redistest.Server, admin *goredis.Client) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		admin.Eval(context.Background(), "while true do end", nil)
	}()
	t.Cleanup(func() {
		require.NoError(t, admin.ScriptKill(context.Background()).Err())
		<-ended
	})
	eventually(t, "the script runs", func() bool { return goredis.HasErrorPrefix(admin.Ping(t.Context()).Err(), "BUSY") })
}

// restartedWithMuch restarts the server, which then takes five seconds to load its keys and
// replies meanwhile.
func restartedWithMuch(t *testing.T, server *redistest.Server, admin *goredis.Client) {
	for i := range 1000 {
		require.NoError(t, admin.Set(t.Context(), fmt.Sprint(i), rand.Text()+rand.Text(), 0).Err())
	}
	require.NoError(t, admin.Save(t.Context()).Err())
	require.NoError(t, server.End("KILL"))
	require.NoError(t, server.Begin())
}

// failedSave makes the last save of the server fail.
func failedSave(t *testing.T, _ *redistest.Server, admin *goredis.Client) {
	set("dir", "/proc")(t, nil, admin)
	require.NoError(t, admin.BgSave(t.Context()).Err())
	eventually(t, "the save has failed", func() bool {
		return strings.Contains(admin.Info(t.Context(), "persistence").Val(), "rdb_last_bgsave_status:err")
	})
}

// A single server is a cluster once it has all slots.
func TestACluster(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t, "--cluster-enabled", "yes")
	require.NoError(t, redistest.Client(t, server.URL).ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	client := goredis.NewClusterClient(&goredis.ClusterOptions{Addrs: []string{server.Addr}})
	t.Cleanup(func() { _ = client.Close() })
	s := newSpace(client)
	eventually(t, "the cluster is up", func() bool { return client.Set(t.Context(), "up", 1, 0).Err() == nil })

	require.NoError(t, do(t.Context(), s.units(t), func(ctx context.Context, tx pipe) error {
		tx.Incr(ctx, "{"+s.prefix+"}a")
		tx.Incr(ctx, "{"+s.prefix+"}b")
		return nil
	}))
	require.Equal(t, "1", client.Get(t.Context(), "{"+s.prefix+"}b").Val())
	err := do(t.Context(), s.units(t), func(ctx context.Context, tx pipe) error {
		tx.Incr(ctx, "a")
		tx.Incr(ctx, "b")
		return nil
	})
	requireClass(t, err, provider.ClassPermanent, "CROSSSLOT")
	require.ErrorContains(t, err, "{hash tag}")
	require.Zero(t, client.Exists(t.Context(), "a").Val()+client.Exists(t.Context(), "b").Val())
	err = do(t.Context(), s.units(t), func(ctx context.Context, tx pipe) error {
		tx.Do(ctx, "set", "a")
		return nil
	})
	requireClass(t, err, provider.ClassUnknown, "ERR")
}

// Neither the client nor the unit may send a transaction again if its reply was lost.
// Promise: G5.11
func TestALostReplyIsAmbiguous(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t)
	direct := redistest.Client(t, server.URL)
	for name, lose := range map[string]func(net.Conn){
		"the connection breaks": func(c net.Conn) { _ = c.Close() },
		"the network is silent": func(net.Conn) {},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProxy(t, server.Addr)
			s := newSpace(redistest.Client(t, "redis://"+p.addr))
			require.NoError(t, do(t.Context(), s.units(t), s.incr))
			impatient := space{redistest.Client(t, "redis://"+p.addr, func(o *goredis.Options) { o.ReadTimeout = 100 * time.Millisecond }), s.prefix}
			eventually(t, "a connection", func() bool { return impatient.client.Ping(t.Context()).Err() == nil })
			p.loseReply(lose)
			requireClass(t, do(t.Context(), impatient.units(t), impatient.incr), provider.ClassAmbiguous, "network")
			eventually(t, "it is applied", func() bool { return direct.Get(t.Context(), s.prefix+"k").Val() == "2" })
			require.NoError(t, do(t.Context(), s.units(t), s.incr))
		})
	}
}

// The client does not notice that a context is canceled while it waits for a reply.
func TestAContextThatEndsBeforeTheReplyIsAmbiguous(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t)
	p := newProxy(t, server.Addr)
	s := newSpace(redistest.Client(t, "redis://"+p.addr, func(o *goredis.Options) { o.ReadTimeout = patience.Limit() }))
	ctx, cancel := context.WithCancel(t.Context())
	p.loseReply(func(c net.Conn) { cancel(); <-t.Context().Done(); _ = c.Close() })
	err := do(ctx, s.units(t), s.incr)
	requireClass(t, err, provider.ClassAmbiguous, "")
	require.ErrorIs(t, err, context.Canceled, "although no reply comes")
	require.Equal(t, "1", redistest.Client(t, server.URL).Get(context.Background(), s.prefix+"k").Val(), "it was applied nevertheless")
}

func TestWithoutAConnectionNothingIsSent(t *testing.T) {
	t.Parallel()
	server := redistest.Private(t)
	client := redistest.Client(t, server.URL, func(o *goredis.Options) { o.PoolSize, o.PipelinePoolSize, o.PoolTimeout = 1, -1, 10*time.Millisecond })
	s := newSpace(client)
	admin, freed := redistest.Client(t, server.URL), make(chan error, 1)
	go func() { freed <- client.BLPop(t.Context(), 0, "list").Err() }()
	eventually(t, "the only connection is in use", func() bool { return strings.Contains(admin.Info(t.Context(), "clients").Val(), "blocked_clients:1") })
	requireClass(t, do(t.Context(), s.units(t), s.incr), provider.ClassTransient, "network")
	require.NoError(t, admin.LPush(t.Context(), "list", 1).Err())
	require.NoError(t, <-freed)
	require.NoError(t, do(t.Context(), s.units(t), s.incr))

	require.NoError(t, server.End("KILL"))
	eventually(t, "the server is gone", func() bool { return client.Ping(t.Context()).Err() != nil })
	err := do(t.Context(), s.units(t), s.incr)
	requireClass(t, err, provider.ClassTransient, "network")
	err = do(t.Context(), s.units(t), func(ctx context.Context, _ pipe) error {
		return fmt.Errorf("read: %w", client.Get(ctx, s.prefix+"k").Err())
	})
	// a handler that reads through the client
	requireClass(t, err, provider.ClassTransient, "network")
	require.NoError(t, server.Begin())
	require.NoError(t, client.Close())
	requireClass(t, do(t.Context(), s.units(t), s.incr), provider.ClassTransient, "network")
}

// A handler's error may have any source. If Redis replies, Redis is not to blame.
func TestANetworkErrorIsTheHandlersIfRedisReplies(t *testing.T) {
	t.Parallel()
	s := sharedSpace(t)
	for _, cause := range []error{
		fmt.Errorf("decode: %w", io.ErrUnexpectedEOF), &net.DNSError{Err: "no such host"}, &net.OpError{Op: "dial", Err: errors.New("refused")},
		goredis.Nil, errors.New("anything"),
	} {
		err := do(t.Context(), s.units(t), func(context.Context, pipe) error { return cause })
		requireClass(t, err, provider.ClassUnknown, "")
		require.ErrorIs(t, err, cause)
	}
	own := &provider.Error{Class: provider.ClassTransient, Code: "busy", Err: io.EOF}
	requireClass(t, do(t.Context(), s.units(t), func(context.Context, pipe) error { return own }), provider.ClassTransient, "busy")
}

// The error of a client's hook, such as a circuit breaker, has no known class: it counts as
// unknown unless it has one.
func TestAnErrorOfAHookIsUnknown(t *testing.T) {
	t.Parallel()
	client := redistest.Client(t, redistest.Shared(t))
	client.AddHook(refusing{})
	u, err := redis.New(client, nil)
	require.NoError(t, err)
	err = do(t.Context(), u, func(ctx context.Context, tx pipe) error { tx.Ping(ctx); return nil })
	requireClass(t, err, provider.ClassUnknown, "")
	require.ErrorIs(t, err, errRefusing)
}

var errRefusing = errors.New("refused by a hook")

type refusing struct{}

func (refusing) DialHook(next goredis.DialHook) goredis.DialHook          { return next }
func (refusing) ProcessHook(next goredis.ProcessHook) goredis.ProcessHook { return next }
func (refusing) ProcessPipelineHook(goredis.ProcessPipelineHook) goredis.ProcessPipelineHook {
	return func(context.Context, []goredis.Cmder) error { return errRefusing }
}
