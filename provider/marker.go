package provider

// Marker is a row that says that a handler, by one of its names, has applied a message.
type Marker struct{ Handler, MessageID string }
