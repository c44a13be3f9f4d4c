package projector

import (
	"context"
	"sync/atomic"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// pageAhead is a page that is read, and whose events are decoded, while the one before it is applied.
type pageAhead struct {
	after int64
	read  chan struct{}
	page  provider.LogPage
	msgs  []*inbound
	err   error
}

// readPage returns the page behind r.read and its messages, and begins to read the one after it.
func (r *reader) readPage(ctx context.Context) (provider.LogPage, []*inbound, error) {
	ahead := r.next
	if ahead == nil || ahead.after != r.read {
		ahead = r.readAhead(ctx, r.read)
	}
	r.next = nil
	<-ahead.read
	if ahead.err == nil && ahead.page.More && ahead.page.End.Position > ahead.after {
		r.next = r.readAhead(ctx, ahead.page.End.Position)
	}
	return ahead.page, ahead.msgs, ahead.err
}

func (r *reader) readAhead(ctx context.Context, after int64) *pageAhead {
	limit := r.batch
	if r.isBusy() {
		limit = min(limit, busyBatch)
	}
	if rate := r.serving.Rate; rate > 0 && r.serving.isReplaying() {
		limit = min(limit, rate) // so that throttle waits for at most a second
	}
	a := &pageAhead{after: after, read: make(chan struct{})}
	q, own := provider.LogQuery{After: after, Filter: r.filter, Limit: limit}, r.ownEvents()
	if r.segment > 0 {
		q.Share, q.Shares = r.segment-own.split.First, own.split.Count
	}
	go func() {
		if a.page, a.err = r.pageAfter(ctx, q); a.err == nil {
			a.msgs = own.taken(r.messages(own.of(a.page.Events)))
		}
		msgs := a.msgs
		close(a.read)
		r.decodeAhead(msgs...)
	}()
	return a
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

// decodeAhead decodes the events of messages until their unit has overtaken it. An event that cannot
// be decoded is left to the unit.
func (p *projection) decodeAhead(msgs ...*inbound) {
	defer func() { _ = recover() }() // by a decoder of the user: it panics again in the unit
	for _, m := range msgs {
		if len(m.handlers) == 0 {
			continue
		}
		if !m.decoding.state.CompareAndSwap(notDecoded, isDecoding) {
			return
		}
		_ = m.decode(p.types)
	}
}

// decode decodes the event, in the state isDecoding.
func (m *inbound) decode(t *eventstore.Types) (err error) {
	d, next := &m.decoding, isUsed
	defer func() { d.state.Store(next) }() // also if a decoder panics
	if d.event, err = eventstore.Decode[any](t, m.raw); err == nil {
		next = isDecoded
	}
	return err
}

// decode returns the event of a message. Each handler and attempt gets a value of its own: a handler
// may change it.
func decode[E any](t *eventstore.Types, m *inbound) (eventstore.Event[E], error) {
	if !m.decoding.state.CompareAndSwap(isDecoded, isDecoding) {
		return eventstore.Decode[E](t, m.raw)
	}
	e := m.decoding.event
	m.decoding.state.Store(isUsed)
	data, ok := e.Data.(E)
	if !ok {
		return eventstore.Decode[E](t, m.raw)
	}
	return eventstore.Event[E]{
		ID: e.ID, Stream: e.Stream, Version: e.Version, Position: e.Position, Type: e.Type, Schema: e.Schema,
		Data: data, Metadata: e.Metadata, RecordedAt: e.RecordedAt,
	}, nil
}
