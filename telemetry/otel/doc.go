// Package otel reports what Kinora does to OpenTelemetry, as metrics and spans.
//
//	tel, err := otel.New(otel.Config{})
//	repo, err := eventstore.NewRepository(db, types, "review", fresh, &eventstore.RepositoryConfig{OnUpdate: tel.Update})
//	relay, err := outbox.NewRelay(db, publisher, &outbox.RelayConfig{Observer: tel.Relay()})
//	runner, err := projector.NewRunner(db, source, projector.RunnerConfig{Observer: tel.Runner()}, ratings)
//	worker, err := task.NewWorker(db, task.WorkerConfig{Observer: tel.Worker()}, kinds...)
//	stop, err := tel.Watch(db, ratings)
//
// Spans follow a message: the update that appends the event, the Publish call of the relay, the unit
// that applies it, and the output of its handlers. The trace context is in the events and messages
// (eventstore.Metadata.Traceparent, the header traceparent).
//   - The span of an update is the parent of the others. If a Publish call or a unit has several
//     messages, its span is in a trace of its own, with a link to the update of each.
//   - A handler's context has the span of its unit. So the updates and calls that it makes with this
//     context belong to that span.
//   - Each message of output has a span, which is the parent of what follows.
//
// Names of metrics and attributes are those of OpenTelemetry's conventions for messaging where there
// are some. All others begin with "kinora.". docs/telemetry.md lists them. Attributes have names of
// projectors, handlers, topics, categories and kinds of tasks, and classes and codes of errors. They
// never have ids, keys, streams, headers, payloads or texts of errors.
//
// To serve the metrics to Prometheus, pass a MeterProvider that reads into OpenTelemetry's exporter for
// Prometheus.
package otel
