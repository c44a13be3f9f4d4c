package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

// goroutine returns the current goroutine's number, which the runtime only shows in stack traces.
func goroutine() string {
	text := make([]byte, 64)
	f := bytes.Fields(text[:runtime.Stack(text, false)])
	return string(f[1])
}

// passed records that a point was reached.
func (w *work) passed(point string) { w.trace.printf("point %s %s", goroutine(), point) }

// steps records the begin and end of statements.
type steps struct{ *work }

func (s steps) begin(sql string) {
	s.trace.printf("query %s %.300s", goroutine(), strings.Join(strings.Fields(sql), " "))
}

func (s steps) end() { s.trace.printf("result %s", goroutine()) }

// TraceQueryStart implements pgx.QueryTracer.
func (s steps) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	s.begin(q.SQL)
	return ctx
}

// TraceQueryEnd implements pgx.QueryTracer.
func (s steps) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) { s.end() }

// TraceBatchStart implements pgx.BatchTracer.
func (s steps) TraceBatchStart(ctx context.Context, _ *pgx.Conn, b pgx.TraceBatchStartData) context.Context {
	var all []string
	for _, q := range b.Batch.QueuedQueries {
		all = append(all, q.SQL)
	}
	s.begin(strings.Join(all, "; "))
	return ctx
}

// TraceBatchQuery implements pgx.BatchTracer.
func (steps) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements pgx.BatchTracer.
func (s steps) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) { s.end() }

// connect opens the database and, if the cell requires it, records its statements, or has a pool of its own that sends and
// reads text.
func (w *work) connect(ctx context.Context, dsn string, cfg *postgres.Config) (*postgres.DB, error) {
	if w.More["steps"] == "" && w.More["text"] == "" {
		return postgres.Open(ctx, dsn, cfg)
	}
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	if w.More["steps"] != "" {
		config.ConnConfig.Tracer = steps{w}
	}
	if w.More["text"] != "" {
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, err
	}
	return postgres.New(pool, cfg)
}

// shut closes the database.
func (w *work) shut() {
	w.db.Close()
	if w.More["steps"] != "" || w.More["text"] != "" {
		w.db.Pool().Close()
	}
	if w.More["steps"] != "" {
		w.trace.printf("shut")
	}
}

// fails makes handlers fail if a cell needs parked messages. Only some streams fail, so that others
// are not held: some at once, some repeatedly; replayed messages sometimes.
func (w *work) fails(m moved) error {
	switch {
	case w.More["fails"] == "", m.Stream[len(category)+1]%3 != 0:
	case w.More["replaying"] != "":
		if rand.IntN(8) == 0 {
			return errors.New("replay fails again")
		}
	case m.N%13 == 3:
		return &projector.Error{Class: projector.ClassPermanent, Code: "fault", Err: errors.New("permanent failure")}
	case m.N%13 == 7:
		return errors.New("temporary failure")
	}
	return nil
}

// output returns the handler's event again; its marker makes it a duplicate. The handler
// returns half of its output and enqueues the other half itself.
func (w *work) output(ctx context.Context, tx any, marked bool, e eventstore.Event[moved]) ([]outbox.Message, error) {
	if !marked || w.More["emits"] == "" {
		return nil, nil
	}
	data, err := json.Marshal(e.Data)
	if err != nil {
		return nil, err
	}
	d := eventstore.Draft{ID: e.ID, Type: movedAs, Schema: 1, Data: data}
	out := []outbox.Message{provider.FromEvent(e.Stream, e.Version, d, category)}
	if own, ok := tx.(pgx.Tx); ok && e.Data.N%2 == 0 {
		return nil, w.db.InTx(own).Enqueue(ctx, out...)
	}
	return out, nil
}

// replay repeatedly makes stuck messages due again, if the cell requires it, and applies them with
// runners without a source, until stop is called. It also writes the generation and drops markers.
func (w *work) replay(ctx context.Context) (stop func()) {
	if w.More["replays"] == "" {
		return func() {}
	}
	other := *w
	other.More = map[string]string{"fails": "1", "replaying": "1"}
	other.status = &status{new([statusWords]atomic.Int64)}
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	all.Go(func() {
		for round := 0; ctx.Err() == nil; round++ {
			if err := other.replayOnce(ctx, round); err != nil {
				w.trace.printf("replay %v", err)
			}
			pause(ctx, 50*time.Millisecond)
		}
	})
	return func() { cancel(); all.Wait() }
}

// liveAgain makes the live generation live again, which adds one to its revision.
func (w *work) liveAgain(ctx context.Context) error {
	all, err := w.db.Generations(ctx, exactName)
	if err != nil {
		return err
	}
	live := provider.Generation{Build: provider.Build{Projector: exactName, Generation: 1}}
	if len(all) > 0 {
		live = all[0]
	}
	live.State = provider.GenerationLive
	u := provider.Unit{Projector: exactName, Once: true, Switch: &provider.Switch{Set: []provider.Generation{live}}}
	return w.db.Do(ctx, u, func(context.Context, pgx.Tx, provider.Found) (provider.Closing, error) {
		return provider.Closing{}, nil
	})
}

func (w *work) replayOnce(ctx context.Context, round int) error {
	if round%10 == 0 {
		if err := w.liveAgain(ctx); err != nil {
			return err
		}
		if _, err := w.db.DropMarkers(ctx, exactName+"/gone", 10); err != nil {
			return err
		}
	}
	if _, err := projector.Replay(ctx, w.db, stuck(""), projector.Decision{By: "suite", Reason: "again"}); err != nil {
		return err
	}
	return newTxArms(w, &started{status: w.status, ids: map[string]bool{}}).applyParked(ctx)
}
