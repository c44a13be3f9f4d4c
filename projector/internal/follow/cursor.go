package follow

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/projector/internal/model"
	"github.com/kinora-go/kinora/provider"
)

// cursor is how far a reader has read the log.
type cursor struct {
	read     int64                // every event up to it is applied; may be behind the checkpoint
	atHead   bool                 // there were no others when it was read
	server   string               // LogPage.Server of the last page
	verified time.Time            // when the log was last compared with the checkpoint
	before   *provider.Checkpoint // has what the segments of earlier splits have applied; nil: nothing
	late     []provider.Began     // handlers that begin behind the checkpoint
	pushed   time.Time            // when a segment moved past events of others last
	next     *ahead
}

// ahead is a page that is read, and whose events are decoded, while the one before it is applied.
type ahead struct {
	after int64
	read  chan struct{}
	page  provider.LogPage
	msgs  []*model.Message
	err   error
}

// wait waits for the page that is read ahead.
func (c *cursor) wait() {
	if c.next != nil {
		<-c.next.read
	}
}

// back begins to read behind a position again.
func (c *cursor) back(to int64) {
	c.wait()
	c.next, c.read, c.atHead = nil, to, false
}

// nextPage returns the page behind the cursor and its messages, and begins to read the one after it.
func (r *Reader) nextPage(ctx context.Context, most int) (provider.LogPage, []*model.Message, error) {
	c := &r.cursor
	got := c.next
	if got == nil || got.after != c.read {
		got = r.readAhead(ctx, c.read, most)
	}
	c.next = nil
	<-got.read
	if got.err == nil && got.page.More && got.page.End.Position > got.after {
		c.next = r.readAhead(ctx, got.page.End.Position, most)
	}
	return got.page, got.msgs, got.err
}

func (r *Reader) readAhead(ctx context.Context, after int64, most int) *ahead {
	a, own := &ahead{after: after, read: make(chan struct{})}, r.own()
	q := provider.LogQuery{After: after, Filter: r.Projector.Rules.Filter, Limit: most}
	if own.segment > 0 {
		q.Share, q.Shares = own.segment-own.split.First, own.split.Count
	}
	log := r.Host.LogID.Load().String()
	go func() {
		if a.page, a.err = r.Host.Page(ctx, q); a.err == nil {
			a.msgs = own.taken(r.Projector.Taken(own.of(a.page.Events), log))
		}
		msgs := a.msgs
		close(a.read)
		r.Projector.DecodeAhead(msgs...)
	}()
	return a
}

// own are the events that a reader is to apply, as of the moment when it begins to read a page.
type own struct {
	segment int // 0: all
	split   provider.Split
	before  *provider.Checkpoint
	late    []provider.Began
}

func (r *Reader) own() own { return own{r.Segment, r.at.Split(), r.cursor.before, r.cursor.late} }

// of returns those of the events that the reader is to apply: not applied yet, and of its segment.
func (o *own) of(events []eventstore.Raw) []eventstore.Raw {
	if o.segment == 0 && o.before == nil {
		return events
	}
	return slices.DeleteFunc(slices.Clone(events), func(e eventstore.Raw) bool {
		return o.segment > 0 && o.split.Of(e.Stream) != o.segment || o.before != nil && o.before.Applied(e.Stream, e.Position)
	})
}

// taken removes the handlers of messages that begin behind them: handlers that were added while some
// segments were ahead of the checkpoint. Messages without another handler are left out.
func (o *own) taken(msgs []*model.Message) []*model.Message {
	if len(o.late) == 0 {
		return msgs
	}
	return slices.DeleteFunc(msgs, func(m *model.Message) bool {
		had := len(m.Handlers)
		m.Handlers = slices.DeleteFunc(slices.Clone(m.Handlers), func(h provider.Handler) bool {
			return slices.ContainsFunc(o.late, func(b provider.Began) bool {
				return b.Type == m.Raw.Type && b.Handler == h.Name && m.Position <= b.Position
			})
		})
		return had > 0 && len(m.Handlers) == 0
	})
}

// lateOf returns the handlers that begin behind the place of a checkpoint.
func lateOf(c *provider.Checkpoint) (late []provider.Began) {
	for _, b := range c.Handlers {
		if b.Position > c.Place.Position {
			late = append(late, b)
		}
	}
	return late
}

// ErrServer: the page was read from another server than the one before it.
var ErrServer = errors.New("the server of the log was restarted or replaced")

// check is called with each page before it is applied. If the server has changed, the log may be an
// older one: the reader compares its checkpoint with the log, and begins there again.
func (r *Reader) check(ctx context.Context, page *provider.LogPage) error {
	if page.Server == r.cursor.server {
		return nil
	}
	if err := r.verify(ctx); err != nil {
		return err
	}
	first := r.cursor.server == ""
	if r.cursor.server = page.Server; first {
		return nil
	}
	r.cursor.next, r.cursor.read, r.cursor.atHead = nil, r.at.Place.Position, false
	return ErrServer
}

// verify is verifyLog for the checkpoint of the reader.
func (r *Reader) verify(ctx context.Context) error { return r.verifyLog(ctx, r.Build, r.at) }

// checkedPage reads a page, and checks it.
func (r *Reader) checkedPage(ctx context.Context, q provider.LogQuery) (provider.LogPage, error) {
	page, err := r.Host.Page(ctx, q)
	if err == nil {
		err = r.check(ctx, &page)
	}
	return page, err
}

// Forget forgets the page that is read ahead.
func (r *Reader) Forget() { r.cursor.next = nil }
