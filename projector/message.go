package projector

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// received is a delivery of a message. The projectors of the subscription share it: it is acked
// when each of them has applied or parked it.
type received struct {
	topic     string
	msg       *message.Message
	id        string // its message id: that of its event, else that of msg
	isForeign bool   // a Decoder has read it: it is not in the log
	raw       eventstore.Raw
	malformed error            // why raw is incomplete
	key       string           // its ordering key, else its stream, else ""
	log       string           // LogID.String, if isLogged
	isLogged  bool             // it was read from the log, and is not acked
	isParked  bool             // it was delivered before, and is parked
	isUnknown bool             // the log has no event with its id; see untrusted.go
	acked     *message.Message // msg as it was delivered
	open      atomic.Int32     // projectors that have not finished it
}

func (r *Runner) receive(topic string, m *message.Message, projectors int) *received {
	d := &received{topic: topic, msg: m, acked: m, id: m.UUID}
	if d.isForeign = r.cfg.Decode != nil && !isOwn(m.Metadata); d.isForeign {
		d.decode(r.cfg.Decode)
	} else {
		d.raw, d.malformed = outbox.ParseWatermill(m)
		d.key = cmp.Or(m.Metadata[outbox.HeaderKey], m.Metadata[outbox.HeaderStream])
	}
	d.open.Store(int32(projectors))
	return d
}

// logged returns an event that was read from the log.
func logged(raw eventstore.Raw, log string) *received {
	d := &received{log: log, id: raw.ID, msg: &message.Message{UUID: raw.ID, Payload: raw.Data}, raw: raw, key: raw.Stream, isLogged: true}
	d.open.Store(1)
	return d
}

// headers returns the headers of a parked message: those of the delivery, or those with which a
// relay would publish an event of the log.
func (d *received) headers() map[string]string {
	if !d.isLogged {
		return d.deliveredHeaders()
	}
	return relayed(&d.raw, d.log)
}

// relayed returns the headers with which a relay publishes an event of the log.
func relayed(raw *eventstore.Raw, log string) map[string]string {
	m := provider.FromEvent(raw.Stream, raw.Version, eventstore.Draft{
		ID: raw.ID, Type: raw.Type, Schema: raw.Schema, Metadata: raw.Metadata,
	}, "")
	m.SetPlace(raw.Position, log)
	h := m.Headers
	h[outbox.HeaderKey] = raw.Stream
	h[outbox.HeaderRecordedAt] = raw.RecordedAt.UTC().Format(time.RFC3339Nano)
	return h
}

// headerReplayed marks a message that was parked during a rebuild, and that an earlier generation
// has applied.
const headerReplayed = "kinora_replayed"

// done is called by each projector after it has applied or parked the message and committed.
func (d *received) done() {
	if d.open.Add(-1) == 0 && !d.isLogged {
		crash.Point("ack: before")
		d.acked.Ack()
		crash.Point("ack: after")
	}
}

// inbound is a message that one projector processes: a delivery, or a parked message.
type inbound struct {
	*received
	handlers   []provider.Handler // that apply it, in order
	lane       provider.Lane
	mark       bool
	position   int64       // in the log that the runner reads; 0: it is not there
	parked     *Parked     // nil for a delivery
	duplicates []*received // other deliveries of the same message in the same unit
	aside      *aside      // not nil: it is set aside instead of applied
	replayed   bool        // another generation has applied it: its output is dropped
	contested  bool        // another generation may apply it at the same time: see inTurn
	decoding   decoding
	skipped    bool // an operator has skipped it in an earlier generation
}

// aside is the reason why a message is set aside.
type aside struct {
	cause    error
	handler  string // the handler that failed
	attempts int
}

