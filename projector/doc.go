// Package projector applies events to read models, with Options.Markers each event exactly once.
//
// A projector is a named set of handlers of one read model. A Runner applies the messages of a
// Watermill subscriber in units of work. A unit is one transaction, in the store of the read
// model, over one or more messages. With Options.Markers (deduplication) the unit writes a marker
// for each message and handler in that transaction. So a message takes effect once, also if it is
// redelivered, delivered twice at the same moment, or interrupted by a crash. Of two concurrent
// deliveries one waits for the other, and is then skipped and acked.
//
// A unit that fails is rolled back and split. A message that fails alone is parked (as a dead
// letter): it is stored with its payload and the reason, and acked. It is never dropped. Later
// messages of its key wait behind it, in order. The runner tries the parked message again until
// it is applied. After its last attempt it is stuck, and waits for an operator.
//
//	var ratings = projector.Define("product-ratings", types, projector.Options{Markers: true},
//		projector.On("posted", onPosted))
//
//	source := projector.Subscribe(subscriber, "review")
//	runner, err := projector.NewRunner(db, source, projector.RunnerConfig{}, ratings)
//	err = kinora.Run(ctx, runner, relay)
package projector
