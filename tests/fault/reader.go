package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

// wordRead, and the words behind it: the events that each projector of a reader handled, of all
// lives.
const wordRead = 64

// readerTables are the read model of a projector that reads the log.
const readerTables = `
create table %[1]slists (stream text primary key, items int[] not null, total bigint not null) with (fillfactor = 50);
create view %[1]ssums as select stream, total from %[1]slists`

const readerSQL = `
insert into %[1]slists as l (stream, items, total) values ($1, array[$2::int], $3)
on conflict (stream) do update set items = l.items || excluded.items, total = l.total + excluded.total`

func readerName(i int) string   { return fmt.Sprintf("reader-%d", i) }
func readerPrefix(i int) string { return fmt.Sprintf("reader_%d_", i) }

// readerTables creates the read models of n projectors.
func (r *run) readerTables(n int) {
	for i := range n {
		_, err := r.pool.Exec(r.suite.ctx, fmt.Sprintf(readerTables, readerPrefix(i)))
		r.must(err)
	}
}

// read runs the projectors of a reader from the log: half of them with transactions, half with
// batches.
func (w *work) read(ctx context.Context) error {
	n, err := strconv.Atoi(w.More["projectors"])
	if err != nil {
		return err
	}
	var tx []*projector.Projector[pgx.Tx]
	var batched []*projector.Projector[*pgx.Batch]
	for i := range n {
		if i%2 == 0 {
			tx = append(tx, readerOf(w, i, func(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
				_, err := tx.Exec(ctx, sql, args...)
				return err
			}))
			continue
		}
		batched = append(batched, readerOf(w, i, func(_ context.Context, b *pgx.Batch, sql string, args ...any) error {
			b.Queue(sql, args...)
			return nil
		}))
	}
	cfg := projector.RunnerConfig{
		Batch: w.Unit, Lease: w.Lease, Timeout: w.Timeout, Drain: w.Patience, LogErrors: true,
		Retry: claim.Backoff{Base: 50 * time.Millisecond, Max: time.Second, Attempts: w.Attempts},
	}
	first, err := projector.NewRunner(watchedUnits[pgx.Tx]{w.db, w.db, w.db, w}, projector.FromLog(w.db), cfg, tx...)
	if err != nil {
		return err
	}
	second, err := projector.NewRunner(watchedUnits[*pgx.Batch]{w.db.Batched(), w.db, w.db, w}, projector.FromLog(w.db), cfg, batched...)
	if err != nil {
		return err
	}
	listener, err := postgres.NewListener(w.db, &postgres.ListenerConfig{Logger: slog.Default()})
	if err != nil {
		return err
	}
	services := []kinora.Service{listener, first, second}
	if w.More["redis"] != "" {
		third, shut, err := w.readerToRedis(cfg)
		if err != nil {
			return err
		}
		defer shut()
		services = append(services, third)
	}
	go func() {
		<-first.Running()
		w.ready(second.Running())
	}()
	return kinora.Run(ctx, services...)
}

// readerOf returns the projector i of a reader. It appends to lists.
func readerOf[Tx any](w *work, i int, exec func(context.Context, Tx, string, ...any) error) *projector.Projector[Tx] {
	sql := fmt.Sprintf(readerSQL, readerPrefix(i))
	var opts projector.Options
	if only := w.More["segmentsOf"]; only == "" || only == strconv.Itoa(i) {
		opts.Segments, _ = strconv.Atoi(w.More["segments"])
	}
	return defined(w, readerName(i), opts, func(ctx context.Context, tx Tx, e eventstore.Event[moved]) ([]outbox.Message, error) {
		w.status.add(wordRead+i, 1)
		if err := w.readerFails(i, e); err != nil {
			return nil, err
		}
		if err := exec(ctx, tx, sql, e.Data.Stream, e.Data.N, e.Data.Amount); err != nil {
			return nil, err
		}
		return nil, recordLag(ctx, w, tx, exec, readerName(i), e)
	})
}

// watchedUnits is a provider that counts open units: a kill counts while there is one.
type watchedUnits[Tx any] struct {
	provider.Provider[Tx]
	provider.ReadyChecker
	provider.Operations // without it, no other process knows that this one is alive
	w                   *work
}

// Do implements provider.Units.
func (p watchedUnits[Tx]) Do(ctx context.Context, u provider.Unit, run func(context.Context, Tx, provider.Found) (provider.Closing, error)) error {
	p.w.status.add(wordOpen, 1)
	if p.w.Role == building && u.Reader != nil && u.Generation > 1 {
		p.w.status.add(wordReads, 1)
	}
	err := p.Provider.Do(ctx, u, run)
	p.w.status.add(wordOpen, -1)
	switch {
	case errors.Is(err, provider.ErrFenced):
		p.w.status.add(wordLate, 1)
		p.w.trace.printf("fenced %s", u.Projector)
	case err != nil:
		p.w.trace.printf("failed %s %v", u.Projector, err)
	}
	return err
}

// readerPoisons maps a projector to the stream that has its poison, and to what the handler does.
var readerPoisons = map[int]struct {
	stream string
	do     func() error
}{
	0: {"account-10.0", func() error { return errPoison }},
	1: {"account-11.0", func() error { panic(errPoison) }},
	2: {"account-12.0", func() error { os.Exit(poisonStatus); return nil }},
}

var errNow = errors.New("temporary failure")

// readerFails makes handlers fail: one event in as many as More["failsOneIn"] now and then, and the
// poison always.
func (w *work) readerFails(i int, e eventstore.Event[moved]) error {
	if oneIn, _ := strconv.Atoi(w.More["failsOneIn"]); oneIn > 0 && rand.IntN(oneIn) == 0 {
		return errNow
	}
	if p, ok := readerPoisons[i]; ok && w.More["poison"] != "" && e.Data.Stream == p.stream && e.Data.N == poisonN {
		w.trace.printf("start %s", e.ID)
		return p.do()
	}
	return nil
}
