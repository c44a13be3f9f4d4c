package outbox

import (
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/check"
	"github.com/kinora-go/kinora/provider"
)

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

// Entry is a message in the outbox. Besides the fields of Message it has Seq (the order of
// entries), Status, Attempts, LastError (the Go type of the error, never its text), and the times
// CreatedAt, LastAttemptedAt, NextAttemptAt and PublishedAt, in UTC on the store's clock.
type Entry = provider.Entry

// Status is the status of an entry. It is a string, such as "pending".
type Status = provider.EntryStatus

// The statuses of an entry. Published and Skipped entries never change again.
const (
	Pending   = provider.EntryPending   // can be claimed
	Claimed   = provider.EntryClaimed   // a relay has it until its lease ends
	Published = provider.EntryPublished // the publisher confirmed it
	Failed    = provider.EntryFailed    // publishing failed; can be claimed again after its backoff
	Held      = provider.EntryHeld      // waits for an abandoned or failed entry of its key
	Abandoned = provider.EntryAbandoned // attempts exhausted; its key waits for Requeue or Skip
	Skipped   = provider.EntrySkipped   // an operator gave it up
)

// Filter selects entries by Status, Topic, Key, Stream, Seqs and Older (an age). The zero Filter
// selects all. Limit is the page size of Inspector.Entries (zero means 100), and the most entries
// of Requeue and Skip (zero means no limit). After is the last Seq of the page before. With Force,
// Requeue takes entries that would be ErrStale.
type Filter = provider.EntryFilter

// Inspector has the methods for operators: Entries lists entries, StatusCounts counts them by
// status (of all statuses if none is given), Requeue makes failed and abandoned entries pending at
// once, and Skip gives up all open entries that it selects, pending ones too: set Seqs. Every
// provider with an outbox implements it. The methods: go doc provider.Inspector.
type Inspector = provider.Inspector

// EntryRetention is how long entries are kept after they were Published (zero means that they are
// deleted at once) or Skipped (zero means 30 days).
type EntryRetention = provider.EntryRetention

// Mark is a change of a claimed entry, as RelayObserver.Marked reports it: the entry's Seq, its
// new status To, the backoff or lease After, and the class of the Error.
type Mark = provider.EntryMark

var (
	// ErrStale: Requeue refused an entry whose last attempt is older than the provider's
	// RequeueWindow. If that attempt published the message, consumers may have deleted its
	// markers, and it would take effect again.
	ErrStale = provider.ErrStale
	// ErrMalformed: a message does not have the headers of a published event. No retry can help.
	ErrMalformed = provider.ErrMalformed
)

// Route returns the topics of an event. The outbox gets one entry for each. A nil Route means no
// entries, for services that do not publish their events.
//
// kinora.Start also calls it, with an event of each registered type and the data {}, to warn of
// topics that no projector takes. Its result is not stored.
type Route func(stream string, d eventstore.Draft) []string

// ByCategory is a Route to the category of the stream: events of "review-42-ann" go to topic
// "review".
func ByCategory(stream string, _ eventstore.Draft) []string {
	return []string{provider.Category(stream)}
}

// NewPublisher returns a Watermill publisher that adds messages to the outbox in the transaction of
// tx (InTx of a provider). A relay publishes them after the commit. So it takes the place of the
// publisher of Watermill's forwarder, also under cqrs.EventBus and cqrs.CommandBus:
//
//	publisher := outbox.NewPublisher(db.InTx(tx))
//	err := publisher.Publish("orders", message.NewMessage(watermill.NewUUID(), payload))
//
// Publish adds all its messages or none:
//   - The UUID is the id of the message; if it is empty, the message gets a new one. A message whose id
//     is already in the outbox for that topic is ignored.
//   - The metadata are the headers, with the limits of Message. Each message inherits the correlation id,
//     the causation id and the traceparent of its own context (Message.SetContext), and of that of the
//     first message, unless it has these headers. In a handler, set the handler's context.
//   - HeaderKey ("kinora_key") in the metadata is the ordering key: messages of a topic with this key are
//     published in commit order (Message.OrderedKey). Without it, the message waits for no other, and
//     others may be published before it.
//   - The statement runs in the context of the first message.
//   - A topic, UUID, metadata or payload that cannot be stored is an *eventstore.InvalidError. Then the
//     transaction stays usable. Other errors are those of the database.
//
// Close does nothing: the transaction belongs to the caller. The publisher is as safe for concurrent
// use as the transaction.
func NewPublisher(tx Enqueuer) message.Publisher { return publisher{tx} }

