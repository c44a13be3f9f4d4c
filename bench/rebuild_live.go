package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

// The rebuild goes on and is paused by turns, which are short, so that other programs on the machine
// change both times alike.
const (
	turnsEach = 3 // of each kind, per round
	turn      = 3 * time.Second
)

// timed measures the time from the beginning of an append to the commit in the first generation.
type timed struct {
	*postgres.Batched
	began sync.Map // by the event's id
	mu    sync.Mutex
	times []time.Duration
}

// Do implements provider.Units.
func (t *timed) Do(ctx context.Context, u provider.Unit, run func(context.Context, *pgx.Batch, provider.Found) (provider.Closing, error)) error {
	var left []bool
	err := t.Batched.Do(ctx, u, func(ctx context.Context, b *pgx.Batch, found provider.Found) (provider.Closing, error) {
		left = found.Left
		return run(ctx, b, found)
	})
	if err != nil || u.Build().Number() > 1 {
		return err
	}
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	for i, m := range u.Messages {
		if left != nil && left[i] {
			continue
		}
		if began, ok := t.began.LoadAndDelete(m.ID); ok {
			t.times = append(t.times, now.Sub(began.(time.Time)))
		}
	}
	return nil
}

// take returns the times since the last call.
func (t *timed) take() []time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	times := t.times
	t.times = nil
	return times
}

// feed is a broker in memory that delivers each event once.
type feed chan *message.Message

func (f feed) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	to := make(chan *message.Message)
	go func() {
		defer close(to)
		for {
			select {
			case m := <-f:
				select {
				case to <- m:
				case <-ctx.Done():
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return to, nil
}

func (feed) Close() error { return nil }

func besideName(broker bool) string {
	if broker {
		return "rebuild/live-p99-broker"
	}
	return "rebuild/live-p99-log"
}

// besideRebuild measures the 99th percentile of the time from an append to its commit in the live
// read model, with and without a rebuild of 1,000,000 events in the same process. Lower is better.
func besideRebuild(ctx context.Context, b *bed, broker bool, rounds int) (result, error) {
	res := result{Name: besideName(broker), Unit: "ms (lower is better)", Rounds: rounds}
	mode, opts := provider.ModeCatchUp, projector.Options{}
	if broker {
		mode, opts = provider.ModeLive, projector.Options{Markers: true}
	}
	r, err := newRebuildBed(ctx, b, "rebuilt_live", logEvents)
	if err != nil {
		return res, err
	}
	if err := r.filled(ctx, mode); err != nil {
		return res, err
	}
	store, from := &timed{Batched: r.db.Batched()}, make(feed, 1000)
	src := projector.FromLog(r.db)
	if broker {
		src = projector.Subscribe(from, "rated")
	}
	runner, err := projector.NewRunner(store, src, projector.RunnerConfig{Logger: slog.New(slog.DiscardHandler)}, built(opts, queue))
	if err != nil {
		return res, err
	}
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- runner.Run(running) }()
	<-runner.Running()
	usual, busy, speed, err := r.byTurns(ctx, turnsEach*rounds, func() ([]time.Duration, error) {
		return r.latencies(ctx, store, from, broker)
	})
	if err != nil {
		return res, err
	}
	stop()
	res.Ours, res.Limit = percentile(busy, 0.99), percentile(usual, 0.99)
	res.VsLimit = res.Ours / res.Limit
	slog.Info("rebuilt beside live deliveries", "name", res.Name, "events_per_second", int(speed), "samples", len(busy),
		"usual_p50", percentile(usual, 0.5), "usual_p95", percentile(usual, 0.95), "beside_p50", percentile(busy, 0.5), "beside_p95", percentile(busy, 0.95))
	return res, <-ended
}

// byTurns calls measure while a rebuild goes on, and while it is paused, and cancels the rebuild. It
// returns the events per second of the rebuild.
func (r *rebuildBed) byTurns(ctx context.Context, turns int, measure func() ([]time.Duration, error)) (usual, busy []time.Duration, speed float64, err error) {
	n, err := projector.RequestRebuild(ctx, r.db, "built", asked(projector.BlueGreen))
	if err != nil {
		return nil, nil, 0, err
	}
	build := provider.Build{Projector: "built", Generation: n}
	at := provider.Checkpoint{}
	for ; at.Place.Position == 0; time.Sleep(10 * time.Millisecond) {
		if at, err = r.db.Checkpoint(ctx, build); err != nil {
			return nil, nil, 0, err
		}
	}
	control := func(a projector.GenerationAction) error {
		return projector.Control(ctx, r.db, "built", n, a, asked(0).Decision)
	}
	var took time.Duration
	for range turns {
		for _, action := range []projector.GenerationAction{projector.Pause, projector.Resume} {
			if err := control(action); err != nil {
				return nil, nil, 0, err
			}
			time.Sleep(turn / 6) // until the runner has seen that
			began, from := time.Now(), at.Place.Position
			times, err := measure()
			if err == nil {
				at, err = r.db.Checkpoint(ctx, build)
			}
			switch done := at.Place.Position - from; {
			case err != nil:
				return nil, nil, 0, err
			case action == projector.Pause:
				usual = append(usual, times...)
			default:
				busy, took, speed = append(busy, times...), took+time.Since(began), speed+float64(done)
			}
		}
	}
	if at.Place.Position >= int64(r.events) {
		return nil, nil, 0, errors.New("the rebuild has ended before the measurement")
	}
	return usual, busy, speed / took.Seconds(), control(projector.Cancel)
}

// latencies appends events for a turn, and returns the time of each until its commit in the
// live read model.
func (r *rebuildBed) latencies(ctx context.Context, store *timed, from feed, broker bool) ([]time.Duration, error) {
	store.take()
	var mu sync.Mutex
	appended := 0
	err := r.write(ctx, turn, func(ctx context.Context, data []byte) error {
		id := uuid.Must(uuid.NewV7()).String()
		store.began.Store(id, time.Now())
		at, err := r.db.Append(ctx, "sent-"+id, eventstore.NoStream, []eventstore.Draft{{ID: id, Type: "review.posted", Schema: 1, Data: data}})
		if err != nil {
			return err
		}
		mu.Lock()
		appended++
		mu.Unlock()
		if broker {
			from <- r.delivery(id, at.Position, data)
		}
		return nil
	})
	times := store.take()
	for until := time.Now().Add(10 * time.Second); err == nil && len(times) < appended; time.Sleep(10 * time.Millisecond) {
		if times = append(times, store.take()...); time.Now().After(until) {
			err = fmt.Errorf("%d of %d events were not applied", appended-len(times), appended)
		}
	}
	return times, err
}

// delivery returns the message of an event.
func (r *rebuildBed) delivery(id string, position int64, data []byte) *message.Message {
	m := message.NewMessage(id, data)
	m.Metadata[provider.HeaderType], m.Metadata[provider.HeaderSchema] = "review.posted", "1"
	m.Metadata[provider.HeaderStream], m.Metadata[outbox.HeaderKey], m.Metadata[provider.HeaderVersion] = "sent-"+id, "sent-"+id, "1"
	m.Metadata[provider.HeaderPosition], m.Metadata[provider.HeaderLog] = strconv.FormatInt(position, 10), r.log
	m.Metadata[provider.HeaderRecordedAt] = time.Now().UTC().Format(time.RFC3339Nano)
	return m
}
