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

func (s *memoryStore) demoRunner(src projector.Source, t *trace) (*projector.Runner, error) {
	return newDemoRunner(s.DB, src, t, memoryModel{exactPrefix}, memoryModel{controlPrefix})
}

// memoryModel writes the read models to tables with a prefix.
type memoryModel struct{ prefix string }

func (m memoryModel) add(_ context.Context, tx *memory.Model, product string, reviews, stars int) error {
	row := rating{Product: product}
	if had, ok := tx.Get(m.prefix+"ratings", product); ok {
		row = had.(rating)
	}
	row.Reviews += reviews
	row.Stars += stars
	tx.Put(m.prefix+"ratings", product, row)
	return nil
}

func (m memoryModel) put(_ context.Context, tx *memory.Model, s currentReview) error {
	tx.Put(m.prefix+"latest_reviews", eventstore.JoinID(s.Product, s.Author), s)
	return nil
}

func (m memoryModel) remove(_ context.Context, tx *memory.Model, product, author string) error {
	tx.Delete(m.prefix+"latest_reviews", eventstore.JoinID(product, author))
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