type publisher struct{ tx Enqueuer }

func (p publisher) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return nil
	}
	entries := make([]Message, len(messages))
	for i, m := range messages {
		key := m.Metadata[HeaderKey]
		entries[i] = Message{ID: m.UUID, Topic: topic, Key: key, OrderedKey: key != "", Payload: m.Payload, Headers: m.Metadata}
		entries[i] = entries[i].Inherit(eventstore.MetadataFrom(m.Context()))
	}
	return p.tx.Enqueue(messages[0].Context(), entries...)
}

func (publisher) Close() error { return nil }

// HeaderKey is the header with the ordering key of a published message, for brokers with partitions. The
// payload of an event is its data, unchanged. Its other headers, such as provider.HeaderType, have what
// ParseWatermill returns.
const HeaderKey = provider.HeaderKey

// ToWatermill returns the message of an entry as relays publish it: the same bytes each time.
func ToWatermill(e Entry) *message.Message {
	m := message.NewMessage(e.ID, e.Payload)
	maps.Copy(m.Metadata, e.Headers)
	m.Metadata[HeaderKey] = e.Key
	m.Metadata[provider.HeaderRecordedAt] = e.CreatedAt.UTC().Format(time.RFC3339Nano)
	return m
}

// ParseWatermill returns the event of a message that a relay published. It ignores unknown
// headers. An empty or invalid UUID, a missing type, and an invalid number or time are
// ErrMalformed; then the fields that could be read are returned too.
func ParseWatermill(m *message.Message) (eventstore.Raw, error) {
	raw := eventstore.Raw{
		ID: m.UUID, Stream: m.Metadata[provider.HeaderStream], Type: m.Metadata[provider.HeaderType], Schema: 1, Data: m.Payload,
		Metadata: eventstore.Metadata{
			CorrelationID: m.Metadata[provider.HeaderCorrelation], CausationID: m.Metadata[provider.HeaderCausation],
			Traceparent: m.Metadata[provider.HeaderTraceparent], Actor: m.Metadata[provider.HeaderActor],
		},
	}
	for k, v := range m.Metadata {
		if name, ok := strings.CutPrefix(k, provider.HeaderExtra); ok {
			if raw.Metadata.Extra == nil {
				raw.Metadata.Extra = map[string]string{}
			}
			raw.Metadata.Extra[name] = v
		}
	}
	var err error
	if s := m.Metadata[provider.HeaderSchema]; s != "" {
		if raw.Schema, err = strconv.Atoi(s); err != nil || raw.Schema < 1 {
			return raw, fmt.Errorf("%w: header %s is not a schema version", ErrMalformed, provider.HeaderSchema)
		}
	}
	if s := m.Metadata[provider.HeaderVersion]; s != "" {
		if raw.Version, err = strconv.ParseInt(s, 10, 64); err != nil || raw.Version < 1 {
			return raw, fmt.Errorf("%w: header %s is not a version", ErrMalformed, provider.HeaderVersion)
		}
	}
	if s := m.Metadata[provider.HeaderPosition]; s != "" {
		if raw.Position, err = strconv.ParseInt(s, 10, 64); err != nil || raw.Position < 1 {
			return raw, fmt.Errorf("%w: header %s is not a position", ErrMalformed, provider.HeaderPosition)
		}
	}
	if s := m.Metadata[provider.HeaderRecordedAt]; s != "" {
		if raw.RecordedAt, err = check.ParseTime(s); err != nil {
			return raw, fmt.Errorf("%w: header %s is %w", ErrMalformed, provider.HeaderRecordedAt, err)
		}
	}
	if err := provider.CheckText("message id", raw.ID, provider.MaxIDBytes); err != nil {
		return raw, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if raw.Type == "" {
		return raw, fmt.Errorf("%w: header %s is missing", ErrMalformed, provider.HeaderType)
	}
	return raw, nil
}
