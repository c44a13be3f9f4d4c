package postgres_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/kinora-go/kinora/task"
	"github.com/stretchr/testify/require"
)

// twoForms are values that jsonb returns in another form. The later ones have keys that occur twice, which
// only SQL writes.
var twoForms = []string{
	`{"stars":3,"Stars":5}`, `{"Stars":5,"stars":3}`, `{"stars":1E+1}`, `{"stars":0.5e1,"more":[1E+2,-0,1.50]}`,
	`{"more":{"currency":"eur","total":1E+2,"b":null},"stars":1}`, `{"stars":1,"more":"<\u00e9\/\u2028>"}`, `{"MORE":1,"more":{"z":[{"y":1,"x":2}]}}`,
	`{"stars":1,"stars":2}`, `{"more":{"a":{"x":1},"a":{"y":2}}}`,
}

// jsonb changes nothing in the form of a value.
func TestTheFormOfAValueIsThatOfJSONB(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	values := append([]string{`"\u0001\u001f\b\f\n\r\t\"\\\/\u007f"`, `[[],{},true,false,null,""]`, `{"":1,"é":2,"e":3,"aa":4}`}, twoForms...)
	for _, mantissa := range []string{"0", "-0", "1", "-12", "0.5", "-0.05", "1.50", "100", "-0.0", "123456789.123456789", "98765432109876543210"} {
		for _, exponent := range []string{"", "e0", "E+1", "e2", "e-1", "E-2", "e-007", "e30", "e-30"} {
			values = append(values, "["+mantissa+exponent+"]")
		}
	}
	for _, value := range values {
		var stored string
		require.NoError(t, db.Pool().QueryRow(t.Context(), `select $1::text::jsonb::text`, value).Scan(&stored))
		require.Equal(t, string(check.CanonicalJSON([]byte(value))), string(check.CanonicalJSON([]byte(stored))), value)
	}
}

type formed struct {
	Stars int             `json:"stars"`
	More  json.RawMessage `json:"more"`
}

// An event is the same from the log as over a broker, also if SQL appended it.
// Promise: G7b.3
func TestAnEventHasOneForm(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, &postgres.Config{Route: outbox.ByCategory}, `
		create table forms (way text, id text, stars int, more text, primary key (way, id));`)
	for i, data := range twoForms {
		id := uuid.NewString()
		if i < len(twoForms)-2 {
			_, err := db.Append(t.Context(), "c-1", eventstore.Any, []eventstore.Draft{{ID: id, Type: "formed", Schema: 1, Data: []byte(data)}})
			require.NoError(t, err)
			continue
		}
		_, err := db.Pool().Exec(t.Context(), `
			with moved as (update kinora.streams set version = version + 1 where stream = 'c-1' returning version),
			appended as (insert into kinora.events (stream, version, id, type, schema_version, data, metadata, recorded_at)
				select 'c-1', version, $1, 'formed', 1, $2::text::jsonb, '{}', clock_timestamp() from moved)
			insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
			values ($1, 'c', 'c-1', convert_to($2, 'UTF8'), '{"kinora_type": "formed"}', clock_timestamp(), clock_timestamp())`, id, data)
		require.NoError(t, err)
	}
	upcast := func(old json.RawMessage) (json.RawMessage, error) {
		return json.RawMessage(strings.Replace(string(old), `"more":{`, `"more":{"up":1,`, 1)), nil
	}
	types := eventstore.NewTypes(eventstore.Type[formed]("formed", upcast))
	define := func(way string, o projector.Options) *projector.Projector[pgx.Tx] {
		return projector.Define(way, types, o, projector.On("form", func(ctx context.Context, tx pgx.Tx, e eventstore.Event[formed]) error {
			_, err := tx.Exec(ctx, `insert into forms values ($1, $2, $3, $4)`, way, e.ID, e.Data.Stars, string(e.Data.More))
			return err
		}))
	}
	applied := func(way string) (n int) { return count(t, db, `select count(*) from forms where way = '`+way+`'`) }
	_, stop := runListed(t, db, projector.FromLog(db), projector.RunnerConfig{}, define("log", projector.Options{}))
	patience.Until(t, func() bool { return applied("log") == len(twoForms) }, "the events of the log")
	require.NoError(t, stop())
	f := make(feed)
	_, stop = runListed(t, db, projector.Subscribe(f, "c"), projector.RunnerConfig{}, define("broker", projector.Options{Markers: true, BrokerOnly: true}))
	entries, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{}, claim.Terms{Limit: 100, Lease: time.Hour})
	require.NoError(t, err)
	for _, e := range entries {
		f.deliver(t, outbox.ToWatermill(e))
	}
	require.NoError(t, stop())
	require.Equal(t, len(twoForms), applied("broker"))
	rows, err := db.Pool().Query(t.Context(), `select way || ': ' || string_agg(distinct l.stars || ' ' || l.more, ', ') from forms l
		group by id, way having way = 'none' or exists (
			select from forms o where o.id = l.id and (o.stars, o.more) is distinct from (min(l.stars), min(l.more))) order by id`)
	require.NoError(t, err)
	differ, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, differ)
}

// A step's result is the same when it was just returned as when it was read again.
// Promise: T3.1
func TestAStepsResultHasOneForm(t *testing.T) {
	t.Parallel()
	db := postgrestest.Open(t, nil)
	var mu sync.Mutex
	sent := map[string][]string{}
	kind := task.Define("t/forms", func(ctx context.Context, r *task.Run[pgx.Tx], value string) (json.RawMessage, error) {
		out, err := task.Step(ctx, r, "quote", func(context.Context, string) (json.RawMessage, error) { return json.RawMessage(value), nil }, nil)
		if err != nil {
			return nil, err
		}
		mu.Lock()
		sent[r.ID()] = append(sent[r.ID()], string(out))
		times := len(sent[r.ID()])
		mu.Unlock()
		if times == 1 {
			return nil, errors.New("the next call fails once")
		}
		return out, nil
	})
	results := func(id string) string {
		r, err := kind.Result(theTask(t, db, id))
		if err != nil {
			return ""
		}
		return string(r)
	}
	worker, err := task.NewWorker(db, task.WorkerConfig{Backoff: claim.Backoff{Base: time.Millisecond, Attempts: 5}}, kind)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- worker.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	values := twoForms[:len(twoForms)-2]
	for i, value := range values {
		enqueueTasks(t, db, kind.New(fmt.Sprint(i), value))
	}
	for i := range values {
		id := fmt.Sprint(i)
		patience.Until(t, func() bool { return theTask(t, db, id).Status == task.Done }, "task %s", id)
		mu.Lock()
		require.Len(t, sent[id], 2)
		require.Equal(t, sent[id][1], sent[id][0])
		require.Equal(t, sent[id][1], results(id))
		mu.Unlock()
	}
}
