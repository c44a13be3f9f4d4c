package provider

// Marker is a row that records that a handler has applied a message. Handler is one of its names.
type Marker struct{ Handler, MessageID string }
