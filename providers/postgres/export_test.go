package postgres

// LockKey is the key of an advisory lock, for tests that take one from outside.
var LockKey = lockKey

// LockClassHold is the class of the lock under which entries are held.
const LockClassHold = lockClassHold
