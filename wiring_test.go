package kinora_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
	"github.com/stretchr/testify/require"
)

type (
	posted  struct{ Stars int }
	shipped struct{}
	review  struct{}
	txn     = *memory.Model
)

func (*review) Apply(any) {}

var (
	reviews = eventstore.NewTypes(eventstore.Type[posted]("posted"))
	orders  = eventstore.NewTypes(eventstore.Type[shipped]("shipped"))
)

// lines collects what services log.
type lines struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all.Write(p)
}

func (l *lines) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func (l *lines) with(text string) (found []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.all.String()) {
		if strings.Contains(line, text) {
			found = append(found, line)
		}
	}
	return found
}

// parts is what a case puts together.
type parts struct {
	route  outbox.Route
	append map[string]*eventstore.Types // by category
	source func(db *memory.DB, sub message.Subscriber) projector.Source
	cfg    projector.RunnerConfig
	emits  bool
	other  bool // the runner reads another broker
	alone  bool // there is no runner
	before func(t *testing.T, db *memory.DB)
}

func subscribe(topics ...string) func(*memory.DB, message.Subscriber) projector.Source {
	return func(_ *memory.DB, sub message.Subscriber) projector.Source {
		return projector.Subscribe(sub, topics...)
	}
}

func fromLog(db *memory.DB, _ message.Subscriber) projector.Source { return projector.FromLog(db) }

// start starts a relay and a runner, and returns what they have logged.
func (p parts) start(t *testing.T) (*lines, error) {
	t.Helper()
	db, err := memory.New(&memory.Config{Route: p.route})
	require.NoError(t, err)
	for category, types := range p.append {
		_, err := eventstore.NewRepository(db, types, category, func(string) *review { return &review{} }, nil)
		require.NoError(t, err)
	}
	if p.before != nil {
		p.before(t, db)
	}
	log := &lines{}
	channel := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	defer func() { require.NoError(t, channel.Close()) }()
	var sub message.Subscriber = channel
	if p.other {
		other := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
		defer func() { require.NoError(t, other.Close()) }()
		sub = other
	}
	relay, err := outbox.NewRelay(db, channel, &outbox.RelayConfig{Logger: log.logger()})
	require.NoError(t, err)
	services := []kinora.Service{relay}
	if !p.alone {
		handler := projector.On("a", func(context.Context, txn, eventstore.Event[posted]) error { return nil })
		if p.emits {
			handler = projector.OnEmit("a", func(context.Context, txn, eventstore.Event[posted]) ([]outbox.Message, error) { return nil, nil })
		}
		p.cfg.Logger = log.logger()
		runner, err := projector.NewRunner(db, p.source(db, sub), p.cfg,
			projector.Define("p", reviews, projector.Options{Markers: true}, handler))
		require.NoError(t, err)
		services = []kinora.Service{runner, relay}
	}
	g, err := kinora.Start(t.Context(), services...)
	if g != nil {
		require.NoError(t, g.Stop())
	}
	return log, err
}

const (
	untaken   = "no projector started with this relay takes them"
	notRouted = "nothing is routed to topics"
)

// TestStartReportsWhatIsNotConnected: each warning is one line, and there is none in a service that is
// complete, or that another process completes.
// Promise: G13.7
func TestStartReportsWhatIsNotConnected(t *testing.T) {
	t.Parallel()
	own := map[string]*eventstore.Types{"review": reviews}
	both := map[string]*eventstore.Types{"review": reviews, "order": orders}
	toPublic := func(string, eventstore.Draft) []string { return []string{"public"} }
	panics := func(_ string, d eventstore.Draft) []string { panic(d.ID) }
	byRouter := func(*memory.DB, message.Subscriber) projector.Source { return projector.FromRouter() }
	decoder := func(string, *message.Message) (eventstore.Raw, error) { return eventstore.Raw{}, nil }
	for name, c := range map[string]struct {
		parts
		untaken, notRouted string // what the line has; empty: there is none
	}{
		"complete":                     {parts{route: outbox.ByCategory, append: own, source: subscribe("review")}, "", ""},
		"misspelt topic":               {parts{route: outbox.ByCategory, append: own, source: subscribe("reviews")}, "categories=[review]", "topics=[reviews]"},
		"another topic":                {parts{route: toPublic, append: own, source: subscribe("review")}, "categories=[review]", "topics=[review]"},
		"no projector of a category":   {parts{route: outbox.ByCategory, append: both, source: subscribe("review")}, "categories=[order]", ""},
		"topic without handlers":       {parts{route: outbox.ByCategory, append: both, source: subscribe("review", "order")}, "categories=[order]", ""},
		"from the log":                 {parts{route: outbox.ByCategory, append: own, source: fromLog}, "", ""},
		"from the log, not published":  {parts{append: own, source: fromLog}, "", ""},
		"only relays":                  {parts{route: outbox.ByCategory, append: both, alone: true}, "", ""},
		"appends elsewhere":            {parts{route: outbox.ByCategory, source: subscribe("reviews")}, "", ""},
		"other software":               {parts{append: map[string]*eventstore.Types{"order": orders}, source: subscribe("reviews"), other: true}, "", ""},
		"other software, own route":    {parts{route: outbox.ByCategory, append: map[string]*eventstore.Types{"order": orders}, source: subscribe("reviews"), other: true}, "categories=[order]", ""},
		"decoded":                      {parts{append: own, source: subscribe("mails"), cfg: projector.RunnerConfig{Decode: decoder}}, "", ""},
		"output":                       {parts{route: outbox.ByCategory, append: own, source: subscribe("review", "output"), emits: true}, "", ""},
		"pattern":                      {parts{route: outbox.ByCategory, append: own, source: subscribe("rev*")}, "", ""},
		"router":                       {parts{route: outbox.ByCategory, append: own, source: byRouter}, "", ""},
		"route that panics":            {parts{route: panics, append: own, source: subscribe("reviews")}, "", ""},
		"two topics, one is not right": {parts{route: outbox.ByCategory, append: own, source: subscribe("review", "revue")}, "", "topics=[revue]"},
		"entries of another process": {parts{route: outbox.ByCategory, append: own, source: subscribe("review", "news"), before: func(t *testing.T, db *memory.DB) {
			require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx txn) error {
				return db.InTx(tx).Enqueue(ctx, outbox.Message{Topic: "news", Payload: []byte("{}")})
			}))
		}}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			log, err := c.start(t)
			require.NoError(t, err)
			for text, want := range map[string]string{untaken: c.untaken, notRouted: c.notRouted} {
				if found := log.with(text); want == "" {
					require.Empty(t, found)
				} else {
					require.Len(t, found, 1)
					require.Contains(t, found[0], "level=WARN")
					require.Contains(t, found[0], want)
				}
			}
		})
	}
}

