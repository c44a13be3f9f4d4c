package projector_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type posted struct{ Stars int }
type unhandled struct{}

var types = eventstore.NewTypes(eventstore.Type[posted]("posted"), eventstore.Type[unhandled]("unhandled"))

type (
	txn     = *memory.Model
	onEvent = func(context.Context, txn, eventstore.Event[posted]) error
	unit    = provider.Provider[txn]
)

var (
	marked = projector.Options{Markers: true}
	// only what the test delivers is applied
	delivered = projector.Options{Markers: true, BrokerOnly: true}
	person    = projector.Decision{By: "ann", Reason: "fixed"}
	all       = projector.ParkedFilter{}
)

func newDB(t *testing.T) *memory.DB {
	t.Helper()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	return db
}

// define makes a projector "p" whose handlers are "a", "b" and so on.
func define(opts projector.Options, fns ...onEvent) *projector.Projector[txn] {
	var hs []projector.Handler[txn]
	for i, fn := range fns {
		hs = append(hs, projector.On(string(rune('a'+i)), fn))
	}
	return projector.Define("p", types, opts, hs...)
}

// add adds e's stars to the total.
func add(_ context.Context, tx txn, e eventstore.Event[posted]) error {
	n, _ := tx.Get("totals", "stars")
	sum, _ := n.(int)
	tx.Put("totals", "stars", sum+e.Data.Stars)
	return nil
}

func total(db *memory.DB, table string) int {
	n := 0
	db.View(func(m *memory.Model) {
		v, _ := m.Get(table, "stars")
		n, _ = v.(int)
	})
	return n
}

// note appends e's stars to the list of its stream, so that a duplicate, a loss or a wrong order
// shows.
func note(table string) onEvent {
	return func(_ context.Context, tx txn, e eventstore.Event[posted]) error {
		v, _ := tx.Get(table, e.Stream)
		list, _ := v.([]int)
		tx.Put(table, e.Stream, append(slices.Clone(list), e.Data.Stars))
		return nil
	}
}

func noted(db *memory.DB, table, key string) (list []int) {
	db.View(func(m *memory.Model) {
		v, _ := m.Get(table, key)
		list, _ = v.([]int)
	})
	return list
}

// upTo returns 1, 2, …, n.
func upTo(n int) (list []int) {
	for i := range n {
		list = append(list, i+1)
	}
	return list
}

// faults are the errors of messages, by id. A message without an error succeeds.
type faults struct {
	mu     sync.Mutex
	errs   map[string]error
	tries  map[string]int             // by message
	at     map[string][]time.Duration // time of each try since began
	began  time.Time
	handle onEvent // handles messages without an error; nil means note("a")
}

func newFaults(errs map[string]error) *faults {
	return &faults{errs: errs, tries: map[string]int{}, at: map[string][]time.Duration{}, began: time.Now(), handle: note("a")}
}

func (f *faults) run(ctx context.Context, tx txn, e eventstore.Event[posted]) error {
	f.mu.Lock()
	f.tries[e.ID]++
	f.at[e.ID] = append(f.at[e.ID], time.Since(f.began))
	err := f.errs[e.ID]
	f.mu.Unlock()
	if err != nil {
		_ = f.handle(ctx, tx, e) // must have no effect
		return err
	}
	return f.handle(ctx, tx, e)
}

func (f *faults) set(id string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.errs[id] = err
}

func (f *faults) fix() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.errs)
}

func (f *faults) tried(id string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.tries[id]
}

var (
	errNo    = errors.New("no")
	errNever = projector.Permanent(errors.New("never"))
	errBusy  = &projector.Error{Class: projector.ClassTransient, Code: "57P01", Err: errors.New("busy")}
)

// subscription is a subscriber whose messages the test sends itself.
type subscription chan *message.Message

func (f subscription) Subscribe(context.Context, string) (<-chan *message.Message, error) {
	return f, nil
}
func (subscription) Close() error { return nil }

// send sends copies of messages without waiting for their acks, and returns the copies.
func (f subscription) send(msgs ...*message.Message) (sent []*message.Message) {
	for _, m := range msgs {
		c := m.Copy()
		f <- c
		sent = append(sent, c)
	}
	return sent
}

