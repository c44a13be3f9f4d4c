package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/internal/crash"
)

// appendQueue makes appends share transactions, because a commit costs more than an append. A few run at a time, each
// alone. When one of them ends, the next transaction takes all that wait, each with its own statement and result.
type appendQueue struct {
	most    int // transactions at a time
	mu      sync.Mutex
	running int
	waiting []*sharedAppend
}

// Limits of a shared transaction. An append that is larger than a share runs alone.
const (
	sharedAppends = 64
	sharedEvents  = 20       // of one append
	sharedBytes   = 32 << 10 // of the data of one append
	// wait for a lock while others wait, as for a stream's row; then the appends of the transaction run alone
	shareLock = 100 * time.Millisecond
)

// sharedAppend is an append in the queue, or in a transaction with others.
type sharedAppend struct {
	*appending
	done  chan struct{} // closed after the transaction
	left  bool          // its caller left before it was sent
	group *shareGroup   // nil while it waits
	at    eventstore.Appended
	err   error // of the transaction, errAlone or errRefused
}

// shareGroup are the appends of one transaction.
type shareGroup struct {
	calls  []*sharedAppend
	left   int  // callers that do not wait any more
	sent   bool // the transaction is about to be sent
	ctx    context.Context
	cancel context.CancelFunc
}

var (
	errAlone   = errors.New("nothing was executed: the append must run alone")
	errRefused = errors.New("nothing was written")
	errLeft    = errors.New("the transaction that the append shares with others is not stopped")
)

// most returns how many transactions of appends run at a time.
func most(conns int32) int { return min(max(2, runtime.GOMAXPROCS(0)), max(1, int(conns)/2)) }

// begin reports whether an append may run alone now. Then end must be called after it. Otherwise s waits.
func (q *appendQueue) begin(s *sharedAppend) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.running < q.most {
		q.running++
		return true
	}
	q.waiting = append(q.waiting, s)
	return false
}

// end ends a transaction. Those that wait share the next one.
func (q *appendQueue) end(db *Provider) {
	if group := q.next(); group != nil {
		go func() {
			for ; group != nil; group = q.next() {
				db.appendTogether(group)
			}
		}()
	}
}

// next returns the appends of the next transaction, or nil if it is not needed.
func (q *appendQueue) next() *shareGroup {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(len(q.waiting), sharedAppends)
	if n == 0 {
		q.running--
		return nil
	}
	g := &shareGroup{calls: slices.Clone(q.waiting[:n])}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	q.waiting = slices.Delete(q.waiting, 0, n)
	for _, s := range g.calls {
		s.group = g
	}
	return g
}

// leave is called if the caller of s does not wait any more. unsent: s has not been sent, and will not be.
// over: it has ended. If no caller of a transaction waits any more, the transaction is stopped.
func (q *appendQueue) leave(s *sharedAppend) (unsent, over bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if i := slices.Index(q.waiting, s); i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
		return true, false
	}
	select {
	case <-s.done:
		return false, true
	default:
	}
	g := s.group
	s.left = !g.sent
	if g.left++; g.left == len(g.calls) {
		g.cancel()
	}
	return !g.sent, false
}

// send returns the appends of a group whose callers wait, in the order of their statements. After it, the
// others cannot leave without an unknown result.
func (q *appendQueue) send(g *shareGroup) []*sharedAppend {
	q.mu.Lock()
	defer q.mu.Unlock()
	g.sent = true
	order := slices.DeleteFunc(slices.Clone(g.calls), func(s *sharedAppend) bool { return s.left })
	// All transactions lock the rows of streams in one order. Appends to one stream keep theirs.
	slices.SortStableFunc(order, func(a, b *sharedAppend) int { return strings.Compare(a.stream, b.stream) })
	return order
}

func isSmall(events []eventstore.Draft) bool {
	bytes := 0
	for i := range events {
		bytes += len(events[i].Data)
	}
	return len(events) <= sharedEvents && bytes <= sharedBytes
}

// share runs the append alone, or with others if too many are running. The results are those of tryOnce.
func (a *appending) share(ctx context.Context) (at eventstore.Appended, sent bool, err error) {
	db := a.db
	s := &sharedAppend{appending: a, done: make(chan struct{})}
	if db.queue.begin(s) {
		end := sync.OnceFunc(func() { db.queue.end(db) }) // while it waits for a lock, it must not stop the others
		late := time.AfterFunc(shareLock, end)
		defer end()
		defer late.Stop()
		return a.tryOnce(ctx)
	}
	select {
	case <-s.done:
	case <-ctx.Done():
		unsent, over := db.queue.leave(s)
		switch {
		case over: // it has a result
		case unsent:
			return at, false, a.wrap(ctx.Err())
		default:
			return at, true, a.wrap(fmt.Errorf("%w: %w", errLeft, ctx.Err()))
		}
	}
	switch {
	case errors.Is(s.err, errAlone):
		return a.tryOnce(ctx)
	case errors.Is(s.err, errRefused):
		a.refusal = true
		at, err = a.refused(ctx, db.pool)
		return at, true, err
	}
	return s.at, true, s.err
}

// appendTogether runs appends in one transaction.
func (db *Provider) appendTogether(g *shareGroup) {
	defer g.cancel()
	defer func() {
		for _, s := range g.calls {
			close(s.done)
		}
	}()
	conn, err := db.acquire(g.ctx)
	order := db.queue.send(g)
	if err == nil {
		defer conn.Release()
		crash.Point("append: before")
		err = db.sendTogether(g.ctx, conn.Conn(), order)
		crash.Point("append: after")
	}
	_, unsent := errors.AsType[pgx.ErrPreprocessingBatch](err)
	for _, s := range order {
		switch {
		case err == nil && s.err == nil:
			db.appended(s.entries)
		case err == nil:
		case conn == nil || unsent || !maybeExecuted(err):
			s.err = errAlone
		default:
			s.err = s.wrap(err)
		}
	}
}

// sendTogether sends the statements in one round trip, which is one transaction without BEGIN.
func (db *Provider) sendTogether(ctx context.Context, conn *pgx.Conn, order []*sharedAppend) error {
	b := &pgx.Batch{}
	b.Queue(db.q(lockTimeoutSQL), shareLock.String())
	for _, s := range order {
		b.Queue(s.sql, s.args...)
	}
	results := conn.SendBatch(ctx, b)
	_, err := results.Exec()
	for _, s := range order {
		if err != nil {
			break
		}
		s.at = eventstore.Appended{Stream: s.stream, Count: len(s.ids), Log: s.log}
		if err = results.QueryRow().Scan(&s.at.Version, &s.at.Position); errors.Is(err, pgx.ErrNoRows) {
			s.err, err = errRefused, nil
		}
	}
	return cmp.Or(err, results.Close())
}
