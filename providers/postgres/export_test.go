package postgres

// LockKey is the key of an advisory lock, for tests that take one from outside.
var LockKey = lockKey
