//go:build unix

package docs_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/providers/sqlite"
	"github.com/stretchr/testify/require"
)

// wrong inserts rows as a faulty producer would.
type wrong struct {
	exec   func(query string) error
	now    string
	text   string // converts a text to the type of a payload
	prefix string
}

// event inserts an event of a stream of its own, with other values of some columns.
func (w wrong) event(stream string, other map[string]string) error {
	columns := map[string]string{
		"stream": "'" + stream + "'", "version": "1", "id": "'" + newID() + "'", "type": "'shop.sold'", "schema_version": "1",
		"data": `'{"N": 1}'`, "metadata": `'{}'`, "recorded_at": w.now,
	}
	for name, value := range other {
		columns[name] = value
	}
	return w.insert("events", columns)
}

func (w wrong) entry(other map[string]string) error {
	columns := map[string]string{
		"message_id": "'" + newID() + "'", "topic": "'sales'", "key": "'wrong'", "payload": w.text, "headers": `'{}'`,
		"next_attempt_at": w.now, "created_at": w.now,
	}
	for name, value := range other {
		columns[name] = value
	}
	return w.insert("outbox", columns)
}

func (w wrong) insert(table string, columns map[string]string) error {
	var names, values []string
	for name, value := range columns {
		names, values = append(names, name), append(values, value)
	}
	return w.exec(fmt.Sprintf(`insert into %s%s (%s) values (%s)`, w.prefix, table, strings.Join(names, ", "), strings.Join(values, ", ")))
}

// refused are rows that both databases refuse.
func refused(t *testing.T, w wrong, known string) {
	t.Helper()
	for name, other := range map[string]map[string]string{
		"an id that exists": {"id": "'" + known + "'"},
		"version 0":         {"version": "0"},
		"a version twice":   {"stream": "'shop-known'"},
		"no id":             {"id": "''"},
		"an id in words":    {"id": "'order-7'"},
		"no data":           {"data": "null"},
	} {
		require.Error(t, w.event("shop-refused", other), name)
	}
}

// oddities are rows that both databases accept.
func oddities(t *testing.T, w wrong) {
	t.Helper()
	n := 0
	odd := func(other map[string]string) {
		n++
		require.NoError(t, w.event(fmt.Sprint("odd-", n), other), "%v", other)
	}
	for _, metadata := range []string{`[1]`, `null`, `7`, `{"correlation_id": 5}`, `{"extra": []}`, `{"extra": {"a": 1}}`, `{"EXTRA": "x", "Actor": {}}`} {
		odd(map[string]string{"metadata": "'" + metadata + "'"})
	}
	odd(map[string]string{"type": "''"})
	odd(map[string]string{"type": "'unknown'"})
	odd(map[string]string{"schema_version": "0"})
	odd(map[string]string{"schema_version": "99999"})
	odd(map[string]string{"data": `'[]'`})
	odd(map[string]string{"stream": "'no-category-'"})
	odd(map[string]string{"stream": "''"})
	odd(map[string]string{"version": "2"}) // 1 is skipped, and the stream has no row
	for _, headers := range []string{`[]`, `{"a": 1}`, `null`} {
		require.NoError(t, w.entry(map[string]string{"headers": "'" + headers + "'", "key": "'" + newID() + "'"}))
	}
	for _, other := range []map[string]string{
		{"headers": `'{"kinora_type": "shop.sold", "kinora_version": "x"}'`}, {"headers": `'{"kinora_type": "shop.sold", "kinora_position": "1"}'`},
		{"message_id": "''"}, {"key": "''"}, {"topic": "''"}, {"topic": "'nobody'"},
	} {
		require.NoError(t, w.entry(other), "%v", other)
	}
}

