// Package projector turns events into read models, each event exactly once.
//
// A projector is a named set of handlers over one read model. A Runner consumes messages from any Watermill
// subscriber and runs each handler in a unit of work: one transaction of the provider that holds the read
// model. With Options.Markers, which is what others call an idempotent projector, the unit writes a marker
// (message id, handler) first, in that same transaction. So a message that is redelivered, delivered twice at
// the same moment, or interrupted by a crash at any point takes effect once; the loser of a race waits, skips
// and acks.
//
// What cannot be handled is parked: set aside with its payload and the reason, and acked; never dropped.
//
//	var ratings = projector.Define("product-ratings", types, projector.Options{Markers: true},
//		projector.On("posted", onPosted))
//
//	runner, err := projector.NewRunner(db, projector.Subscribe(subscriber, "review"), nil, ratings)
//	err = kinora.Run(ctx, runner, relay)
package projector
