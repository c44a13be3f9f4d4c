package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
)

// The projectors whose read models are rebuilt. Others, with names that begin with readName, read the
// log too.
const (
	heardName = "heard" // takes deliveries
	readName  = "logged"
	naiveName = "naive" // takes deliveries, and is rebuilt by hand: see rebuildByHand
)

// Words of a builder's status.
const (
	wordAsk    = 70 // what to request, set by the suite: see askWord
	wordAnswer = 71 // the last value of wordAsk that was answered
	wordNumber = 72 // the number of the generation in the answer; -1 after an error
	wordReads  = 73 // units of the readers of later generations, of all lives
)

// askWord returns the word of a request: its number, its projector, and how to rebuild.
func askWord(number int64, name string, how projector.RebuildHow) int64 {
	word := number<<8 | int64(how)
	if name == readName {
		word |= 1 << 7
	}
	return word
}

// versionStep is the difference between what two versions of the handlers write for an event.
const versionStep = 1_000_000

// callsTable has a row for each event that a handler did not replay: its calls of other systems.
const callsTable = `create table calls (projector text not null, stream text not null, n int not null)`

const (
	createSums  = `create table %s (stream text primary key, total bigint not null) with (fillfactor = 50)`
	createLists = `create table %s (stream text primary key, items int[] not null) with (fillfactor = 50)`
	builtSQL    = `
with s as (
	insert into %[1]s as s (stream, total) values ($1, $3)
	on conflict (stream) do update set total = s.total + excluded.total)
insert into %[2]s as l (stream, items) values ($1, array[$2::int])
on conflict (stream) do update set items = l.items || excluded.items`
)

// betweenStatements is the point between two statements of a handler.
const betweenStatements = "handler: between its statements"

// execFunc executes a statement of a handler.
type execFunc[Tx any] = func(ctx context.Context, tx Tx, sql string, args ...any) error

func execTx(ctx context.Context, tx pgx.Tx, sql string, args ...any) error {
	_, err := tx.Exec(ctx, sql, args...)
	return err
}

func execBatch(_ context.Context, b *pgx.Batch, sql string, args ...any) error {
	b.Queue(sql, args...)
	return nil
}

func (w *work) version() int {
	version, _ := strconv.Atoi(w.More["version"])
	return max(version, 1)
}

// builtOf returns a projector that appends to lists, as its version does.
func builtOf[Tx any](w *work, name string, exec execFunc[Tx]) *projector.Projector[Tx] {
	version, sums, lists := w.version(), name+"_sums", name+"_lists"
	opts := projector.Options{Markers: true, Version: version, RebuildOnChange: projector.BlueGreen, Tables: []string{sums, lists}}
	apply := func(ctx context.Context, tx Tx, e eventstore.Event[moved]) ([]outbox.Message, error) {
		if !projector.Replaying(ctx) {
			if err := exec(ctx, tx, `insert into calls values ($1, $2, $3)`, name, e.Data.Stream, e.Data.N); err != nil {
				return nil, err
			}
			crash.Point(betweenStatements)
		}
		return nil, exec(ctx, tx, fmt.Sprintf(builtSQL, projector.Table(ctx, sums), projector.Table(ctx, lists)),
			e.Data.Stream, e.Data.N+(version-1)*versionStep, e.Data.Amount*int64(version))
	}
	return defined(w, name, opts, apply,
		projector.OnCreate(func(ctx context.Context, tx Tx) error {
			if err := exec(ctx, tx, fmt.Sprintf(createSums, projector.Table(ctx, sums))); err != nil {
				return err
			}
			crash.Point(betweenStatements)
			return exec(ctx, tx, fmt.Sprintf(createLists, projector.Table(ctx, lists)))
		}))
}

// build runs the projectors of a builder, and requests rebuilds when the suite asks for it.
func (w *work) build(ctx context.Context) error {
	if w.Batched {
		return buildWith(ctx, w, watchedUnits[*pgx.Batch]{w.db.Batched(), w.db, w.db, w}, execBatch)
	}
	return buildWith(ctx, w, watchedUnits[pgx.Tx]{w.db, w.db, w.db, w}, execTx)
}

func (w *work) buildConfig() projector.RunnerConfig {
	return projector.RunnerConfig{
		Concurrency: w.Concurrency, Batch: w.Unit, Lease: w.Lease, Timeout: w.Timeout, Drain: w.Patience, LogErrors: true,
		Retry: claim.Backoff{Base: 50 * time.Millisecond, Max: time.Second, Attempts: w.Attempts}, Grace: time.Second, Log: w.db,
	}
}

