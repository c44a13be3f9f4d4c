// Package eventstore keeps state as events in streams.
//
// A stream is the history of one aggregate: events with contiguous versions,
// 1, 2, 3, and so on. Append adds to it at an expected version, together with
// the outbox entries that the provider's route asks for: all of it commits, or
// nothing does. Appending again what is already there succeeds without writing,
// so that a caller who lost the answer may simply ask again.
//
// The package knows no database. Providers implement Store; Types maps Go types
// to stored names; Repository loads an aggregate, lets it decide, and appends.
//
//	var types = eventstore.NewTypes(eventstore.Type[ReviewPosted]("review.posted"))
//
//	reviews, err := eventstore.NewRepository(db, types, "review", newReview, nil)
//	at, err := reviews.Update(ctx, eventstore.JoinID("42", "ann"),
//		func(r *Review) ([]any, error) { return r.Post(5) })
package eventstore
