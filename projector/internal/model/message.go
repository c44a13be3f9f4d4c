package model

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Received is a delivery, or an event of the log. The projectors of a subscription share it: it is acked
// when each of them has applied or parked it.
type Received struct {
	Topic     string
	Msg       *message.Message
	ID        string // its message id: that of its event, else that of Msg
	Raw       eventstore.Raw
	Key       string           // its ordering key, else its stream, else ""
	Malformed error            // why Raw is incomplete
	Log       string           // LogID.String, if it was read from the log, and is not acked
	IsForeign bool             // a Decoder has read it: it is not in the log
	IsParked  bool             // it was delivered before, and is parked
	IsUnknown bool             // the log has no event with its id
	acked     *message.Message // Msg as it was delivered
	open      atomic.Int32     // projectors that have not finished it
}

// Logged returns an event that was read from the log.
func Logged(raw eventstore.Raw, log string) *Received {
	d := &Received{Log: log, ID: raw.ID, Msg: &message.Message{UUID: raw.ID, Payload: raw.Data}, Raw: raw, Key: raw.Stream}
	d.open.Store(1)
	return d
}

// IsLogged reports whether the event was read from the log.
func (d *Received) IsLogged() bool { return d.acked == nil }

// Done is called by each projector after it has applied or parked the message and committed.
func (d *Received) Done() {
	if d.open.Add(-1) == 0 && !d.IsLogged() {
		crash.Point("ack: before")
		d.acked.Ack()
		crash.Point("ack: after")
	}
}

// Headers returns the headers of a parked message: those of the delivery, or those with which a
// relay would publish an event of the log.
func (d *Received) Headers() map[string]string {
	if !d.IsLogged() {
		return d.deliveredHeaders()
	}
	return relayed(&d.Raw, d.Log)
}

// relayed returns the headers with which a relay publishes an event of the log.
func relayed(raw *eventstore.Raw, log string) map[string]string {
	m := provider.FromEvent(raw.Stream, raw.Version, eventstore.Draft{
		ID: raw.ID, Type: raw.Type, Schema: raw.Schema, Metadata: raw.Metadata,
	}, "")
	m.SetPlace(raw.Position, log)
	h := m.Headers
	h[outbox.HeaderKey] = raw.Stream
	h[provider.HeaderRecordedAt] = raw.RecordedAt.UTC().Format(time.RFC3339Nano)
	return h
}

// Waited returns the time since the event was recorded.
func (d *Received) Waited(now time.Time) time.Duration {
	if d.Raw.RecordedAt.IsZero() {
		return 0
	}
	return now.Sub(d.Raw.RecordedAt)
}

// Message is a message that one projector processes: a delivery, an event of the log, or a parked
// message.
type Message struct {
	*Received
	Handlers   []provider.Handler // that apply it, in order
	Lane       provider.Lane
	Mark       bool             // its markers are looked up, and written unless the unit moves the checkpoint
	Position   int64            // in the log that the runner reads; 0: it is not there
	Parked     *provider.Parked // nil for a delivery
	Duplicates []*Received      // other deliveries of the same message in the same unit
	Aside      *Aside           // not nil: it is set aside instead of applied
	Replayed   bool             // another generation has applied it: its output is dropped
	Contested  bool             // another generation may apply it at the same time
	Skipped    bool             // an operator has skipped it in an earlier generation
	decoding   decoding
}

// Aside is why a message is set aside.
type Aside struct {
	Cause    error
	Needs    string // provider.Parked.Needs
	Handler  string // the handler that failed
	Attempts int
}

// Done is called after the projector has applied or parked the message, and committed.
func (m *Message) Done() {
	m.Received.Done()
	for _, duplicate := range m.Duplicates {
		duplicate.Done()
	}
}

// OrderedBy returns the key whose messages keep their order: for a message without a key, its id.
func (m *Message) OrderedBy() string { return cmp.Or(m.Key, "\x00"+m.ID) }

// headerReplayed marks a message that was parked during a rebuild, and that an earlier generation
// has applied.
const headerReplayed = "kinora_replayed"

// IsReplayed reports whether another generation had applied the message when it was parked.
func IsReplayed(row *provider.Parked) bool {
	_, marked := row.Headers[headerReplayed]
	return marked
}

