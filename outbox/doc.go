// Package outbox stores messages together with the events until a relay has published them.
//
// An append writes its events and, for each topic that the route returns, an entry in the same
// transaction. A Relay claims entries, publishes them through any Watermill publisher outside of
// any transaction, and marks them.
//
//   - Each message is published at least once, with the same id each time.
//   - Per topic and ordering key, the first publication of each entry is in order, with any
//     number of relays. A key that fails holds back only itself.
//   - Nothing is dropped silently. An entry whose attempts are exhausted is abandoned: it is
//     visible, and its key waits until the entry is requeued or skipped.
//   - If every message of a topic fails, the relay treats it as an outage: the topic pauses, and
//     no attempt is counted.
//
// NewPublisher is a Watermill publisher that adds messages to the outbox in a transaction of the caller,
// for services that do not store events.
//
// docs/operations.md says what each status means and what to do.
//
//	relay, err := outbox.NewRelay(db, publisher, nil)
//	err = kinora.Run(ctx, runner, relay)
package outbox
