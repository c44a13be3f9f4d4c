// Package redis runs projectors whose read model is in Redis.
//
// Redis holds the read model. Parked messages, leases of runners and generations are in a
// second store, which a runner requires:
//
//	units, err := redis.New(client, &redis.Config{OwnMarkers: true})
//	runner, err := projector.NewRunner(provider.Combine(units, db), projector.Subscribe(subscriber, "review"), projector.RunnerConfig{}, stars)
//
// Handlers queue commands, which are sent after all of them have returned:
//
//	func onPosted(ctx context.Context, tx goredis.Pipeliner, e eventstore.Event[Posted]) error {
//		tx.HIncrBy(ctx, "stars", e.Data.Product, int64(e.Data.Stars))
//		return nil
//	}
//
// In both forms:
//
//   - A message whose handlers fail, panic or end too late sends no command.
//   - Messages of one key are applied in order. One that cannot be applied is parked and holds its key.
//   - An outage of Redis parks no message. Messages are tried again until Redis replies.
//   - Redis undoes nothing. If the first command of a message fails, the message is tried again as usual.
//     If a later one fails (WRONGTYPE, for example), the message is stuck at once ("partly_applied") until a
//     person replays or skips it.
//   - A queued command has no result in the handler. Read through the client, or with Watch.
//
// # With markers
//
// With Config.OwnMarkers a message takes effect once, also after a kill at any step, a lost reply and
// concurrent duplicates. A script checks and sets its markers and runs its commands; no other client sees a
// part of them. The checkpoint of the projector is next to the markers, and moves with the messages.
//
// If Redis loses data (killed before its file is written, restarted from an old snapshot, or failed over to
// a replica that lacks the last writes), markers and checkpoint go back with the read model. Then:
//
//   - A projector that reads FromLog, or is completed by the log (a runner over a broker with markers, whose
//     second store has the events), notices the other server, and applies the lost events again, in order.
//     Until then, delivered events wait. RunnerObserver.Completed gets each, with the reason "lost". Messages
//     that were parked at the time of the snapshot and have been applied since are applied again, too. Output
//     is not sent again while the second store keeps its markers (marker.Retention). A handler that was added
//     later also gets the events before that, if Redis is empty.
//   - Without the log (Options.BrokerOnly, or messages that are no events of it), what Redis has lost is
//     missing. Rebuild the read model from another source.
//
// Conditions:
//
//   - With maxmemory-policy allkeys-*, or without INFO and its run_id, a runner refuses to start: see
//     Units.ReadyFor.
//   - Restarts, failovers and FLUSHALL are noticed. Data that is replaced inside a running server is not
//     (DEBUG RELOAD, RESTORE of Kinora's keys).
//   - Handlers cannot use scripts, transactions and blocking commands: their commands run in a script, which
//     blocks Redis. It has at most 1,000 commands and 1 MiB, or one message with at most 10,000 and 16 MiB.
//   - If the second store has an outbox, OnEmit works. Output is committed once, before its effect. The handler
//     runs again for the effect, and must return the same output.
//   - The switch to OwnMarkers requires an empty read model and another name of the projector.
//
// In a cluster, all keys of the units must be in one hash slot: set Config.HashTag, and make keys with
// Units.Key. A key of another slot is an error before anything is written. A Ring is refused.
//
// # Rebuilds
//
// With OwnMarkers, a table is a key and all keys that begin with its name and a colon. Name the tables in
// projector.Options.Tables, and make their keys with Units.Key and projector.Table:
//
//	tx.HIncrBy(ctx, units.Key(projector.Table(ctx, "ratings"), e.Data.Product), "stars", int64(e.Data.Stars))
//
// Readers ask Units.Shown for the name of the live table. Then rebuilds next to the live read model,
// rollbacks, verification and repair work as with SQL. OnCreate is required, and usually does nothing. A
// rebuild in place requires OnReset, which deletes the keys.
//
// # Without markers
//
// Without OwnMarkers, the commands of a unit are sent in one MULTI/EXEC. All of its messages take effect
// again if the process ends between EXEC and the acks, the commit in the second store fails, or the reply to
// EXEC is lost: write commands that may be repeated, such as SET, HSET and ZADD with values of the event, or
// accept that a counter may be too high. Options.Markers is a no-op, logged at debug and counted
// (projector.RunnerObserver.Unmarked). There is no output, no Wait and no rebuild. What Redis loses is lost.
//
// # Costs
//
// Each unit has a transaction of the second store open while the handlers run and the commands are sent. If
// that store is SQLite, all other writers of the file wait, also while Redis does not reply. If a command
// takes longer than the client's ReadTimeout, its reply is lost, and the unit runs again: set it higher.
package redis
