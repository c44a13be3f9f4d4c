// Package projector applies events to read models, each event exactly once.
//
// A projector is a named set of handlers of one read model. A Runner applies events in units of
// work. A unit is one transaction, in the store of the read model, over one or more events.
//
// The source of a runner is the log (FromLog) or a broker (Subscribe, SubscribeEach). From the log,
// a projector gets all events from Options.From on, and then each new one. The unit also moves the
// checkpoint of the projector, so an event takes effect once.
//
// A broker may deliver a message twice, or never. With Options.Markers (deduplication) the unit
// writes a marker for each message and handler. So a message takes effect once, also if it is
// redelivered, delivered twice at the same moment, or interrupted by a crash. The runner also reads
// the log, RunnerConfig.Grace behind its end, and applies the events that were not delivered. A new
// projector first catches up with the log. Projector.Lag returns how far a projector is.
//
// A message of other software, in another form than that of package outbox, is decoded by
// RunnerConfig.Decode. Package decode has decoders for JSON, Watermill's CQRS component and
// CloudEvents.
//
// A unit that fails is rolled back and split. A message that fails alone is parked (as a dead
// letter): it is stored with its payload and the reason, and acked. It is never dropped. Later
// messages of its key wait behind it, in order. The runner tries the parked message again until
// it is applied. After its last attempt it is stuck, and waits for an operator. A message that this
// program is unable to apply, because it lacks its type or schema version, waits for a program that has it.
//
// A read model can be rebuilt from the log: in place, or in new tables that take the place of the
// old ones in one transaction (BlueGreen). Each rebuild makes a new generation of the read model. It
// is requested with Runner.Rebuild or RequestRebuild, or by a program with a higher Options.Version.
// Projector.Generations returns the progress, Control pauses, cancels or promotes a generation, and
// Projector.Verify compares the live read model with one that is made from the log. Forget deletes what
// is stored of a projector that no program has any more, and keeps one from beginning again until Release.
//
// A service that has a Watermill router keeps it: the router passes its messages to Runner.Handle
// (FromRouter), or a plain handler gets a marker and a transaction from Middleware.
//
//	var ratings = projector.Define("product-ratings", types, projector.Options{},
//		projector.On("posted", onPosted))
//
//	runner, err := projector.NewRunner(db, projector.FromLog(db), projector.RunnerConfig{}, ratings)
//	err = kinora.Run(ctx, runner)
package projector
