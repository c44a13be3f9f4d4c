package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgconn"
)

// nextOffsetSQL locks the group's offset if there are new messages. One consumer of the group gets
// the lock and holds it until its batch is acked. The others wait here until that consumer commits
// or ends.
const nextOffsetSQL = `
select offset_acked, last_processed_transaction_id from {offsets} o
where consumer_group = $1 and exists (
	select from {messages} m
	where (m.transaction_id, m."offset") > (o.last_processed_transaction_id, o.offset_acked)
		and m.transaction_id < pg_snapshot_xmin(pg_current_snapshot()))
for update`

func (o sqlOffsets) NextOffsetQuery(topic, group string) wsql.Query {
	return wsql.Query{Query: o.withTables(topic, nextOffsetSQL), Args: []any{group}}
}

// selectSQL reads the messages after the group's offset. It omits messages that an open transaction
// may still precede.
const selectSQL = `
with place as materialized (%s)
select "offset", transaction_id, uuid, payload, metadata from {messages}
where (transaction_id, "offset") > ((select last_processed_transaction_id from place), (select offset_acked from place))
	and transaction_id < pg_snapshot_xmin(pg_current_snapshot())
order by transaction_id, "offset" limit %d`

func (s sqlSchema) SelectQuery(topic, group string, _ wsql.OffsetsAdapter) wsql.Query {
	next := s.offsets.NextOffsetQuery(topic, group)
	return wsql.Query{Query: fmt.Sprintf(s.offsets.withTables(topic, selectSQL), next.Query, s.SubscribeBatchSize), Args: next.Args}
}

// idleTimeoutDB begins transactions that the server ends if they are idle for too long.
type idleTimeoutDB struct {
	*sql.DB
	timeout time.Duration // how long a transaction may be without a statement
}

func (g idleTimeoutDB) BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error) {
	tx, err := g.DB.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	// Not as a parameter of the connection, which a pooler may refuse.
	if _, err := tx.ExecContext(ctx, fmt.Sprintf(`set local idle_in_transaction_session_timeout = %d`, g.timeout.Milliseconds())); err != nil {
		return nil, errors.Join(err, tx.Rollback())
	}
	return tx, nil
}

// sqlSubscription connects Watermill's subscriber to a runner. The subscriber commits acks at the
// end of a batch. If its context ended first, acked messages would be delivered again. So its
// context outlives the subscription, and the subscriber is closed after it has received the last
// ack.
type sqlSubscription struct {
	inner  *wsql.Subscriber
	in     <-chan *message.Message
	out    chan *message.Message
	ended  chan struct{} // receives when the inner subscriber has ended a transaction
	done   chan struct{} // closed when ended is no longer read
	cancel func()        // cancels the inner subscriber
	limit  time.Duration // of a clean stop

	acked      bool // a message was acked in the open transaction
	ackPending bool // the inner subscriber may not have received the last ack yet
}

// Subscribe subscribes the service's group. The subscription ends with ctx; Close waits for it.
func (b *sqlBroker) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	s := &sqlSubscription{out: make(chan *message.Message), ended: make(chan struct{}), done: make(chan struct{}), limit: b.stopTimeout}
	var err error
	s.inner, err = wsql.NewSubscriber(idleTimeoutDB{b.db, b.idleTimeout}, wsql.SubscriberConfig{
		ConsumerGroup: consumerGroup, AckDeadline: &b.ackDeadline, PollInterval: sqlPoll, ResendInterval: sqlPoll, RetryInterval: sqlRetry,
		BackoffManager: s, SchemaAdapter: b.schema, OffsetsAdapter: b.schema.offsets,
	}, brokerLog())
	if err != nil {
		return nil, err
	}
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.cancel = cancel
	unhook := context.AfterFunc(ctx, cancel)
	if s.in, err = s.inner.Subscribe(life, topic); !unhook() || err != nil {
		cancel()
		close(s.done)
		return nil, errors.Join(err, ctx.Err(), s.inner.Close())
	}
	ctx, end := context.WithCancel(ctx)
	context.AfterFunc(b.lifetime, end)
	b.work.Go(func() {
		defer end()
		s.run(ctx)
	})
	b.pruning.Do(func() { b.work.Go(b.pruneLoop) })
	return s.out, nil
}

func (s *sqlSubscription) run(ctx context.Context) {
	defer close(s.out)
	for ctx.Err() == nil {
		select {
		case m, ok := <-s.in:
			if !ok {
				return
			}
			s.ackPending = false
			s.deliver(ctx, m)
		case <-s.ended:
			s.acked, s.ackPending = false, false
		case <-ctx.Done():
		}
	}
	s.stop()
}

// deliver sends a message to the runner and waits until the runner acks or nacks it. It waits even
// after the ack deadline, when the inner subscriber has released the message. The inner subscriber
// then waits in HandleError, without an open transaction.
func (s *sqlSubscription) deliver(ctx context.Context, m *message.Message) {
	select {
	case s.out <- m:
	case <-m.Context().Done():
		return
	case <-ctx.Done():
		return
	}
	select {
	case <-m.Acked():
	case <-m.Nacked():
		return // the inner subscriber sends the message again
	case <-ctx.Done(): // a runner acks before it ends its subscription
		select {
		case <-m.Acked():
		default:
			return
		}
	}
	s.acked, s.ackPending = true, true
}

// stop closes the inner subscriber after it has committed the acks.
func (s *sqlSubscription) stop() {
	limit := time.AfterFunc(s.limit, s.cancel)
	defer limit.Stop()
	defer s.cancel()
	// Closing now could lose the ack: wait for the subscriber's next step.
	if s.ackPending {
		select {
		case <-s.in:
		case <-s.ended:
			s.acked = false
		}
	}
	close(s.done)
	if !s.acked {
		s.cancel() // nothing to commit, and the subscriber may be waiting for another consumer
	}
	_ = s.inner.Close() // never fails
}

// HandleError is called by the inner subscriber after each transaction. It returns how long to wait
// before the next.
func (s *sqlSubscription) HandleError(log watermill.LoggerAdapter, noMessages bool, err error) time.Duration {
	select {
	case s.ended <- struct{}{}:
	case <-s.done:
		return 0
	}
	const serializationFailure = "40001" // another consumer acked a batch in the meantime
	pg, _ := errors.AsType[*pgconn.PgError](err)
	switch {
	case err == nil && noMessages:
		return sqlPoll
	case err == nil:
	case pg != nil && pg.Code == serializationFailure:
		s.pause(sqlPoll)
	default:
		log.Error("read topic failed", err, watermill.LogFields{"retry_in": sqlRetry})
		s.pause(sqlRetry)
	}
	return 0 // for a longer pause Watermill would add the error to all its later log records
}

func (s *sqlSubscription) pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-s.done:
	}
}
