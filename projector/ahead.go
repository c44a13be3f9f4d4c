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
			for _, m := range a.msgs {
				m.ahead = &decoding{}
			}
		}
		msgs := a.msgs
		close(a.read)
		r.decodeAhead(msgs...)
	}()
	return a
}

// decoding is an event that is decoded before its handler runs. Its handler does not wait for that.
type decoding struct {
	begun, done atomic.Bool
	event       eventstore.Event[any]
}

// decodeAhead decodes the events of messages until a handler has overtaken it. An event that cannot
// be decoded is left to its handler.
func (p *projection) decodeAhead(msgs ...*inbound) {
	defer func() { _ = recover() }() // by a decoder of the user: it panics again in the handler
	for _, m := range msgs {
		if len(m.handlers) == 0 {
			continue
		}
		if !m.ahead.begun.CompareAndSwap(false, true) {
			return
		}
		if e, err := eventstore.Decode[any](p.types, m.raw); err == nil {
			m.ahead.event = e
			m.ahead.done.Store(true)
		}
	}
}

// decode returns the event of a message. Each handler and attempt gets a value of its own: a handler
// may change it.
func decode[E any](t *eventstore.Types, m *inbound) (eventstore.Event[E], error) {
	a := m.ahead
	if a == nil || a.begun.CompareAndSwap(false, true) || !a.done.CompareAndSwap(true, false) {
		return eventstore.Decode[E](t, m.raw)
	}
	e := a.event
	data, ok := e.Data.(E)
	if !ok {
		return eventstore.Decode[E](t, m.raw)
	}
	return eventstore.Event[E]{
		ID: e.ID, Stream: e.Stream, Version: e.Version, Position: e.Position, Type: e.Type, Schema: e.Schema,
		Data: data, Metadata: e.Metadata, RecordedAt: e.RecordedAt,
	}, nil
}
