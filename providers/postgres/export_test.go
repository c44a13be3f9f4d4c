package postgres

import "context"

// LockKey is the key of an advisory lock, for tests that take one from outside.
var LockKey = lockKey

// LockClassHold is the class of the lock under which entries are held.
const LockClassHold = lockClassHold

// InDoubt tells whether a unit may have been committed although err is what its commit met.
var InDoubt = inDoubt

// ConnConfig is what connections beside the pool are made with.
var ConnConfig = connConfig

// NewNotifier is what coalesces notifications, for tests of its timing.
func NewNotifier(send func(context.Context)) *notifier { return &notifier{send: send} }

func (n *notifier) Ask()   { n.ask() }
func (n *notifier) Close() { n.close() }
