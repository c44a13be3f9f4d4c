package redis_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	goredis "github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/internal/redistest"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/kinora-go/kinora/providers/redis"
)

func TestMain(m *testing.M) {
	if arm := os.Getenv("KINORA_CHILD"); arm != "" {
		if err := child(arm); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m,
		// the shared server lives as long as the process
		goleak.IgnoreAnyFunction("github.com/kinora-go/kinora/internal/testserver.run.func1"),
		// After an outage a client tries to connect every second until it notices that it was
		// closed.
		goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).tryDial"))
}

type posted struct {
	Product string
	Stars   int
}

var types = eventstore.NewTypes(eventstore.Type[posted]("posted"))

type (
	pipe    = goredis.Pipeliner
	onEvent = func(context.Context, pipe, eventstore.Event[posted]) error
)

// event is an event as the tests deliver and count it.
type event struct {
	ID     string
	Key    string
	Posted posted
}

func (e event) message() *message.Message {
	payload, _ := json.Marshal(e.Posted) // never fails
	m := message.NewMessage(e.ID, payload)
	m.Metadata[provider.HeaderType] = "posted"
	m.Metadata[outbox.HeaderKey] = e.Key
	m.Metadata[provider.HeaderStream] = e.Key
	return m
}

// events returns n events with this number of keys, always the same ones.
func events(n, keys int) []event {
	list := make([]event, n)
	for i := range list {
		key := fmt.Sprintf("review-%d", i*i%keys)
		list[i] = event{ID: fmt.Sprintf("m-%d", i), Key: key, Posted: posted{Product: key, Stars: 1 + i*7%5}}
	}
	return list
}

// stars returns the expected sums of stars by product.
func stars(list ...event) map[string]int {
	sum := map[string]int{}
	for _, e := range list {
		sum[e.Posted.Product] += e.Posted.Stars
	}
	return sum
}

// space is a range of keys for one test.
type space struct {
	client goredis.UniversalClient
	prefix string
}

var spaces struct {
	sync.Mutex
	n int
}

func newSpace(client goredis.UniversalClient) space {
	spaces.Lock()
	defer spaces.Unlock()
	spaces.n++
	return space{client, fmt.Sprintf("kinora-%d-%d-%d:", os.Getpid(), time.Now().UnixNano(), spaces.n)}
}

// sharedSpace returns a space on the shared server. It is emptied when t ends.
func sharedSpace(t testing.TB) space {
	s := newSpace(redistest.Client(t, redistest.Shared(t)))
	t.Cleanup(func() {
		keys, err := s.client.Keys(context.Background(), s.prefix+"*").Result()
		require.NoError(t, err)
		if len(keys) > 0 {
			require.NoError(t, s.client.Del(context.Background(), keys...).Err())
		}
	})
	return s
}

func (s space) units(t testing.TB) *redis.Units {
	u, err := redis.New(s.client, nil)
	require.NoError(t, err)
	return u
}

// count adds the stars of an event.
func (s space) count(ctx context.Context, tx pipe, e eventstore.Event[posted]) error {
	tx.HIncrBy(ctx, s.prefix+"stars", e.Data.Product, int64(e.Data.Stars))
	return nil
}

// counted reads the sums that count wrote.
func (s space) counted(t testing.TB) map[string]int {
	sum := map[string]int{}
	all, err := s.client.HGetAll(context.Background(), s.prefix+"stars").Result()
	require.NoError(t, err)
	for product, text := range all {
		sum[product], err = strconv.Atoi(text)
		require.NoError(t, err)
	}
	return sum
}

// subscription is a subscriber whose messages the test sends.
type subscription chan *message.Message

func (f subscription) Subscribe(context.Context, string) (<-chan *message.Message, error) {
	return f, nil
}
func (subscription) Close() error { return nil }

// deliver sends an event and waits until it is acked.
func (f subscription) deliver(t testing.TB, e event) {
	t.Helper()
	m := e.message()
	f <- m
	select {
	case <-m.Acked():
	case <-m.Nacked():
		t.Fatal("nacked")
	case <-time.After(patience.Limit()):
		t.Fatalf("%s is not acked", e.ID)
	}
}

func newMemory(t testing.TB) *memory.DB {
	db, err := memory.New(nil)
	require.NoError(t, err)
	return db
}

var marked = projector.Options{Markers: true}

func define(opts projector.Options, fn onEvent) *projector.Projector[pipe] {
	return projector.Define("stars", types, opts, projector.On("posted", fn))
}

// run starts a runner on f. The returned function stops it.
func run[Tx any](t testing.TB, u provider.Units[Tx], f subscription, cfg projector.RunnerConfig, ps ...*projector.Projector[Tx]) (stop func()) {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Retry.Base == 0 {
		cfg.Retry.Base, cfg.Retry.Max = time.Millisecond, 20*time.Millisecond
	}
	r, err := projector.NewRunner(u, projector.Subscribe(f, "review"), cfg, ps...)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			require.NoError(t, <-done)
		})
	}
	t.Cleanup(stop)
	return stop
}

// eventually polls until ok is true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	patience.Until(t, ok, "%s", what)
}

func parked(t testing.TB, db provider.Parking, f projector.ParkedFilter) []projector.Parked {
	list, err := db.Parked(context.Background(), f)
	require.NoError(t, err)
	return list
}

func requireClass(t testing.TB, err error, class provider.Class, code string) {
	t.Helper()
	require.Error(t, err)
	e := new(provider.Error)
	require.ErrorAs(t, err, &e, "all errors are *Error")
	require.Equal(t, class.String()+" "+code, e.Class.String()+" "+e.Code, "%v", err)
}

// text is a log for several goroutines.
type text struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *text) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *text) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
