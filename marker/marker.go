// Package marker names the rows that make a handler's effect happen once.
//
// A marker says that a handler has applied a message. It is unique on (handler, generation, message id), and
// commits in the same transaction as the handler's writes; so a message that comes again, at the same moment
// or after a crash, finds it and is skipped. The unit of work writes markers (package projector); the
// generation, which says which build of the read model a marker belongs to, is the store's to fill in.
package marker

// Key is what a marker is unique on, within the live generation of its projector.
type Key struct {
	Handler   string   // "product-ratings/posted"
	Was       []string // earlier names of the handler: a marker under one of them counts, and a new one is left under each, so that old and new code may run at once
	MessageID string
}
