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

// nextOffsetSQL locks the group's place, if there is something to read. Of several consumers of the group one
// gets it, and has it until its batch is acked; the others wait here, and read on when it is done or dead.
const nextOffsetSQL = `
select offset_acked, last_processed_transaction_id from {offsets} o
where consumer_group = $1 and exists (
	select from {messages} m
	where (m.transaction_id, m."offset") > (o.last_processed_transaction_id, o.offset_acked)
		and m.transaction_id < pg_snapshot_xmin(pg_current_snapshot()))
for update`

func (o sqlOffsets) NextOffsetQuery(topic, group string) wsql.Query {
	return wsql.Query{Query: o.on(topic, nextOffsetSQL), Args: []any{group}}
}

// selectSQL reads what follows the group's place, leaving out what a transaction that is still open may precede.
const selectSQL = `
with place as materialized (%s)
select "offset", transaction_id, uuid, payload, metadata from {messages}
where (transaction_id, "offset") > ((select last_processed_transaction_id from place), (select offset_acked from place))
	and transaction_id < pg_snapshot_xmin(pg_current_snapshot())
order by transaction_id, "offset" limit %d`

func (s sqlSchema) SelectQuery(topic, group string, _ wsql.OffsetsAdapter) wsql.Query {
	next := s.offsets.NextOffsetQuery(topic, group)
	return wsql.Query{Query: fmt.Sprintf(s.offsets.on(topic, selectSQL), next.Query, s.SubscribeBatchSize), Args: next.Args}
}

// guarded begins transactions that the server ends where nobody does.
type guarded struct {
	*sql.DB
	idle time.Duration // for so long it may stand without a statement
}

func (g guarded) BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error) {
	tx, err := g.DB.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	// Not in the connection's parameters, which a pooler may refuse.
	if _, err := tx.ExecContext(ctx, fmt.Sprintf(`set local idle_in_transaction_session_timeout = %d`, g.idle.Milliseconds())); err != nil {
		return nil, errors.Join(err, tx.Rollback())
	}
	return tx, nil
}

// sqlSubscription stands between Watermill's subscriber and a runner. Acks are committed at the end of a batch,
// and the end of the subscriber's context would break that off: what was acked would come again. So that
// context lives on, and the subscriber is closed when it has seen the last ack.
type sqlSubscription struct {
	inner  *wsql.Subscriber
	in     <-chan *message.Message
	out    chan *message.Message
	ended  chan struct{} // the inner subscriber is between two transactions
	done   chan struct{} // nobody listens to ended any more
	cancel func()        // breaks the inner subscriber off

	acked  bool // something was acked in the transaction that is open
	unseen bool // and the inner subscriber may not have noticed the last ack yet
}

// Subscribe subscribes the service's group. The subscription ends with ctx; Close waits for it.
func (b *sqlBroker) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	s := &sqlSubscription{out: make(chan *message.Message), ended: make(chan struct{}), done: make(chan struct{})}
	var err error
	s.inner, err = wsql.NewSubscriber(guarded{b.db, b.idle}, wsql.SubscriberConfig{
		ConsumerGroup: consumerGroup, AckDeadline: &b.wait, PollInterval: sqlPoll, ResendInterval: sqlPoll, RetryInterval: sqlRetry,
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
	context.AfterFunc(b.life, end)
	b.work.Go(func() {
		defer end()
		s.run(ctx)
	})
	b.pruning.Do(func() { b.work.Go(b.pruneAlways) })
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
			s.unseen = false
			s.hand(ctx, m)
		case <-s.ended:
			s.acked, s.unseen = false, false
		case <-ctx.Done():
		}
	}
	s.stop()
}

// hand gives a message to the runner and waits until that is done with it, also where its deadline is over and
// the inner subscriber has given it up: that waits as well then, with no transaction open (HandleError).
func (s *sqlSubscription) hand(ctx context.Context, m *message.Message) {
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
		return // it is sent again
	case <-ctx.Done(): // a runner acks before it ends its subscription
		select {
		case <-m.Acked():
		default:
			return
		}
	}
	s.acked, s.unseen = true, true
}

// stop ends the inner subscriber, after the commit of what was acked.
func (s *sqlSubscription) stop() {
	limit := time.AfterFunc(sqlLimit, s.cancel)
	defer limit.Stop()
	defer s.cancel()
	if s.unseen { // it is on its way to one of these; if it was closed now, it might see that first, and forget the ack
		select {
		case <-s.in:
		case <-s.ended:
			s.acked = false
		}
	}
	close(s.done)
	if !s.acked {
		s.cancel() // there is nothing to commit, and it may be waiting for another consumer
	}
	_ = s.inner.Close() // never fails
}

// HandleError is called by the inner subscriber after each transaction, and says how long to wait for the next.
func (s *sqlSubscription) HandleError(log watermill.LoggerAdapter, nothing bool, err error) time.Duration {
	select {
	case s.ended <- struct{}{}:
	case <-s.done:
		return 0
	}
	const serializationFailure = "40001" // another consumer has acked a batch meanwhile
	pg, _ := errors.AsType[*pgconn.PgError](err)
	switch {
	case err == nil && nothing:
		return sqlPoll
	case err == nil:
	case pg != nil && pg.Code == serializationFailure:
		s.pause(sqlPoll)
	default:
		log.Error("read the topic", err, watermill.LogFields{"again_in": sqlRetry})
		s.pause(sqlRetry)
	}
	return 0 // for a pause after an error, Watermill would keep the error for its later logs, each further one, for ever
}

func (s *sqlSubscription) pause(d time.Duration) {
	select {
	case <-time.After(d):
	case <-s.done:
	}
}