// accept returns d, or the parked message if there is one, for this projector. It returns nil if
// the projector has no handler for it.
func (p *projection) accept(d *received, parked *Parked) *inbound {
	m := &inbound{received: d, parked: parked, mark: p.marks}
	attempts, names := 1, []string(nil)
	switch {
	case parked != nil:
		m.lane, attempts, names = parked.Lane, max(parked.Attempts, 1), parked.Handlers
		m.replayed = isReplayed(parked)
		m.mark = p.marks && len(names) == 0
	case d.key != "" && p.opts.Parking != ParkMessage:
		m.lane = provider.LaneOfKey(d.key)
	case d.id != "":
		m.lane = provider.LaneOfMessage(d.id)
	default:
		m.lane = provider.LaneOfMessage("\x00" + string(d.msg.Payload))
	}
	refuse := func(why error) { m.aside = &aside{cause: why, attempts: attempts} }
	switch known := p.types.Has(d.raw.Type); {
	case d.isUnknown && parked == nil && (known && len(p.byType[d.raw.Type]) == 0 || !known && p.opts.Unknown == SkipUnknown):
		return nil
	case d.isUnknown:
		m.mark = false
		refuse(errNotInLog)
	case d.malformed != nil && p.lacksDecoder(parked):
		m.aside = &aside{cause: errNoDecoder, attempts: parked.Attempts}
	case d.malformed != nil:
		m.mark = m.mark && provider.CheckText("message id", d.id, provider.MaxIDBytes) == nil // else no store has its marker
		refuse(&Error{Class: ClassPermanent, Code: codeMalformed, Err: d.malformed})
	case known:
		if m.handlers, known = p.handlersFor(d.raw.Type, names); !known {
			refuse(errNoHandler)
		} else if parked == nil && len(m.handlers) == 0 {
			return nil
		}
	case parked == nil && p.opts.Unknown == SkipUnknown:
		return nil
	default:
		refuse(undecodable(eventstore.ErrUnregistered))
	}
	return m
}

// acceptParked returns a parked message for its projector. d is that of receiveParked.
func (p *projection) acceptParked(d *received, row Parked) *inbound {
	if d.isForeign && d.key == "" { // the decoder took it from the context of the delivery
		d.key, d.raw.Stream = row.Key, row.Key
	}
	return p.accept(d, &row)
}

// handlerContext ends with the unit, and has the values of another context, such as that of the
// message. It does not end with the other one: some subscribers cancel the contexts of all messages
// at once when they close.
type handlerContext struct {
	context.Context
	values context.Context
}

func (c handlerContext) Value(key any) any {
	if v := c.values.Value(key); v != nil {
		return v
	}
	return c.Context.Value(key)
}

// outputs is the UUID namespace of the ids of handlers' output.
var outputs = uuid.MustParse("8f0e0f6c-0f57-5a5e-9c53-2d7e0a4b9a11")

// completed returns the output of a handler with stable ids, the key of the event, and the event
// as the cause. Values of the event that are not valid keys or headers are left out. out is not
// changed, since it belongs to the handler.
func completed(out []outbox.Message, handler string, cause eventstore.Raw) []outbox.Message {
	out = slices.Clone(out)
	for i := range out {
		m := &out[i]
		if m.ID == "" {
			m.ID = uuid.NewSHA1(outputs, []byte(handler+"\x00"+cause.ID+"\x00"+strconv.Itoa(i))).String()
		}
		if m.Key == "" && provider.CheckText("key", cause.Stream, provider.MaxIDBytes) == nil {
			m.Key = cause.Stream
		}
		*m = m.Inherit(caused(eventstore.Metadata{}, cause))
	}
	return out
}

// caused returns metadata whose cause is an event: the event's id, correlation id and traceparent
// replace those of m.
func caused(m eventstore.Metadata, by eventstore.Raw) eventstore.Metadata {
	is := provider.Inherited(eventstore.Metadata{
		CorrelationID: cmp.Or(by.Metadata.CorrelationID, m.CorrelationID), CausationID: by.ID, Traceparent: cmp.Or(by.Metadata.Traceparent, m.Traceparent),
	})
	m.CorrelationID, m.CausationID, m.Traceparent = is.CorrelationID, is.CausationID, is.Traceparent
	return m
}

// withCause returns a context with which events, messages and tasks inherit from the event.
func withCause(ctx context.Context, by eventstore.Raw) context.Context {
	return eventstore.WithMetadata(ctx, caused(eventstore.MetadataFrom(ctx), by))
}