// Accept returns d, or the parked message if there is one, for this projector. It returns nil if
// the projector has no handler for it.
func (p *Projector) Accept(d *Received, parked *provider.Parked) *Message {
	m := &Message{Received: d, Parked: parked, Mark: p.Marks}
	attempts, names := 1, []string(nil)
	switch {
	case parked != nil:
		m.Lane, attempts, names = parked.Lane, max(parked.Attempts, 1), parked.Handlers
		m.Replayed = IsReplayed(parked)
		m.Mark = p.Marks && len(names) == 0
	default:
		m.Lane = p.laneOf(d.Key, cmp.Or(d.ID, "\x00"+string(d.Msg.Payload)))
	}
	known := p.Types.Newest(d.Raw.Type) > 0
	ignored := known && len(p.ByType[d.Raw.Type]) == 0 || !known && p.Rules.SkipUnknown
	if parked == nil && ignored && (d.IsUnknown || d.Malformed == nil) {
		return nil
	}
	cause := p.take(m, known, names)
	p.setAside(m, cause, attempts, names)
	return m
}

// setAside makes a message one that is set aside for a cause, unless that is nil. names are those of the handlers that
// are to run it, if they are known.
func (p *Projector) setAside(m *Message, cause error, attempts int, names []string) {
	if cause == nil {
		return
	}
	switch needs := m.needs(names); {
	case provider.ClassOf(cause) != provider.ClassUnable:
		m.Aside = &Aside{Cause: cause, Attempts: attempts}
	case len(needs) > provider.MaxNeedBytes: // no program has that
		m.Aside = &Aside{Cause: permanent(provider.CodeOf(cause), cause.Error()), Attempts: attempts}
	default:
		m.Aside = &Aside{Cause: cause, Needs: needs}
		if m.Parked != nil {
			m.Aside.Attempts = m.Parked.Attempts
		}
	}
}

// needs returns what a program must have to apply a message: Parked.Needs. names are those of the handlers that it is
// parked for, if there are any.
func (m *Message) needs(names []string) string {
	var all []string
	if m.Malformed != nil || m.IsForeign {
		all = append(all, provider.NeedDecoder)
	}
	eventType := m.Raw.Type
	if m.Malformed != nil && m.Parked != nil {
		eventType = m.Parked.Type // its decoder has read that before
	} else {
		all = append(all, provider.NeedEvent(eventType, max(m.Raw.Schema, 1)))
	}
	for _, name := range names {
		all = append(all, provider.NeedHandler(name, eventType))
	}
	return strings.Join(slices.Compact(slices.Sorted(slices.Values(all))), "\n")
}

// take sets the handlers of a message: those with one of names, if there are names. It returns why the message cannot be
// applied, or nil. known: the type of its event is registered.
func (p *Projector) take(m *Message, known bool, names []string) error {
	switch {
	case m.IsUnknown:
		m.Mark = false
		return ErrNotInLog
	case m.Malformed != nil && p.LacksDecoder(m.Parked):
		return ErrNoDecoder
	case m.Malformed != nil:
		m.Mark = m.Mark && provider.CheckText("message id", m.ID, provider.MaxIDBytes) == nil // else no store has its marker
		return &provider.Error{Class: provider.ClassPermanent, Code: CodeMalformed, Err: m.Malformed}
	case !known && provider.CheckText("type", m.Raw.Type, provider.MaxIDBytes) != nil: // no program can register it
		return Undecodable(eventstore.ErrUnregistered)
	case !known:
		return ErrNoType
	}
	var has bool
	if m.Handlers, has = p.HandlersFor(m.Raw.Type, names); !has {
		return ErrNoHandler
	}
	if m.Raw.Schema > p.Types.Newest(m.Raw.Type) {
		return ErrNoType
	}
	return nil
}

// has returns what this program has of what messages may need, sorted.
func (p *Projector) has() (all []string) {
	if p.Rules.Decodes {
		all = append(all, provider.NeedDecoder)
	}
	for _, eventType := range append(p.Types.Names(), eventstore.TypeEnded) {
		for schema := range p.Types.Newest(eventType) {
			all = append(all, provider.NeedEvent(eventType, schema+1))
		}
		for _, h := range p.ByType[eventType] {
			for _, name := range h.Names() {
				all = append(all, provider.NeedHandler(name, eventType))
			}
		}
	}
	for _, name := range p.Rules.Removed {
		all = append(all, provider.NeedHandler(name, provider.AnyType))
	}
	return slices.Compact(slices.Sorted(slices.Values(all)))
}