func buildWith[Tx any](ctx context.Context, w *work, units provider.Units[Tx], exec execFunc[Tx]) error {
	if w.More["verify"] != "" {
		return verifyWith(ctx, w, units, builtOf(w, w.More["built"], exec))
	}
	var heard, read []*projector.Projector[Tx]
	for _, name := range strings.Split(w.More["built"], ",") {
		switch name {
		case naiveName:
			heard = append(heard, projector.Define(name, types, projector.Options{Markers: true},
				projector.On(movedAs, func(ctx context.Context, tx Tx, e eventstore.Event[moved]) error {
					return exec(ctx, tx, fmt.Sprintf(builtSQL, name+"_sums", name+"_lists"), e.Data.Stream, e.Data.N, e.Data.Amount)
				})))
		case heardName:
			heard = append(heard, builtOf(w, name, exec))
		default:
			read = append(read, builtOf(w, name, exec))
		}
	}
	var services []kinora.Service
	var last *projector.Runner
	add := func(src projector.Source, ps []*projector.Projector[Tx]) error {
		if len(ps) == 0 {
			return nil
		}
		r, err := projector.NewRunner(units, src, w.buildConfig(), ps...)
		services, last = append(services, r), r
		return err
	}
	sub := &subscriber{socket: w.Socket, name: w.Name, group: w.Group, acking: func(string) {}}
	if err := add(projector.Subscribe(sub, category), heard); err != nil {
		return err
	}
	if err := add(projector.FromLog(w.db), read); err != nil {
		return err
	}
	w.ready(last.Running())
	go w.answer(ctx)
	return kinora.Run(ctx, services...)
}

// answer requests a rebuild each time that the suite asks for one.
func (w *work) answer(ctx context.Context) {
	rate, _ := strconv.Atoi(w.More["rate"])
	for done := w.status.get(wordAsk); ctx.Err() == nil; pause(ctx, time.Millisecond) {
		ask := w.status.get(wordAsk)
		if ask == done {
			continue
		}
		name := heardName
		if ask&(1<<7) != 0 {
			name = readName
		}
		how := projector.RebuildHow(ask & 0x7f)
		n, err := projector.RequestRebuild(ctx, w.db, name, projector.Rebuild{How: how, Rate: rate, Decision: bySuite})
		if w.trace.printf("requested %s %s: %d %v", how, name, n, err); err != nil {
			n = -1
		}
		w.status.set(wordNumber, int64(n))
		w.status.set(wordAnswer, ask)
		done = ask
	}
}

var bySuite = projector.Decision{By: "suite", Reason: "a test"}

// verifyWith runs Verify once, and writes the result to a file.
func verifyWith[Tx any](ctx context.Context, w *work, units provider.Units[Tx], p *projector.Projector[Tx]) error {
	v := projector.Verification{}
	if w.More["verify"] == "repair" {
		v.Repair = bySuite
	}
	cfg := w.buildConfig()
	cfg.Lease *= 5
	result, err := p.Verify(ctx, units, v, &cfg)
	// A message may be parked for a while after a kill, and on a busy machine the lease, or a wait for open units, may end.
	again := func() bool {
		return errors.Is(err, projector.ErrGeneration) || provider.ClassOf(err) == projector.ClassTransient
	}
	for begin := time.Now(); err != nil && again() && time.Since(begin) < w.Patience/2; pause(ctx, 100*time.Millisecond) {
		result, err = p.Verify(ctx, units, v, &cfg)
	}
	if err != nil {
		slog.Error("not verified", "err", err)
		return err
	}
	text, err := json.Marshal(result)
	if err != nil {
		return err
	}
	w.status.set(wordReady, 1)
	return os.WriteFile(filepath.Join(w.Dir, fmt.Sprintf("verified-%s-%d", w.Name, w.Life)), text, 0o600)
}

// verified waits for the end of a verifier, and returns its result.
func (r *run) verified(p *process) *projector.Verified {
	ended := p.life()
	r.await("the end of "+p.Name, func() bool { return isClosed(ended) })
	text, err := os.ReadFile(filepath.Join(r.dir, fmt.Sprintf("verified-%s-%d", p.Name, p.Life)))
	r.must(err)
	result := &projector.Verified{}
	r.must(json.Unmarshal(text, result))
	return result
}

// fromVersion returns the items of a list of a version as those of the first one. It returns false if
// the items are not all of one version.
func fromVersion(items []int) (own []int, version int, ok bool) {
	if len(items) == 0 {
		return nil, 1, true
	}
	version = items[0]/versionStep + 1
	own = slices.Clone(items)
	for i := range own {
		ok := own[i]/versionStep+1 == version
		if own[i] -= (version - 1) * versionStep; !ok {
			return own, version, false
		}
	}
	return own, version, true
}
