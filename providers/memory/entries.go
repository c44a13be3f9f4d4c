package memory

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Enqueue implements outbox.Enqueuer.
func (t *Tx) Enqueue(ctx context.Context, ms ...outbox.Message) error {
	if err := t.usable(ctx); err != nil {
		return fmt.Errorf("enqueue: %w", err)
	}
	ready, err := provider.NormalizeAll(ctx, ms, t.db.cfg.MaxPayload)
	if err != nil {
		return err
	}
	now := t.db.now()
	for _, m := range ready {
		t.tx.staged.enqueue(m, now)
	}
	return nil
}

func (s *state) enqueue(m outbox.Message, now time.Time) (added bool) {
	if s.messages.has(pair(m.Topic, m.ID)) {
		return false
	}
	m.Payload = bytes.Clone(m.Payload)
	s.seq++
	e := provider.Entry{OutboxMessage: m, Seq: s.seq, Status: outbox.Pending, NextAttemptAt: now, CreatedAt: now}
	s.messages = s.messages.put(pair(m.Topic, m.ID), e.Seq)
	s.put(e)
	return true
}

func (s *state) put(e provider.Entry) {
	s.entries = s.entries.put(e.Seq, e)
	s.open, s.held = member(s.open, e.Seq, e.Status.Open()), member(s.held, e.Seq, e.Status == outbox.Held)
}

// pair joins two texts into one unambiguous key.
func pair(a, b string) string { return strconv.Itoa(len(a)) + ":" + a + b }

// first returns the first text of a pair.
func first(pair string) string {
	size, both, _ := strings.Cut(pair, ":")
	n, _ := strconv.Atoi(size)
	return both[:n]
}

// under yields the values of the pairs that begin with a.
func under[V any](t *tree[string, V], a string) iter.Seq2[string, V] {
	return func(yield func(string, V) bool) {
		for key, v := range t.from(pair(a, "")) {
			if first(key) != a || !yield(key, v) {
				return
			}
		}
	}
}

// Enqueued implements provider.Waker. Every commit that adds entries closes the channel.
func (db *Provider) Enqueued() <-chan struct{} { return db.committed.Load().added }

// Entries implements outbox.Inspector.
func (db *DB) Entries(ctx context.Context, f outbox.Filter) ([]outbox.Entry, error) {
	invalid := provider.CheckFilter(f)
	f.Limit = cmp.Or(f.Limit, 100)
	return query(ctx, db.Provider, "list entries", invalid, func(s *state, now time.Time) []provider.Entry { return s.pick(f, now) })
}

// StatusCounts implements outbox.Inspector.
func (db *DB) StatusCounts(ctx context.Context, of ...outbox.Status) (map[outbox.Status]int64, error) {
	invalid := provider.CheckFilter(provider.EntryFilter{Status: of})
	return query(ctx, db.Provider, "count entries", invalid, func(s *state, _ time.Time) map[outbox.Status]int64 {
		counts := provider.ZeroCounts(of)
		for _, e := range s.entries.from(0) {
			if _, asked := counts[e.Status]; asked {
				counts[e.Status]++
			}
		}
		return counts
	})
}

// Requeue implements outbox.Inspector.
func (db *DB) Requeue(ctx context.Context, f outbox.Filter) (n int, err error) {
	return db.change(ctx, f, []outbox.Status{outbox.Failed, outbox.Abandoned}, func(e *provider.Entry, now time.Time) error {
		if !f.Force && e.LastAttemptedAt.Before(now.Add(-db.cfg.RequeueWindow)) {
			return fmt.Errorf("entry %d: %w", e.Seq, outbox.ErrStale)
		}
		e.Status, e.Attempts, e.Suspect, e.NextAttemptAt = outbox.Pending, 0, false, now
		return nil
	})
}

// Skip implements outbox.Inspector.
func (db *DB) Skip(ctx context.Context, f outbox.Filter) (n int, err error) {
	return db.change(ctx, f, []outbox.Status{outbox.Pending, outbox.Failed, outbox.Held, outbox.Abandoned}, func(e *provider.Entry, now time.Time) error {
		e.Status, e.NextAttemptAt = outbox.Skipped, now
		return nil
	})
}