// Lacks returns why this program does not have what a message needs, or nil.
func (p *Projector) Lacks(needs string) error {
	can := provider.Capability{Has: p.Has}
	for one := range strings.SplitSeq(needs, "\n") {
		switch {
		case can.Meets(one):
		case one == provider.NeedDecoder:
			return ErrNoDecoder
		case strings.HasPrefix(one, "handler "):
			return ErrNoHandler
		default:
			return ErrNoType
		}
	}
	return nil
}

// LacksOf returns which needs of a read model's events this program does not have, sorted. seen are the schema versions of
// each type.
func (p *Projector) LacksOf(seen map[string][]int) (needs []string) {
	for eventType, schemas := range seen {
		for _, schema := range schemas {
			if need := provider.NeedEvent(eventType, schema); p.Lacks(need) != nil {
				needs = append(needs, need)
			}
		}
	}
	slices.Sort(needs)
	return needs
}

// LacksDecoder reports whether a decoder has read a parked message before, and this runner has none.
// The message is then left to a runner that has it.
func (p *Projector) LacksDecoder(parked *provider.Parked) bool {
	return parked != nil && !p.Rules.Decodes && !isOwn(parked.Headers) && (parked.Type != "" || len(parked.Handlers) > 0)
}

// Lacking are the handlers of a generation that this program does not have, by the type of their events.
type Lacking map[string][]provider.Began

// Of returns those that take an event.
func (l Lacking) Of(eventType string, position int64) (handlers []provider.Handler) {
	for _, b := range l[eventType] {
		if b.Position < position {
			handlers = append(handlers, b.Taker())
		}
	}
	return handlers
}

// Taken returns the messages of the events of the log that the projector takes. One that handlers of lacking take too is to
// be set aside, for a program that has all of them.
func (p *Projector) Taken(events []eventstore.Raw, log string, lacking Lacking) []*Message {
	msgs := make([]*Message, 0, len(events))
	for _, raw := range events {
		others := lacking.Of(raw.Type, raw.Position)
		if len(p.ByType[raw.Type])+len(others) == 0 && !slices.Contains(p.Rules.Categories, provider.Category(raw.Stream)) {
			continue
		}
		m := p.Accept(Logged(raw, log), nil)
		if m == nil && len(others) > 0 { // this program ignores its type
			m = &Message{Received: Logged(raw, log), Lane: p.laneOf(raw.Stream, raw.ID)}
		}
		if m == nil {
			continue
		}
		m.Mark, m.Position = p.Keeps.Markers, raw.Position
		p.Await(m, others)
		msgs = append(msgs, m)
	}
	return msgs
}

// Await makes a message wait for handlers of other programs too, if there are any. As for its own handlers, the unit finds out
// by the checkpoint and the markers whether they have applied it.
func (p *Projector) Await(m *Message, others []provider.Handler) {
	if len(others) == 0 {
		return
	}
	names := make([]string, len(others))
	for i := range others {
		names[i] = others[i].Name
	}
	m.Handlers = slices.Concat(m.Handlers, others) // the handlers of a type are shared
	p.setAside(m, ErrNoHandler, 1, names)
}

// laneOf returns the lane of a message with a key, or an id.
func (p *Projector) laneOf(key, id string) provider.Lane {
	if key != "" && !p.Rules.Alone {
		return provider.LaneOfKey(key)
	}
	return provider.LaneOfMessage(id)
}

// UnitOf returns the messages as a unit has them.
func UnitOf(msgs []*Message) []provider.Message {
	all := make([]provider.Message, len(msgs))
	for i, m := range msgs {
		all[i] = provider.Message{
			ID: m.ID, Lane: m.Lane, Handlers: m.Handlers, Mark: m.Mark, Position: m.Position, Parked: m.Parked,
		}
	}
	return all
}

