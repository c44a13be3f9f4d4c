// Package marker looks after the rows that make a handler's effect happen once: how long they are kept, and which may go.
//
// A marker says that a handler has applied a message. It is unique on (handler, generation, message id), and
// commits in the same transaction as the handler's writes. So a message that is delivered again, at the same moment
// or after a crash, finds its marker and is skipped. Units of work write markers (package projector); the store adds the
// generation, which identifies a build of the read model.
package marker
