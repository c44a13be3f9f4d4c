package main

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kinora-go/kinora"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

// watchedOutbox traces claims and marks, and records which claimed entries are not marked yet.
type watchedOutbox struct {
	*postgres.DB
	w    *work
	mu   sync.Mutex
	held map[int64]time.Time // end of the claim, by Seq
}

// hold adds and removes held entries, and drops those whose claim has expired.
func (o *watchedOutbox) hold(until time.Time, more, less []int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, seq := range more {
		o.held[seq] = until
	}
	for _, seq := range less {
		delete(o.held, seq)
	}
	maps.DeleteFunc(o.held, func(_ int64, until time.Time) bool { return time.Now().After(until) })
	o.w.status.set(wordOpen, int64(len(o.held)))
}

// ClaimEntries implements provider.Outbox.
func (o *watchedOutbox) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]outbox.Entry, error) {
	asked, until := machineTime(), time.Now().Add(t.Lease)
	entries, err := o.DB.ClaimEntries(ctx, q, t)
	var seqs []int64
	for _, e := range entries {
		seqs = append(seqs, e.Seq)
		o.w.trace.printf("claimed %d %s %d %d %s", e.Seq, e.Token, asked, e.LastAttemptedAt.UnixMicro(), e.ID)
	}
	o.hold(until, seqs, nil)
	return entries, err
}

// MarkEntries implements provider.Outbox. It stops counting the entries as held before it marks them,
// so a later kill does not count.
func (o *watchedOutbox) MarkEntries(ctx context.Context, marks []outbox.Mark) ([]int64, error) {
	var renewed, final []int64
	asked, until := machineTime(), time.Now().Add(o.w.Lease)
	for _, m := range marks {
		if m.To == outbox.Claimed {
			renewed = append(renewed, m.Seq)
			continue
		}
		final = append(final, m.Seq)
		o.w.trace.printf("marking %d %s %d %s", m.Seq, m.Token, asked, m.To)
	}
	o.hold(until, renewed, final)
	late, err := o.DB.MarkEntries(ctx, marks)
	if err != nil {
		return late, err
	}
	o.w.status.add(wordDone, int64(len(final)))
	o.w.status.add(wordLate, int64(len(late)))
	for _, m := range marks {
		what := "marked"
		if slices.Contains(late, m.Seq) {
			what = "late"
		}
		o.w.trace.printf("%s %d %s %d %s", what, m.Seq, m.Token, asked, m.To)
	}
	return late, nil
}

func (w *work) relay(ctx context.Context) error {
	listener, err := postgres.NewListener(w.db, nil)
	if err != nil {
		return err
	}
	pub := &publisher{socket: w.Socket, name: w.Name}
	defer func() { _ = pub.Close() }()
	relay, err := outbox.NewRelay(&watchedOutbox{DB: w.db, w: w, held: map[int64]time.Time{}}, pub, &outbox.RelayConfig{
		Batch: w.Batch, Lease: w.Lease, Poll: 100 * time.Millisecond, Drain: w.Patience, Holder: w.Name, OrderedPublisher: w.Ordered, LogErrors: true,
		Backoff: claim.Backoff{Base: 50 * time.Millisecond, Max: time.Second, Attempts: w.Attempts},
	})
	if err != nil {
		return err
	}
	w.ready(relay.Running())
	return kinora.Run(ctx, listener, relay)
}
