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
//   - Messages of one key are applied in order. A message that cannot be applied is parked and
//     holds its key, as with any store.
//   - An outage of Redis parks no message. Messages are tried again until Redis replies.
//   - Redis undoes nothing. If the first command of a message fails, the message is tried again as usual.
//     If a later one fails (WRONGTYPE, for example), the message is stuck at once with the code
//     "partly_applied", and is not tried again until a person replays or skips it.
//   - A queued command has no result in the handler. Read through the client, or with Watch.
//
// # With markers
//
// With Config.OwnMarkers a message takes effect once. A script checks and sets its markers and
// runs its commands; no other client sees a part of them. The checkpoint of the projector is next to
// the markers, and moves with the messages. A kill at any step, a lost reply and concurrent
// duplicates change nothing about that.
//
// Redis may lose data: it is killed before its file is written, is restarted from an old snapshot,
// or fails over to a replica that lacks the last writes. Then markers and checkpoint go back with the
// read model. What follows depends on the log:
//
//   - A projector that reads FromLog, or that is completed by the log (a runner over a broker with
//     markers, whose second store has the events), notices the other server by itself, and
//     applies the lost events again, in order. Until then, events that are delivered wait.
//     RunnerObserver.Completed gets each of them, with the reason "lost". Messages that were parked
//     at the time of the snapshot and have been applied since are applied again, too. Output is
//     not sent again while the second store keeps its markers (marker.Retention). A handler that was
//     added later also gets the events before that, if Redis is empty.
//   - Without the log (Options.BrokerOnly, or messages that are no events of it), what Redis has lost is
//     missing. Rebuild the read model from another source.
//
// Conditions:
//
//   - Redis must not evict keys: with maxmemory-policy allkeys-* a runner refuses to start (ErrUnsafe).
//     Kinora's keys have no expiry, so volatile-* does not touch them. INFO must be allowed, and show
//     run_id, by which a restart is noticed.
//   - Restarts, failovers and FLUSHALL are noticed. Data that is replaced inside a running server is
//     not (DEBUG RELOAD, RESTORE of Kinora's keys).
//   - Handlers cannot use scripts, transactions and blocking commands: their commands run in a script. One
//     script has at most 1,000 commands and 1 MiB, or one message with at most 10,000 commands and 16 MiB, and
//     blocks Redis for that long.
//   - If the second store has an outbox, OnEmit works. Output is committed before its effect, once. The
//     handler runs again for the effect: it must return the same output then.
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
// again if the process ends between EXEC and the acks, if the commit in the second store fails, or if the
// reply to EXEC is lost: write commands that may be repeated, such as SET, HSET and ZADD with values of the
// event, or accept that a counter may be too high. Options.Markers is a no-op, logged at debug and counted
// (projector.RunnerObserver.Unmarked). There is no output, no Wait and no rebuild. What Redis loses is lost.
//
// # Costs
//
// Each unit costs a transaction of the second store, which is open while the handlers run and
// the commands are sent. If that store is SQLite, all other writers of the file wait for it, also
// while Redis does not reply. If a command takes longer than the client's ReadTimeout, its reply is
// lost, and the unit runs again. Set ReadTimeout above the duration of slow commands.
package redis