// harmless appends wrong rows and then a good event, which must be projected from the log, from the
// log next to a broker, and from a relay.
func harmless[Tx any](t *testing.T, db interface {
	provider.Provider[Tx]
	provider.Outbox
	provider.Log
	eventstore.Store
}, w wrong) {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	broker := gochannel.NewGoChannel(gochannel.Config{OutputChannelBuffer: 100}, nil)
	ctx, cancel := context.WithCancel(t.Context())
	done, applied := make(chan error, 4), make(chan string, 100)
	project := func(name string, opts projector.Options) *projector.Projector[Tx] {
		return projector.Define(name, soldTypes, opts, projector.On("a", func(_ context.Context, _ Tx, e eventstore.Event[sold]) error {
			if e.Stream == "shop-good" {
				applied <- name
			}
			return nil
		}))
	}
	cfg := projector.RunnerConfig{Logger: quiet, Grace: 100 * time.Millisecond}
	start := func(src projector.Source, p *projector.Projector[Tx]) {
		r, err := projector.NewRunner[Tx](db, src, cfg, p)
		require.NoError(t, err)
		go func() { done <- r.Run(ctx) }()
		<-r.Running()
	}
	drafts, err := soldTypes.Encode(t.Context(), sold{1})
	require.NoError(t, err)
	_, err = db.Append(t.Context(), "shop-known", eventstore.NoStream, drafts)
	require.NoError(t, err)
	refused(t, w, drafts[0].ID)
	oddities(t, w)

	start(projector.FromLog(db, "shop", "odd"), project("log", projector.Options{}))
	start(projector.Subscribe(broker, "unused"), project("completed", projector.Options{Markers: true}))
	start(projector.Subscribe(broker, "sales"), project("relay", projector.Options{Markers: true, BrokerOnly: true}))
	relay, err := outbox.NewRelay(db, broker, &outbox.RelayConfig{Logger: quiet, Poll: 20 * time.Millisecond})
	require.NoError(t, err)
	go func() { done <- relay.Run(ctx) }()
	drafts, err = soldTypes.Encode(t.Context(), sold{1})
	require.NoError(t, err)
	_, err = db.Append(t.Context(), "shop-good", eventstore.NoStream, drafts)
	require.NoError(t, err)
	var names []string
	for range 3 {
		names = append(names, patience.Receive(t, applied, "an event behind the wrong rows, which only %v have applied", names))
	}
	require.ElementsMatch(t, []string{"log", "completed", "relay"}, names)
	read := 0
	for e, err := range provider.ReadLog(t.Context(), db, eventstore.From{}, eventstore.LogFilter{}) {
		require.NoError(t, err)
		read++
		if provider.CheckStream(e.Stream) != nil {
			continue // Go cannot name it
		}
		for _, err := range db.ReadStream(t.Context(), e.Stream, 0) {
			require.NoError(t, err)
		}
	}
	require.Equal(t, 17, read)
	// The next append continues behind a version that was skipped.
	require.NoError(t, w.insert("streams", map[string]string{"stream": "'odd-skipped'", "category": "'odd'", "version": "2"}))
	require.NoError(t, w.event("odd-skipped", map[string]string{"version": "2"}))
	drafts, err = soldTypes.Encode(t.Context(), sold{1})
	require.NoError(t, err)
	at, err := db.Append(t.Context(), "odd-skipped", 2, drafts)
	require.NoError(t, err)
	require.Equal(t, int64(3), at.Version)
	cancel()
	for range 4 {
		require.NoError(t, <-done)
	}
	require.NoError(t, broker.Close())
	list, err := db.Parked(t.Context(), projector.ParkedFilter{Projector: "log"})
	require.NoError(t, err)
	codes := map[string]int{}
	for _, p := range list {
		codes[p.Code]++
	}
	require.Equal(t, map[string]int{"unregistered": 3, "undecodable": 1}, codes, "an unknown type, no type, an unknown schema version; []")
}

// Promise: G11.3
func TestWrongRowsOnPostgreSQL(t *testing.T) {
	t.Parallel()
	db, err := postgres.Open(t.Context(), postgrestest.DSN(t, nil), &postgres.Config{Route: sales})
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	exec := func(query string) error { _, err := db.Pool().Exec(t.Context(), query); return err }
	w := wrong{exec, "clock_timestamp()", `'\x7b7d'`, "kinora."}
	for name, other := range map[string]map[string]string{
		"a position": {"position": "7"}, "no JSON": {"data": "'{'"}, "an infinite time": {"recorded_at": "'infinity'"},
		"another infinite time": {"recorded_at": "'-infinity'"}, "a time before the year 1": {"recorded_at": "'0002-01-01 BC'"},
		"a time after 9999": {"recorded_at": "'10001-01-01'"},
	} {
		require.Error(t, w.event("shop-refused", other), name)
	}
	harmless[pgx.Tx](t, db, w)
}

// Promise: G11.3
func TestWrongRowsOnSQLite(t *testing.T) {
	t.Parallel()
	db, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "a.db"), &sqlite.Config{Route: sales})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	require.NoError(t, db.Migrate(t.Context()))
	exec := func(query string) error { _, err := db.SQL().Exec(query); return err }
	harmless[*sql.Tx](t, db, wrong{exec, "cast(unixepoch('subsec') * 1000 as integer)", "x'7b7d'", "kinora_"})
}
