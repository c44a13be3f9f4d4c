// Package eventstore keeps state as events in streams.
//
// A stream is the history of one aggregate: events with contiguous versions,
// 1, 2, 3, and so on. Append adds events at an expected version, together with
// the outbox entries of the provider's route: all of it commits, or nothing
// does. Appending the same events again succeeds without writing, so a caller
// who did not get the reply repeats the call.
//
// The events of all streams form the log, in the order of their positions. Log reads it from a
// position or a time on, by category and type, and skips no event.
//
// The package does not depend on a database. Providers implement Store. Types
// maps Go types to stored names. Repository loads an aggregate, calls a function
// that decides, and appends the events that it returns. goldentest.Check tests that a changed type
// still reads the events that are stored.
//
//	var types = eventstore.NewTypes(eventstore.Type[ReviewPosted]("review.posted"))
//
//	reviews, err := eventstore.NewRepository(db, types, "review", newReview, nil)
//	at, err := reviews.Update(ctx, eventstore.JoinID("42", "ann"),
//		func(r *Review) ([]any, error) { return r.Post(5) })
package eventstore
