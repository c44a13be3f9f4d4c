package main

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/providers/postgres"
)

type reviewPosted struct {
	ProductID string `json:"product_id"`
	Rating    int    `json:"rating"`
	Title     string `json:"title"`
	Body      string `json:"body"`
}

// reviewSum is an aggregate that adds up its events.
type reviewSum struct{ Count, Sum int }

// Apply implements eventstore.Aggregate.
func (r *reviewSum) Apply(event any) {
	if e, ok := event.(reviewPosted); ok {
		r.Count, r.Sum = r.Count+1, r.Sum+e.Rating
	}
}

// snapshotLines compare updates of a stream of 10,000 events, by a repository with snapshots, with
// those of streams of 100 events without snapshots.
func snapshotLines(db *postgres.DB) ([]line, error) {
	types := eventstore.NewTypes(eventstore.Type[reviewPosted]("review.posted"))
	updates := func(length int, cfg *eventstore.RepositoryConfig) (program, error) {
		repo, err := eventstore.NewRepository(db, types, "review", func(string) *reviewSum { return &reviewSum{} }, cfg)
		if err != nil {
			return program{}, err
		}
		// The stream is used for one round, in which it grows.
		id := ""
		prepare := func(ctx context.Context) error {
			id = fmt.Sprintf("%d-%s", length, uuid.NewString())
			for at := 0; at < length; at += 100 {
				if _, err := db.Append(ctx, "review-"+id, eventstore.Expected(at), posted(100)); err != nil {
					return err
				}
			}
			_, err := repo.Update(ctx, id, one) // stores the first snapshot
			return err
		}
		return program{prepare, func(ctx context.Context, _ *bed) (n int64, err error) {
			for ; ctx.Err() == nil && (length > 100 || n < 50) && err == nil; n++ {
				_, err = repo.Update(context.WithoutCancel(ctx), id, one)
			}
			return n, err
		}}, nil
	}
	ours, err1 := updates(10_000, &eventstore.RepositoryConfig{Snapshots: eventstore.Snapshots{Every: 100}})
	short, err2 := updates(100, nil)
	for _, err := range []error{err1, err2} {
		if err != nil {
			return nil, err
		}
	}
	return []line{{"snapshot/load-10k", "updates/s", "", ours, program{}, short}}, nil
}

func one(*reviewSum) ([]any, error) {
	return []any{reviewPosted{"p1", 5, "Great", "Works exactly as described."}}, nil
}
