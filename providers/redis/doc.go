// Package redis runs projectors whose read model is in Redis.
//
// Redis holds only the read model. Parked messages, leases of runners and decisions are in a
// second store, which a runner requires:
//
//	units, err := redis.New(client, nil)
//	runner, err := projector.NewRunner(provider.Combine(units, db), projector.Subscribe(subscriber, "review"), projector.RunnerConfig{}, stars)
//
// Handlers queue commands. The commands of a message are sent together, in one MULTI/EXEC, after
// its handlers have returned:
//
//	func onPosted(ctx context.Context, tx goredis.Pipeliner, e eventstore.Event[Posted]) error {
//		tx.HIncrBy(ctx, "stars", e.Data.Product, int64(e.Data.Stars))
//		return nil
//	}
//
// The package promises:
//
//   - A message whose handlers fail, panic or end too late sends no command.
//   - If a process is killed before EXEC, none of its commands take effect. No other client sees
//     only a part of the commands.
//   - Messages of one key are applied in order. A message that cannot be applied is parked and
//     holds its key, as with any store.
//   - An outage of Redis parks no message. Messages are tried again until Redis replies.
//
// Each message costs a transaction of the second store, which is open while the handlers run and
// the commands are sent. If that store is SQLite, all other writers of the file wait for it, also
// while Redis does not reply.
//
// The package does not promise:
//
//   - Exactly once. Options.Markers is a no-op, logged at debug and counted
//     (projector.RunnerObserver.Unmarked). A message takes effect again if it is redelivered,
//     if the process ends between EXEC and the ack, if the commit in the second store fails, or
//     if the reply to EXEC is lost. Either write commands that may be repeated, such as SET,
//     HSET and ZADD with values of the event, or accept that a counter may be too high.
//   - All or nothing. If a command fails inside EXEC (WRONGTYPE, an error of a script), Redis
//     applies the others. They are applied again with each attempt at the message,
//     RunnerConfig.Retry.Attempts times in all, and with each replay. RunnerConfig.Classify can
//     make such an error permanent, so that there is only one attempt.
//   - Durability. Messages are acked when Redis has replied. If Redis then loses data, for
//     example because it is killed and has no append-only file (appendfsync always), the read
//     model lacks that data.
//   - Reading in a transaction. A queued command has no result until EXEC. Read through the
//     client, or use a script with EVAL: a script that EVALSHA names may be missing after a
//     restart.
//   - Wait. It needs markers.
//
// If a command takes longer than the client's ReadTimeout, its reply is lost, and the message is
// tried again without limit. Set ReadTimeout above the duration of scripts.
//
// In a cluster the keys of a message must be in one hash slot: give them a common {hash tag}. A
// Ring is refused, because it has no transaction over its servers.
package redis