// deliver sends copies of messages one by one and waits for each ack. A nack fails the test.
func (f subscription) deliver(t *testing.T, msgs ...*message.Message) {
	t.Helper()
	for _, m := range msgs {
		acked(t, f.send(m)...)
	}
}

// redeliver sends copies of a message until one is acked. A runner that stops does not ack what waits for
// its workers, and a broker delivers that again.
func (f subscription) redeliver(m *message.Message) {
	for {
		select {
		case <-f.send(m)[0].Acked():
			return
		case <-time.After(10 * time.Second):
		}
	}
}

// acked waits until the messages are acked.
func acked(t *testing.T, msgs ...*message.Message) {
	t.Helper()
	for _, m := range msgs {
		select {
		case <-m.Acked():
		case <-m.Nacked():
			t.Fatal("nacked")
		}
	}
}

func isAcked(m *message.Message) bool {
	select {
	case <-m.Acked():
		return true
	default:
		return false
	}
}

func isNacked(m *message.Message) bool {
	select {
	case <-m.Nacked():
		return true
	default:
		return false
	}
}

func msg(id, eventType, payload string) *message.Message {
	m := message.NewMessage(id, []byte(payload))
	m.Metadata[provider.HeaderType] = eventType
	m.Metadata[outbox.HeaderKey] = "review-1"
	m.Metadata[provider.HeaderStream] = "review-1"
	return m
}

// keyed returns the n-th message of a key.
func keyed(key string, n int) *message.Message {
	m := msg(fmt.Sprint(key, "-", n), "posted", fmt.Sprintf(`{"Stars":%d}`, n))
	m.Metadata[outbox.HeaderKey], m.Metadata[provider.HeaderStream] = key, key
	return m
}

// series returns the messages of a key from one number to another.
func series(key string, from, to int) (msgs []*message.Message) {
	for n := from; n <= to; n++ {
		msgs = append(msgs, keyed(key, n))
	}
	return msgs
}

// recorded returns m as an event recorded at that time.
func recorded(m *message.Message, at time.Time) *message.Message {
	m.Metadata[provider.HeaderRecordedAt] = at.UTC().Format(time.RFC3339Nano)
	return m
}

// newRunner makes a runner on src that is alone in its process.
func newRunner(t *testing.T, u unit, src projector.Source, cfg projector.RunnerConfig, ps ...*projector.Projector[txn]) *projector.Runner {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	r, err := projector.NewRunner(u, src, cfg, ps...)
	require.NoError(t, err)
	projector.OwnProcess(r)
	return r
}

// start runs r until the returned function stops it.
func start(t *testing.T, r *projector.Runner) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	<-r.Running()
	return func() error {
		cancel()
		return <-done
	}
}

// rebuild is r.Rebuild of projector "p". It returns an error if that takes 20 minutes.
func rebuild(t *testing.T, r *projector.Runner, request projector.Rebuild) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	return r.Rebuild(ctx, "p", request)
}

// run starts a runner of ps on f. The returned function stops it.
func run(t *testing.T, u unit, f subscription, cfg projector.RunnerConfig, ps ...*projector.Projector[txn]) (stop func() error) {
	t.Helper()
	return start(t, newRunner(t, u, projector.Subscribe(f, "review"), cfg, ps...))
}

// applyParked applies messages that are due, as Projector.ApplyParked does, in a process of its own.
func applyParked(t *testing.T, u unit, cfg projector.RunnerConfig, ps ...*projector.Projector[txn]) error {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	r, err := projector.NewTool(u, cfg, ps...)
	require.NoError(t, err)
	projector.OwnProcess(r)
	return r.Run(t.Context())
}

// drain applies messages until none is due.
func drain(t *testing.T, u unit, cfg projector.RunnerConfig, ps ...*projector.Projector[txn]) {
	t.Helper()
	require.NoError(t, applyParked(t, u, cfg, ps...))
}

func parked(t *testing.T, db provider.Parking) []projector.Parked {
	t.Helper()
	list, err := db.Parked(t.Context(), projector.ParkedFilter{Projector: "p", Limit: 10_000})
	require.NoError(t, err)
	return list
}

