package memory

import (
	"cmp"
	"context"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// ReadLog implements provider.LogReader.
func (db *DB) ReadLog(ctx context.Context, from eventstore.From, f eventstore.LogFilter) iter.Seq2[eventstore.Raw, error] {
	return provider.ReadLog(ctx, db, from, f)
}

// Appended implements provider.LogWaker. Every commit that adds events closes the channel.
func (db *Provider) Appended() <-chan struct{} { return db.committed.Load().appended }

// LogID implements provider.Log. A store has no copies, so Branch is empty.
func (db *Provider) LogID(ctx context.Context) (provider.LogID, error) {
	return provider.LogID{Lineage: db.lineage}, ctx.Err()
}

// LogPage implements provider.Log. Every committed event is settled.
func (db *Provider) LogPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	return query(ctx, db, "read the log", provider.CheckLogQuery(q), func(s *state, now time.Time) provider.LogPage {
		return q.Page(s.after(q.After), s.position, now)
	})
}

// after yields the events behind a position.
func (s *state) after(position int64) iter.Seq[eventstore.Raw] {
	return func(yield func(eventstore.Raw) bool) {
		if position == math.MaxInt64 {
			return
		}
		for _, e := range s.log.from(position + 1) {
			if !yield(own(e)) {
				return
			}
		}
	}
}

func logPlace(e eventstore.Raw) provider.LogPlace {
	return provider.LogPlace{Position: e.Position, ID: e.ID, RecordedAt: e.RecordedAt}
}

// LogPosition implements provider.Log.
func (db *Provider) LogPosition(ctx context.Context, from eventstore.From) (int64, error) {
	s := db.committed.Load()
	position, err := provider.PositionIn(from, s.position, s.after(0))
	return position, cmp.Or(err, ctx.Err())
}

// LogStreams implements provider.Log.
func (db *Provider) LogStreams(ctx context.Context, versions map[string]int64, after int64) ([]eventstore.Raw, error) {
	return query(ctx, db, "read streams of the log", nil, func(s *state, _ time.Time) (found []eventstore.Raw) {
		for stream, last := range versions {
			events, _ := s.streams.get(stream)
			for version := last; version > 0; version-- {
				e, ok := events.get(version)
				if !ok || e.Position <= after {
					break
				}
				found = append(found, own(e))
			}
		}
		slices.SortFunc(found, func(a, b eventstore.Raw) int { return cmp.Compare(a.Position, b.Position) })
		return found
	})
}

// LogEvents implements provider.Log.
func (db *Provider) LogEvents(ctx context.Context, ids []string) (map[string]eventstore.Raw, error) {
	return query(ctx, db, "read events by id", nil, func(s *state, _ time.Time) map[string]eventstore.Raw { return byID(s, ids, own) })
}

// byID returns the values of ask for the events with these ids.
func byID[V any](s *state, ids []string, ask func(eventstore.Raw) V) map[string]V {
	found := map[string]V{}
	for _, id := range ids {
		if at, ok := s.places.get(id); ok {
			e, _ := s.log.get(at.Position)
			found[id] = ask(e)
		}
	}
	return found
}

// LogPlaces implements provider.Log.
func (db *Provider) LogPlaces(ctx context.Context, ids []string) (map[string]provider.LogPlace, error) {
	return query(ctx, db, "find events by id", nil, func(s *state, _ time.Time) map[string]provider.LogPlace { return byID(s, ids, logPlace) })
}
