package postgres_test

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// publications records the ids that a relay publishes, in order.
type publications struct {
	mu  sync.Mutex
	ids []string
}

func (p *publications) Publish(_ string, ms ...*message.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range ms {
		p.ids = append(p.ids, m.UUID)
	}
	return nil
}

func (*publications) Close() error { return nil }

func (p *publications) all() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.ids)
}

// outcome is what becomes of a foreign entry.
type outcome int

const (
	abandons outcome = iota // a relay abandons it as malformed
	waits                   // it never becomes eligible
	passes                  // a relay publishes it
)

const foreign = `insert into kinora.outbox (message_id, topic, key, payload, headers, status, next_attempt_at, created_at, last_attempt_at, published_at)
	values ($1, 't', $2, 'x', $3::jsonb, $4, $5::text::timestamptz, $6::text::timestamptz, $7::text::timestamptz, $8::text::timestamptz)`

// An entry that other software wrote, with headers that are not an object of strings or times that are infinite, holds
// back its own key and nothing else. Lists show it, and a person can skip it.
func TestMalformedEntriesHarmOnlyThemselves(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		column, value string
		want          outcome
		malformed     bool // in lists, before a relay claims it
	}{
		"array":                       {"headers", `[]`, abandons, true},
		"array of strings":            {"headers", `["kinora_stream", "b"]`, abandons, true},
		"null":                        {"headers", `null`, abandons, true},
		"number":                      {"headers", `1`, abandons, true},
		"text":                        {"headers", `"x"`, abandons, true},
		"value is a number":           {"headers", `{"a": "b", "kinora_version": 1}`, abandons, true},
		"value is null":               {"headers", `{"a": null}`, abandons, true},
		"value is an object":          {"headers", `{"kinora_stream": {"b": "c"}}`, abandons, true},
		"created at infinity":         {"created_at", "infinity", abandons, true},
		"created before all time":     {"created_at", "-infinity", abandons, true},
		"created too late":            {"created_at", "20000-01-01", abandons, true},
		"created too early":           {"created_at", "4000-01-01 BC", abandons, true},
		"due at infinity":             {"next_attempt_at", "infinity", waits, true},
		"claimed until infinity":      {"lease", "infinity", waits, true},
		"due since ever":              {"next_attempt_at", "-infinity", passes, true},
		"attempted at infinity":       {"last_attempt_at", "infinity", passes, true},
		"attempted before all time":   {"last_attempt_at", "-infinity", passes, true},
		"published at infinity":       {"published_at", "infinity", passes, true},
		"published before all time":   {"published_at", "-infinity", passes, true},
		"well-formed":                 {"headers", `{"kinora_stream": "b"}`, passes, false},
		"well-formed without headers": {"headers", `{}`, passes, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, nil)
			column := map[string]any{"headers": `{}`, "status": "pending", "next_attempt_at": "now", "created_at": "now"}
			column[c.column] = c.value
			if lease := column["lease"]; lease != nil {
				column["status"], column["next_attempt_at"] = "claimed", lease
			}
			for _, id := range []string{"a-1", "bad-1", "bad-2", "b-1"} {
				args := []any{id, id[:len(id)-2], `{}`, "pending", "now", "now", nil, nil}
				if id == "bad-1" {
					args = []any{id, "bad", column["headers"], column["status"], column["next_attempt_at"], column["created_at"], column["last_attempt_at"], column["published_at"]}
				}
				_, err := db.Pool().Exec(t.Context(), foreign, args...)
				require.NoError(t, err)
			}
			list, err := db.Entries(t.Context(), outbox.Filter{})
			require.NoError(t, err)
			require.Len(t, list, 4)
			for i, e := range list {
				require.Equal(t, i == 1 && c.malformed, e.Malformed, e.ID)
				require.Equal(t, "x", string(e.Payload))
			}
			harmless(t, db, db, c.want)
		})
	}
}

// store is what an operator and a relay need of a database.
type store interface {
	outbox.Store
	outbox.Inspector
	outbox.Keeper
}