// rows describes parked messages: id, state, class, code, attempts.
func rows(list []projector.Parked) (text []string) {
	for _, p := range list {
		text = append(text, strings.Join(strings.Fields(fmt.Sprint(p.MessageID, " ", p.State, " ", p.Class, " ", p.Code, " ", p.Attempts)), " "))
	}
	return text
}

func replayAll(t *testing.T, db provider.Parking, f projector.ParkedFilter) int {
	t.Helper()
	n, err := projector.Replay(t.Context(), db, f, person)
	require.NoError(t, err)
	return n
}

func skip(t *testing.T, db provider.Parking, f projector.ParkedFilter) int {
	t.Helper()
	n, err := projector.Skip(t.Context(), db, f, person)
	require.NoError(t, err)
	return n
}

type (
	handle = func(context.Context, txn, provider.Found) (provider.Closing, error)
	do     = func(context.Context, provider.Unit, handle) error
)

// faulty is a provider with methods that a test may replace. A nil function calls the provider's
// own method.
type faulty struct {
	unit
	do       do
	due      func(context.Context, provider.DueFilter) ([]provider.Parked, error)
	try      func(context.Context, provider.Parked, int, time.Duration) (bool, error)
	name     func(context.Context, provider.Build, provider.Worker, []string) error
	beat     func(ctx context.Context, runner string, lease, record time.Duration) (provider.Health, error)
	outcomes func(context.Context, []provider.Question) ([]provider.Outcome, error)
}

func (f *faulty) Do(ctx context.Context, u provider.Unit, run handle) error {
	if f.do == nil {
		return f.unit.Do(ctx, u, run)
	}
	return f.do(ctx, u, run)
}

func (f *faulty) Due(ctx context.Context, d provider.DueFilter) ([]provider.Parked, error) {
	if f.due == nil {
		return f.unit.Due(ctx, d)
	}
	return f.due(ctx, d)
}

func (f *faulty) Try(ctx context.Context, p provider.Parked, limit int, again time.Duration) (bool, error) {
	if f.try == nil {
		return f.unit.Try(ctx, p, limit, again)
	}
	return f.try(ctx, p, limit, again)
}

func (f *faulty) InFlight(ctx context.Context, p provider.Build, w provider.Worker, ids []string) error {
	if f.name == nil {
		return f.unit.InFlight(ctx, p, w, ids)
	}
	return f.name(ctx, p, w, ids)
}

func (f *faulty) Beat(ctx context.Context, runner string, lease, record time.Duration) (provider.Health, error) {
	if f.beat == nil {
		return f.unit.Beat(ctx, runner, lease, record)
	}
	return f.beat(ctx, runner, lease, record)
}

func (f *faulty) Outcomes(ctx context.Context, q []provider.Question) ([]provider.Outcome, error) {
	if f.outcomes == nil {
		return f.unit.Outcomes(ctx, q)
	}
	return f.outcomes(ctx, q)
}

// units records the units that run on a provider.
type units struct {
	faulty
	mu  sync.Mutex
	ran []string // message ids; "!" if the unit failed, "*" if it is serial, and the number of parked messages
}

// record runs units on inner (nil means db's own Do) and records them.
func record(db unit, inner do) *units {
	if inner == nil {
		inner = db.Do
	}
	u := &units{faulty: faulty{unit: db}}
	u.do = func(ctx context.Context, w provider.Unit, run handle) error {
		parked := 0
		err := inner(ctx, w, func(ctx context.Context, tx txn, found provider.Found) (provider.Closing, error) {
			c, err := run(ctx, tx, found)
			parked = len(c.Park)
			return c, err
		})
		var ids []string
		for _, m := range w.Messages {
			ids = append(ids, m.ID)
		}
		text := strings.Join(ids, " ")
		switch {
		case err != nil:
			text += " !"
		case parked > 0:
			text += fmt.Sprint(" parked ", parked)
		}
		if w.Serial {
			text += " *"
		}
		u.mu.Lock()
		defer u.mu.Unlock()
		u.ran = append(u.ran, text)
		return err
	}
	return u
}

// list returns the recorded units and clears the record.
func (u *units) list() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	ran := u.ran
	u.ran = nil
	return ran
}
