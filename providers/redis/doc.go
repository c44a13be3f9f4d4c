// Package redis runs projectors whose read model is in Redis.
//
// Redis holds the read model and nothing else. Parked messages, leases of runners and decisions are in a second
// store, which a runner requires:
//
//	units, err := redis.New(client)
//	runner, err := projector.NewRunner(provider.Combine(units, db), projector.Subscribe(subscriber, "review"), projector.RunnerConfig{}, stars)
//
// Handlers queue commands. The commands of a message are sent together, in one MULTI/EXEC, after its handlers have
// returned:
//
//	func onPosted(ctx context.Context, tx goredis.Pipeliner, e eventstore.Event[Posted]) error {
//		tx.HIncrBy(ctx, "stars", e.Data.Product, int64(e.Data.Stars))
//		return nil
//	}
//
// These promises hold:
//
//   - A message whose handlers fail, panic or end too late sends nothing.
//   - A process that is killed before EXEC has sent nothing that counts. No other client sees a part of the commands.
//   - Messages of one key are applied in order. A message that cannot be applied is parked and holds its key, as with any store.
//   - An outage of Redis parks nothing. Messages are tried again until Redis answers.
//
// Each message costs a transaction of the second store, which is open while the handlers run and the commands are sent.
// If that store is SQLite, all other writers of the file wait meanwhile, also while Redis does not answer.
//
// These do not:
//
//   - Exactly once. Options.Markers is a no-op, logged at debug and counted (projector.RunnerObserver.Unmarked). A message
//     takes effect again if it is redelivered, if the process ends between EXEC and the ack, if the commit in the
//     second store fails, or if the reply to EXEC is lost. Either write commands that may be repeated, such as SET,
//     HSET and ZADD with values of the event, or accept that a counter may be too high.
//   - All or nothing. If a command fails inside EXEC (WRONGTYPE, an error of a script), Redis applies the others. They
//     are applied again with each attempt at the message, RunnerConfig.Retry.Attempts times in all, and with each replay.
//     RunnerConfig.Classify can make such an error permanent, so that there is one attempt.
//   - Durability. Messages are acked when Redis has replied. Data that Redis loses after that, for example because it
//     was killed and has no append-only file (appendfsync always), is gone from the read model.
//   - Reading in a transaction. A queued command has no result until EXEC. Read through the client, or use a script,
//     with EVAL: a script that EVALSHA names may be missing after a restart.
//   - Wait. It needs markers.
//
// A command that takes longer than the client's ReadTimeout is one whose reply is lost. The message is tried again
// without limit, so set ReadTimeout above what scripts take.
//
// In a cluster the keys of a message must be in one hash slot: give them a common {hash tag}. A Ring is refused,
// since it has no transaction over its servers.
package redis
