package main

import (
	"context"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/providers/memory"
)

// memoryStore keeps all data in this process. Only the demo uses it.
type memoryStore struct{ *memory.DB }

var _ demoStore = (*memoryStore)(nil)

func newMemory() (*memoryStore, error) {
	db, err := memory.New(&memory.Config{Route: outbox.ByCategory})
	if err != nil {
		return nil, err
	}
	return &memoryStore{db}, nil
}

func (s *memoryStore) Close() error { return nil }

// createDemoTables creates nothing: a table exists once it has a row.
func (s *memoryStore) createDemoTables(context.Context) error { return nil }

func (s *memoryStore) demoRunner(src projector.Source, t *trace) (*projector.Runner, error) {
	return newDemoRunner(s.DB, src, t, memoryModel{tables{exactPrefix}}, memoryModel{tables{controlPrefix}})
}

// memoryModel writes the read models.
type memoryModel struct{ tables }

func (m memoryModel) create(context.Context, *memory.Model) error { return nil }

func (m memoryModel) add(ctx context.Context, tx *memory.Model, product string, reviews, stars int) error {
	row := rating{Product: product}
	if had, ok := tx.Get(m.ratings(ctx), product); ok {
		row = had.(rating)
	}
	row.Reviews += reviews
	row.Stars += stars
	tx.Put(m.ratings(ctx), product, row)
	return nil
}

func (m memoryModel) put(ctx context.Context, tx *memory.Model, s currentReview) error {
	tx.Put(m.latest(ctx), eventstore.JoinID(s.Product, s.Author), s)
	return nil
}

func (m memoryModel) remove(ctx context.Context, tx *memory.Model, product, author string) error {
	tx.Delete(m.latest(ctx), eventstore.JoinID(product, author))
	return nil
}

func (s *memoryStore) ratings(_ context.Context, prefix string) ([]rating, error) {
	var all []rating
	s.View(func(m *memory.Model) {
		for _, row := range m.All(prefix + "ratings") {
			all = append(all, row.(rating))
		}
	})
	return all, nil
}