// harmless requires that a relay publishes what is not behind the entry bad-1, which meets the wanted end, and that a
// person can skip bad-1.
func harmless(t *testing.T, db store, claims outbox.Store, want outcome) {
	t.Helper()
	pub := &publications{}
	cfg := &outbox.RelayConfig{Logger: slog.New(slog.DiscardHandler), Keep: outbox.Retention{Published: time.Hour}, Poll: 20 * time.Millisecond}
	relay, err := outbox.NewRelay(claims, pub, cfg)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	bad := func() outbox.Entry {
		list, err := db.Entries(t.Context(), outbox.Filter{})
		require.NoError(t, err)
		require.Equal(t, "bad-1", list[1].ID)
		return list[1]
	}
	expect := []string{"a-1", "b-1"}
	if want == passes {
		expect = []string{"a-1", "b-1", "bad-1", "bad-2"}
	}
	require.Eventually(t, func() bool {
		status := bad().Status
		return len(pub.all()) >= len(expect) && (want != abandons || status == outbox.Abandoned) && (want != passes || status == outbox.Published)
	}, 20*time.Second, 10*time.Millisecond, "%v", pub.all())
	require.ElementsMatch(t, expect, pub.all())
	if want != passes {
		e := bad()
		require.True(t, e.Malformed)
		if want == abandons {
			require.Equal(t, outbox.MalformedClass, e.LastError)
		}
		_, err := db.HoldEntries(t.Context(), time.Second, 100)
		require.NoError(t, err)
		list, err := db.Entries(t.Context(), outbox.Filter{Stream: "b"})
		require.NoError(t, err)
		require.Empty(t, list)
		n, err := db.Skip(t.Context(), outbox.Filter{Key: "bad", Seqs: []int64{e.Seq}})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.Eventually(t, func() bool { return slices.Contains(pub.all(), "bad-2") }, 20*time.Second, 10*time.Millisecond)
		require.NotContains(t, pub.all(), "bad-1")
		require.Equal(t, outbox.Skipped, bad().Status)
	}
	stop()
	require.NoError(t, <-ended)
}

// The portable claim reads the same.
func TestMalformedEntriesByThePortableClaim(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		headers, created, last string
		want                   outcome
	}{
		"headers":   {`[]`, "now", "now", abandons},
		"creation":  {`{}`, "infinity", "now", abandons},
		"last time": {`{}`, "now", "-infinity", passes},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := postgrestest.Open(t, nil)
			for _, id := range []string{"a-1", "bad-1", "bad-2", "b-1"} {
				args := []any{id, id[:len(id)-2], `{}`, "pending", "now", "now", nil, nil}
				if id == "bad-1" {
					args = []any{id, "bad", c.headers, "pending", "now", c.created, c.last, nil}
				}
				_, err := db.Pool().Exec(t.Context(), foreign, args...)
				require.NoError(t, err)
			}
			harmless(t, db, struct{ outbox.Store }{db}, c.want)
		})
	}
}

// Requeue leaves an entry alone whose last attempt has no readable time, unless it is forced.
func TestRequeueNextToAnInfiniteTime(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	for id, last := range map[string]string{"good": "now", "late": "infinity", "early": "-infinity"} {
		_, err := db.Pool().Exec(t.Context(), foreign, id, id, `{}`, "pending", "now", "now", last, nil)
		require.NoError(t, err)
	}
	_, err := db.Pool().Exec(t.Context(), `update kinora.outbox set status = 'abandoned', open = false, held = true, stuck = true`)
	require.NoError(t, err)
	n, err := db.Requeue(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	list, err := db.Entries(t.Context(), outbox.Filter{Status: []outbox.Status{outbox.Pending}})
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, "good", list[0].ID)
	n, err = db.Requeue(t.Context(), outbox.Filter{Force: true})
	require.NoError(t, err)
	require.Equal(t, 2, n)
}

// Entries that were created at infinity do not end the deletion of old ones behind them.
func TestDeletionPassesInfiniteTimes(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	_, err := db.Pool().Exec(t.Context(), `insert into kinora.outbox (message_id, topic, key, payload, headers, status, open, next_attempt_at, created_at, published_at)
		select 'm' || g, 't', 'k', '', '{}', 'published', false, now(), case when g <= 2500 then 'infinity' else now() - interval '1 day' end,
			now() - case when g <= 2500 then interval '0' else interval '1 day' end from generate_series(1, 2510) g`)
	require.NoError(t, err)
	n, err := outbox.Prune(t.Context(), db, outbox.Retention{Published: time.Hour})
	require.NoError(t, err)
	require.Equal(t, 10, n)
}

var _ store = (*postgres.DB)(nil)
