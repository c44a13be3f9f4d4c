// Package task runs durable work: calls to other systems, commands, timers, and processes of
// several steps.
//
// A task is a row in the database: its id, its input, and its progress. It is added in a
// transaction, together with what caused it: an append, a handler of a projector, a command. A
// Worker claims tasks that are due and runs their handlers. Any number of workers may run.
//
//   - Define: a handler outside of any transaction, for calls to other systems and for processes. It
//     may run several times. Run.Key is the idempotency key of its call.
//   - Step, StepTx and Wait divide a process. The result of each is recorded once. When the handler
//     runs again, it gets the recorded results and continues behind them.
//   - DefineTx: a handler that is one transaction, with the end of the task in it: once.
//   - DefineGroup: what happens, once, when the last task of a group is done.
//
// A handler that returns GiveUp, or an operator who cancels, ends a task without success: what its
// steps did is undone in reverse order. A task that fails is tried again with a backoff, and is
// abandoned after its last attempt. Then it waits for an operator (Inspector).
//
//	var welcome = task.Define("mail/welcome", func(ctx context.Context, r *task.Run[pgx.Tx], in Mail) (bool, error) {
//		return true, mails.Send(ctx, r.Key(), in)
//	})
//
//	err := db.TasksIn(tx).Enqueue(ctx, welcome.New("welcome-"+customer, Mail{To: address}))
//
//	worker, err := task.NewWorker(db, task.WorkerConfig{}, welcome)
//	err = kinora.Run(ctx, worker)
package task
