package bolt

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// enqueue adds a message that is not in the outbox.
func (s *session) enqueue(m outbox.Message) {
	e := outbox.Entry{OutboxMessage: m, Seq: entries.next(s), Status: outbox.Pending, NextAttemptAt: s.now, CreatedAt: s.now}
	messages.put(s, key(m.Topic, m.ID), e.Seq)
	s.putEntry(e)
}

func (s *session) putEntry(e outbox.Entry) {
	entries.put(s, key(e.Seq), e)
	if e.Status.Open() {
		open.put(s, key(e.Seq), true)
		queues.put(s, key(e.Topic, e.Key, e.Seq), true)
	} else {
		s.close(e)
	}
}

func (s *session) close(e outbox.Entry) {
	open.drop(s, key(e.Seq))
	queues.drop(s, key(e.Topic, e.Key, e.Seq))
}

func (s *session) dropEntry(e outbox.Entry) {
	entries.drop(s, key(e.Seq))
	messages.drop(s, key(e.Topic, e.ID))
	s.close(e)
}

// allOpen yields the open entries in order.
func (s *session) allOpen(yield func(outbox.Entry) bool) {
	for k := range open.under(s, nil) {
		if e, _ := entries.get(s, k); !yield(e) {
			return
		}
	}
}

// ClaimEntries is the portable claim, in one transaction.
func (db *DB) ClaimEntries(ctx context.Context, q provider.EntryQuery, t claim.Terms) ([]outbox.Entry, error) {
	return update(ctx, db, "claim entries", provider.CheckQuery(q), func(s *session) ([]outbox.Entry, error) {
		return claim.Portable(ctx, t,
			func(_ context.Context, limit int) ([]outbox.Entry, error) {
				return q.Candidates(s.allOpen, limit, s.now), nil
			},
			func(_ context.Context, e outbox.Entry, t claim.Terms) (outbox.Entry, bool, error) {
				if !q.Unordered && s.passes(e, t.Token) {
					return e, false, nil
				}
				e, ok := q.Take(e, t, s.now)
				s.putEntry(e)
				return e, ok, nil
			},
			outbox.Entry.Alone)
	})
}

// passes reports whether an earlier open entry of the key of e is not claimed with token.
func (s *session) passes(e outbox.Entry, token claim.Token) bool {
	for k := range queues.under(s, key(e.Topic, e.Key)) {
		if number(k) == e.Seq {
			break
		}
		if before, _ := entries.get(s, key(number(k))); before.Status != outbox.Claimed || before.Token != token {
			return true
		}
	}
	return false
}

func (db *DB) MarkEntries(ctx context.Context, marks []outbox.Mark) ([]int64, error) {
	return update(ctx, db, "mark entries", provider.CheckMarks(marks), func(s *session) (late []int64, err error) {
		for _, m := range marks {
			e, ok := entries.get(s, key(m.Seq))
			if !ok || e.Status != outbox.Claimed || e.Token != m.Token {
				late = append(late, m.Seq)
				continue
			}
			if m.Drop {
				s.dropEntry(e)
			} else {
				s.putEntry(m.Apply(e, s.now))
			}
			if m.To == outbox.Published {
				s.releaseHeld(e)
			}
		}
		return late, nil
	})
}

// releaseHeld makes the held entries of the topic and key of e pending.
func (s *session) releaseHeld(e outbox.Entry) {
	for k := range queues.under(s, key(e.Topic, e.Key)) {
		if held, _ := entries.get(s, key(number(k))); held.Status == outbox.Held {
			held.Status = outbox.Pending
			s.putEntry(held)
		}
	}
}

func (db *DB) HoldEntries(ctx context.Context, long time.Duration, limit int) (int, error) {
	return update(ctx, db, "hold entries", nil, func(s *session) (int, error) {
		changed, n := provider.HoldEntries(s.allOpen, long, limit, s.now)
		for _, e := range changed {
			s.putEntry(e)
		}
		return n, nil
	})
}

func (db *DB) DeleteEntries(ctx context.Context, keep outbox.EntryRetention, after int64) (n int, next int64, err error) {
	next, err = update(ctx, db, "delete entries", nil, func(s *session) (next int64, err error) {
		scanned := 0
		for _, e := range entries.from(s, nil, key(after+1)) {
			if scanned++; scanned > 1000 {
				return next, nil
			}
			next = e.Seq
			if keep.IsOver(&e, s.now) {
				s.dropEntry(e)
				n++
			}
		}
		return 0, nil
	})
	if err != nil {
		return 0, after, err
	}
	return n, next, nil
}

func (db *DB) Entries(ctx context.Context, f outbox.Filter) ([]outbox.Entry, error) {
	f.Limit = cmp.Or(f.Limit, 100)
	return query(ctx, db, "list entries", provider.CheckFilter(f), func(s *session) []outbox.Entry { return s.pick(f) })
}

// pick returns the entries that f selects. A Limit of 0 means no limit.
func (s *session) pick(f outbox.Filter) (picked []outbox.Entry) {
	for _, e := range entries.from(s, nil, key(max(f.After, 0)+1)) {
		if !f.Selects(&e, s.now) {
			continue
		}
		if picked = append(picked, e); len(picked) == f.Limit {
			break
		}
	}
	return picked
}

func (db *DB) StatusCounts(ctx context.Context, of ...outbox.Status) (map[outbox.Status]int64, error) {
	return query(ctx, db, "count entries", provider.CheckFilter(outbox.Filter{Status: of}), func(s *session) map[outbox.Status]int64 {
		counts := provider.ZeroCounts(of)
		for _, e := range s.pick(outbox.Filter{Status: of}) {
			counts[e.Status]++
		}
		return counts
	})
}

func (db *DB) Requeue(ctx context.Context, f outbox.Filter) (int, error) {
	return db.change(ctx, f, []outbox.Status{outbox.Failed, outbox.Abandoned}, func(s *session, e *outbox.Entry) error {
		if !f.Force && e.LastAttemptedAt.Before(s.now.Add(-db.cfg.RequeueWindow)) {
			return fmt.Errorf("entry %d: %w", e.Seq, outbox.ErrStale)
		}
		e.Status, e.Attempts, e.Suspect, e.NextAttemptAt = outbox.Pending, 0, false, s.now
		return nil
	})
}

func (db *DB) Skip(ctx context.Context, f outbox.Filter) (int, error) {
	return db.change(ctx, f, []outbox.Status{outbox.Pending, outbox.Failed, outbox.Held, outbox.Abandoned}, func(s *session, e *outbox.Entry) error {
		e.Status, e.NextAttemptAt = outbox.Skipped, s.now
		return nil
	})
}

// change changes the entries that f selects, if their status is one of in.
func (db *DB) change(ctx context.Context, f outbox.Filter, in []outbox.Status, to func(*session, *outbox.Entry) error) (int, error) {
	invalid := provider.CheckFilter(f)
	if len(f.Status) > 0 {
		in = slices.DeleteFunc(in, func(status outbox.Status) bool { return !slices.Contains(f.Status, status) })
	}
	if f.Status = in; len(in) == 0 {
		return 0, cmp.Or(invalid, ctx.Err())
	}
	return update(ctx, db, "change entries", invalid, func(s *session) (int, error) {
		picked := s.pick(f)
		for _, e := range picked {
			if err := to(s, &e); err != nil {
				return 0, err
			}
			s.putEntry(e)
			s.releaseHeld(e)
		}
		return len(picked), nil
	})
}
