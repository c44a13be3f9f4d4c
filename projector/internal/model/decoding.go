package model

import (
	"sync/atomic"

	"github.com/kinora-go/kinora/eventstore"
)

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

// Decode decodes the event before its handlers run.
func (m *Message) Decode(t *eventstore.Types) error {
	if d := &m.decoding; d.state.CompareAndSwap(notDecoded, isDecoding) || d.state.CompareAndSwap(isUsed, isDecoding) {
		return m.decode(t)
	}
	_, err := eventstore.Decode[any](t, m.Raw) // it is decoded ahead at this moment
	return err
}
