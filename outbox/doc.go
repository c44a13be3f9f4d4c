// Package outbox keeps messages beside the events until a relay has published them.
//
// An append writes its events and, for each topic that the route names, an entry: in one transaction. A Relay
// claims entries, publishes them through any Watermill publisher outside of any transaction, and marks them.
// A message is published at least once, with the same id every time; per (topic, ordering key) the first
// publication of each entry is in order, with any number of relays. A failing key holds back only itself.
// Nothing is dropped silently: an entry whose attempts are spent is abandoned, which is visible, and its key
// waits behind it until it is requeued or skipped. Where nothing of a topic gets through, that is taken for an
// outage: the topic pauses, and no attempt is counted. docs/operations.md says what each status means to a person.
//
//	relay, err := outbox.NewRelay(db, publisher, nil)
//	err = kinora.Run(ctx, runner, relay)
package outbox