// TestStartRefusesARelayWithoutARoute: nothing runs, and the error says what to do.
// Promise: G13.7
func TestStartRefusesARelayWithoutARoute(t *testing.T) {
	t.Parallel()
	own := map[string]*eventstore.Types{"review": reviews}
	for name, c := range map[string]struct {
		parts
		refused bool
	}{
		"the subscriber is the publisher": {parts{append: own, source: subscribe("anything")}, true},
		"no repository":                   {parts{source: subscribe("review")}, true},
		"the topic is a category":         {parts{append: own, source: subscribe("review"), other: true}, true},
		"its entries come from elsewhere": {parts{append: own, source: subscribe("anything"), other: true}, false},
		"there are messages of this topic": {parts{append: own, source: subscribe("news"), before: func(t *testing.T, db *memory.DB) {
			require.NoError(t, db.Transact(t.Context(), func(ctx context.Context, tx txn) error {
				return db.InTx(tx).Enqueue(ctx, outbox.Message{Topic: "news", Payload: []byte("{}")})
			}))
		}}, false},
		"output": {parts{append: own, source: subscribe("output"), emits: true}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := c.start(t)
			if !c.refused {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, kinora.ErrNoRoute)
			require.ErrorContains(t, err, "outbox.ByCategory")
			require.ErrorContains(t, err, "topic ")
		})
	}
}

// TestEventOfATopicThatNobodyReadsArrives: gochannel accepts a message without a subscription, and the
// entry is published. The runner reads the event from the log.
func TestEventOfATopicThatNobodyReadsArrives(t *testing.T) {
	t.Parallel()
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	require.NoError(t, err)
	repo, err := eventstore.NewRepository(db, reviews, "review", func(string) *review { return &review{} }, nil)
	require.NoError(t, err)
	channel := gochannel.NewGoChannel(gochannel.Config{}, watermill.NopLogger{})
	defer func() { require.NoError(t, channel.Close()) }()
	log := &lines{}
	ratings := projector.Define("ratings", reviews, projector.Options{Markers: true},
		projector.On("posted", func(_ context.Context, tx txn, e eventstore.Event[posted]) error {
			tx.Put("stars", e.Stream, e.Data.Stars)
			return nil
		}))
	cfg := projector.RunnerConfig{Logger: log.logger(), Grace: 10 * time.Millisecond}
	runner, err := projector.NewRunner(db, projector.Subscribe(channel, "reviews"), cfg, ratings)
	require.NoError(t, err)
	relay, err := outbox.NewRelay(db, channel, &outbox.RelayConfig{Logger: log.logger()})
	require.NoError(t, err)
	g, err := kinora.Start(t.Context(), runner, relay)
	require.NoError(t, err)
	defer func() { require.NoError(t, g.Stop()) }()
	require.Len(t, log.with(notRouted), 1)

	at, err := repo.Update(t.Context(), "1", func(*review) ([]any, error) { return []any{posted{5}}, nil })
	require.NoError(t, err)
	require.NoError(t, ratings.Wait(patience.Context(t), db, at))
	db.View(func(m *memory.Model) {
		stars, _ := m.Get("stars", "review-1")
		require.Equal(t, 5, stars)
	})
}
