package sqlite_test

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	watermill "github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/stretchr/testify/require"
)

// publications records the ids that a relay publishes, in order.
type publications struct {
	mu  sync.Mutex
	ids []string
}

func (p *publications) Publish(_ string, ms ...*watermill.Message) error {
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

const foreign = `insert into kinora_outbox (message_id, topic, key, payload, headers, status, next_attempt_at, created_at, last_attempt_at, published_at)
	values (?1, 't', ?2, x'78', ?3, ?4, ?5, ?6, ?7, ?8)`

const infinity = 1 << 62 // milliseconds, out of all calendars

// An entry that other software wrote, with headers that are not an object of strings or times of no calendar, holds
// back its own key and nothing else. Lists show it, and a person can skip it.
func TestMalformedEntriesHarmOnlyThemselves(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		column    string
		value     any
		want      outcome
		malformed bool // in lists, before a relay claims it
	}{
		"array":                       {"headers", `[]`, abandons, true},
		"array of strings":            {"headers", `["kinora_stream", "b"]`, abandons, true},
		"null":                        {"headers", `null`, abandons, true},
		"number":                      {"headers", `1`, abandons, true},
		"text":                        {"headers", `"x"`, abandons, true},
		"value is a number":           {"headers", `{"a": "b", "kinora_version": 1}`, abandons, true},
		"value is null":               {"headers", `{"a": null}`, abandons, true},
		"value is an object":          {"headers", `{"kinora_stream": {"b": "c"}}`, abandons, true},
		"no JSON":                     {"headers", `oops`, abandons, true},
		"empty":                       {"headers", ``, abandons, true},
		"cut off":                     {"headers", `{"kinora_stream": "b"`, abandons, true},
		"created at infinity":         {"created_at", infinity, abandons, true},
		"created before all time":     {"created_at", -infinity, abandons, true},
		"created too late":            {"created_at", 569000000000000, abandons, true},
		"created too early":           {"created_at", -190000000000000, abandons, true},
		"due at infinity":             {"next_attempt_at", infinity, waits, true},
		"claimed until infinity":      {"lease", infinity, waits, true},
		"due since ever":              {"next_attempt_at", -infinity, passes, true},
		"attempted at infinity":       {"last_attempt_at", infinity, passes, true},
		"attempted before all time":   {"last_attempt_at", -infinity, passes, true},
		"published at infinity":       {"published_at", infinity, passes, true},
		"published before all time":   {"published_at", -infinity, passes, true},
		"well-formed":                 {"headers", `{"kinora_stream": "b"}`, passes, false},
		"well-formed without headers": {"headers", `{}`, passes, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t, nil)
			column := map[string]any{"headers": `{}`, "status": "pending", "next_attempt_at": 0, "created_at": 0}
			column[c.column] = c.value
			if lease := column["lease"]; lease != nil {
				column["status"], column["next_attempt_at"] = "claimed", lease
			}
			for _, id := range []string{"a-1", "bad-1", "bad-2", "b-1"} {
				args := []any{id, id[:len(id)-2], `{}`, "pending", 0, 0, nil, nil}
				if id == "bad-1" {
					args = []any{id, "bad", column["headers"], column["status"], column["next_attempt_at"], column["created_at"], column["last_attempt_at"], column["published_at"]}
				}
				_, err := db.SQL().Exec(foreign, args...)
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
		headers       string
		created, last int64
		want          outcome
	}{
		"headers":   {`[]`, 0, 0, abandons},
		"creation":  {`{}`, infinity, 0, abandons},
		"last time": {`{}`, 0, -infinity, passes},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := open(t, nil)
			for _, id := range []string{"a-1", "bad-1", "bad-2", "b-1"} {
				args := []any{id, id[:len(id)-2], `{}`, "pending", 0, 0, nil, nil}
				if id == "bad-1" {
					args = []any{id, "bad", c.headers, "pending", 0, c.created, c.last, nil}
				}
				_, err := db.SQL().Exec(foreign, args...)
				require.NoError(t, err)
			}
			harmless(t, db, struct{ outbox.Store }{db}, c.want)
		})
	}
}

// Requeue leaves an entry alone whose last attempt has no readable time, unless it is forced.
func TestRequeueNextToAnInfiniteTime(t *testing.T) {
	t.Parallel()
	db := open(t, nil)
	for id, last := range map[string]any{"good": time.Now().UnixMilli(), "late": infinity, "early": -infinity} {
		_, err := db.SQL().Exec(foreign, id, id, `{}`, "pending", 0, 0, last, nil)
		require.NoError(t, err)
	}
	_, err := db.SQL().Exec(`update kinora_outbox set status = 'abandoned'`)
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
	db := open(t, nil)
	day := time.Now().Add(-24 * time.Hour).UnixMilli()
	_, err := db.SQL().Exec(`with recursive n (g) as (select 1 union all select g + 1 from n where g < 1510)
		insert into kinora_outbox (message_id, topic, key, payload, headers, status, open, next_attempt_at, created_at, published_at)
		select 'm' || g, 't', 'k', x'', '{}', 'published', 0, ?1, iif(g <= 1500, ?2, ?1), iif(g <= 1500, ?2, ?1) from n`, day, infinity)
	require.NoError(t, err)
	n, err := outbox.Prune(t.Context(), db, outbox.Retention{Published: time.Hour})
	require.NoError(t, err)
	require.Equal(t, 10, n)
}

var _ store = (*sqlite.DB)(nil)
