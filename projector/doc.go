// Package projector turns events into read models, each event exactly once.
//
// A projector is a named set of handlers over one read model. A Runner takes what a Watermill subscriber has in flight
// and applies it in units of work: one transaction, of the provider that holds the read model, over one or more
// messages. With Options.Markers (an idempotent projector, deduplication) the unit writes a marker for each message and
// handler in that same transaction. So a message that is redelivered, delivered twice at the same moment, or
// interrupted by a crash at any point takes effect once; the loser of a race waits, skips and acks.
//
// A unit that fails is undone and split. A message that fails alone is parked (a dead letter): set aside with its
// payload and the reason, and acked; never dropped. Later messages of its key wait behind it, in order. It is tried
// again from there, until it is applied, or stuck and waits for a person.
//
//	var ratings = projector.Define("product-ratings", types, projector.Options{Markers: true},
//		projector.On("posted", onPosted))
//
//	runner, err := projector.NewRunner(db, projector.Subscribe(subscriber, "review"), projector.RunnerConfig{}, ratings)
//	err = kinora.Run(ctx, runner, relay)
package projector
