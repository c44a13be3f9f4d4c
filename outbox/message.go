package outbox

import "github.com/kinora-go/kinora/provider"

// Message is a message to be published. Handlers with output return messages (projector.OnEmit),
// and Enqueuer adds them to the outbox.
//   - Topic is required, 1 to 255 bytes. Payload is published unchanged.
//   - ID is the same on every publication. Empty means a new UUID; in the output of a handler, an
//     id derived from the event.
//   - Key is the ordering key. Empty means ID: the message waits for no other; in the output of a
//     handler, the stream of the event.
//   - Headers: at most 64, with names of at most 255 bytes and values of at most 1,024 bytes.
//   - OrderedKey publishes the messages of a key that several streams share in commit order: other
//     transactions that enqueue for this topic and key with OrderedKey wait until this one ends.
type Message = provider.OutboxMessage

// Enqueuer adds messages to the outbox in a transaction that the caller owns. InTx of a provider
// returns one; its method is Enqueue(ctx, messages...).
type Enqueuer = provider.Enqueuer
