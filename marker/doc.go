// Package marker maintains markers, the rows by which each message takes effect once: it deletes
// old ones, and those of handlers that are gone.
//
// A marker records that a handler has applied a message. It is unique on (handler, generation,
// message id), and commits in the same transaction as the handler's writes. If the message is
// delivered again, at the same moment or after a crash, the marker is found and the message is
// skipped. Projectors write markers. The generation identifies a build of the read model; the
// store adds it.
package marker
