package outbox

import "github.com/kinora-go/kinora/provider"

// Message is a message to be published: ID, Topic, Key, Payload, Headers, OrderedKey. A handler with output returns some, and
// Enqueuer adds some to the outbox.
type Message = provider.OutboxMessage

// Enqueuer adds messages to the outbox in a transaction that the caller owns (InTx of a provider).
type Enqueuer = provider.Enqueuer