// change changes the entries that f selects, if their status is one of in.
func (db *Provider) change(ctx context.Context, f provider.EntryFilter, in []outbox.Status, to func(*provider.Entry, time.Time) error) (int, error) {
	invalid := provider.CheckFilter(f)
	if len(f.Status) > 0 {
		in = slices.DeleteFunc(in, func(s outbox.Status) bool { return !slices.Contains(f.Status, s) })
	}
	f.Status = in
	return update(ctx, db, "change entries", invalid, func(s *state, now time.Time) (n int, err error) {
		if len(in) == 0 { // to Selects, that would be all statuses
			return 0, nil
		}
		for _, e := range s.pick(f, now) {
			if err := to(&e, now); err != nil {
				return 0, err
			}
			s.put(e)
			s.releaseHeld(e.Topic, e.Key)
			n++
		}
		return n, nil
	})
}

// pick returns the entries that f selects, in order of Seq. A Limit of 0 means no limit.
func (s *state) pick(f provider.EntryFilter, now time.Time) []provider.Entry {
	var picked []provider.Entry
	for _, e := range s.entries.from(f.After + 1) {
		if !f.Selects(&e, now) {
			continue
		}
		if picked = append(picked, ownEntry(e)); len(picked) == f.Limit {
			break
		}
	}
	return picked
}

// ownEntry copies the bytes and maps of an entry, as own does for an event.
func ownEntry(e provider.Entry) provider.Entry {
	e.Payload = bytes.Clone(e.Payload)
	e.Headers = maps.Clone(e.Headers)
	return e
}

// ClaimEntries implements provider.Outbox.
func (db *Provider) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]provider.Entry, error) {
	return update(ctx, db, "claim entries", provider.CheckQuery(q), func(s *state, now time.Time) ([]provider.Entry, error) {
		taken, abandoned := q.Claim(s.openEntries, t, now)
		for _, e := range slices.Concat(taken, abandoned) {
			s.put(e)
		}
		for i := range taken {
			taken[i] = ownEntry(taken[i])
		}
		return taken, nil
	})
}

// openEntries yields the open entries in order.
func (s *state) openEntries(yield func(provider.Entry) bool) {
	for seq := range s.open.from(0) {
		e, _ := s.entries.get(seq)
		if !yield(ownEntry(e)) {
			return
		}
	}
}

// MarkEntries implements provider.Outbox.
func (db *Provider) MarkEntries(ctx context.Context, marks []outbox.Mark) ([]int64, error) {
	return update(ctx, db, "mark entries", provider.CheckMarks(marks), func(s *state, now time.Time) (late []int64, err error) {
		for _, m := range marks {
			e, ok := s.entries.get(m.Seq)
			if !ok || e.Status != outbox.Claimed || e.Token != m.Token {
				late = append(late, m.Seq)
				continue
			}
			if m.Drop {
				s.drop(e)
			} else {
				s.put(m.Apply(e, now))
			}
			if m.To == outbox.Published {
				s.releaseHeld(e.Topic, e.Key)
			}
		}
		return late, nil
	})
}

// HoldEntries implements provider.EntryMaintainer.
func (db *Provider) HoldEntries(ctx context.Context, long time.Duration, limit int) (int, error) {
	return update(ctx, db, "hold entries", nil, func(s *state, now time.Time) (int, error) {
		changed, n := provider.HoldEntries(s.openEntries, long, limit, now)
		for _, e := range changed {
			s.put(e)
		}
		return n, nil
	})
}

// releaseHeld makes the held entries of a topic and key pending.
func (s *state) releaseHeld(topic, key string) {
	for seq := range s.held.from(0) {
		if e, _ := s.entries.get(seq); e.Topic == topic && e.Key == key {
			e.Status = outbox.Pending
			s.put(e)
		}
	}
}

const deleteScan = 1000 // entries that one call scans

// DeleteEntries implements provider.EntryMaintainer.
func (db *Provider) DeleteEntries(ctx context.Context, keep outbox.EntryRetention, after int64) (n int, next int64, err error) {
	next = after
	n, err = update(ctx, db, "delete entries", nil, func(s *state, now time.Time) (n int, err error) {
		scanned := 0
		for _, e := range s.entries.from(after + 1) {
			if scanned++; scanned > deleteScan {
				return n, nil
			}
			next = e.Seq
			if keep.IsOver(&e, now) {
				s.drop(e)
				n++
			}
		}
		next = 0
		return n, nil
	})
	return n, next, err
}

func (s *state) drop(e outbox.Entry) {
	s.entries = s.entries.drop(e.Seq)
	s.open = s.open.drop(e.Seq)
	s.held = s.held.drop(e.Seq)
	s.messages = s.messages.drop(pair(e.Topic, e.ID))
}