// Row returns the row of a message that is set aside in a generation. fresh reports for each handler
// whether it has not applied the message.
func (m *Message) Row(b provider.Build, fresh []bool, class provider.Class, code, version string) provider.Parked {
	var row provider.Parked
	if m.Parked != nil {
		row = *m.Parked
	} else {
		row = provider.Parked{
			Projector: b.Projector, Generation: b.Generation, MessageID: m.ID, Topic: m.Topic, Key: m.Key, Lane: m.Lane,
			Type: m.Raw.Type, Payload: m.Msg.Payload, Headers: m.Headers(),
		}
		if m.Replayed {
			row.Headers[headerReplayed] = "true" // the map belongs to the row: deliveries are not replayed
		}
	}
	row.Class, row.Needs, row.Code, row.Version = class, "", code, version
	named := len(row.Handlers) > 0
	for j, h := range m.Handlers {
		if !named && fresh[j] { // the unit writes its marker, so only this field lists it
			row.Handlers = append(row.Handlers, parkedName(b.Projector, h))
		}
	}
	return row
}

// parkedName returns the name of a handler in the rows of parked messages: the last of its earlier ones, so that an older
// program can apply them.
func parkedName(projector string, h provider.Handler) string {
	for _, name := range slices.Backward(h.Was) {
		if strings.HasPrefix(name, projector+"/") { // another program has had those of other projectors
			return name
		}
	}
	return h.Name
}

// Values returns the context of a delivery without its end, or nil if it has no values.
func (d *Received) Values() context.Context {
	if values := d.Msg.Context(); values != context.Background() {
		return context.WithoutCancel(values)
	}
	return nil
}

// decoding is the event of a message, decoded before its handlers run. The first of them takes it.
type decoding struct {
	state atomic.Int32
	event eventstore.Event[any]
}

// The states of a decoding.
const (
	notDecoded int32 = iota
	isDecoding       // by the goroutine that has set this state
	isDecoded
	isUsed // a handler has taken it, or it could not be decoded
)

// DecodeAhead decodes the events of messages until their unit has overtaken it. An event that cannot
// be decoded is left to the unit.
func (p *Projector) DecodeAhead(msgs ...*Message) {
	defer func() { _ = recover() }() // by a decoder of the user: it panics again in the unit
	for _, m := range msgs {
		if len(m.Handlers) == 0 {
			continue
		}
		if !m.decoding.state.CompareAndSwap(notDecoded, isDecoding) {
			return
		}
		_ = m.decode(p.Types)
	}
}

// decode decodes the event, in the state isDecoding.
func (m *Message) decode(t *eventstore.Types) (err error) {
	d, next := &m.decoding, isUsed
	defer func() { d.state.Store(next) }() // also if a decoder panics
	if d.event, err = eventstore.Decode[any](t, m.Raw); err == nil {
		next = isDecoded
	}
	return err
}

// Decoded returns the event of a message. Each handler and attempt gets a value of its own: a handler
// may change it.
func Decoded[E any](t *eventstore.Types, m *Message) (eventstore.Event[E], error) {
	if !m.decoding.state.CompareAndSwap(isDecoded, isDecoding) {
		return eventstore.Decode[E](t, m.Raw)
	}
	e := m.decoding.event
	m.decoding.state.Store(isUsed)
	data, ok := e.Data.(E)
	if !ok {
		return eventstore.Decode[E](t, m.Raw)
	}
	return eventstore.Event[E]{
		ID: e.ID, Stream: e.Stream, Version: e.Version, Position: e.Position, Type: e.Type, Schema: e.Schema,
		Data: data, Metadata: e.Metadata, RecordedAt: e.RecordedAt,
	}, nil
}

// IsDecoded reports whether the event was decoded ahead.
func (m *Message) IsDecoded() bool { return m.decoding.state.Load() == isDecoded }

// Decode decodes the event before its handlers run. It returns why that is not possible: see Undecodable.
func (m *Message) Decode(t *eventstore.Types) (err error) {
	if d := &m.decoding; d.state.CompareAndSwap(notDecoded, isDecoding) || d.state.CompareAndSwap(isUsed, isDecoding) {
		err = m.decode(t)
	} else {
		_, err = eventstore.Decode[any](t, m.Raw) // it is decoded ahead at this moment
	}
	return Undecodable(err)
}
