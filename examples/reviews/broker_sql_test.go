package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/kinora-go/kinora/examples/reviews/review"
)

// testBroker opens a broker on the database and closes it at the end of the test. No time ends its batches or its stop: on
// a slow machine, that would deliver acked messages again.
func testBroker(t *testing.T, dsn string, subscriptions int) *sqlBroker {
	t.Helper()
	b, err := newSQLBroker(t.Context(), dsn, subscriptions, review.Category, againTopic)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	b.ackDeadline, b.idleTimeout, b.stopTimeout = time.Hour, time.Hour, time.Hour
	return b
}

// publish publishes count messages with the payloads first, first+1, and so on.
func publish(t *testing.T, b *sqlBroker, topic string, first, count int) {
	t.Helper()
	for count > 0 {
		var batch []*message.Message
		for range min(count, 50) {
			batch = append(batch, message.NewMessage(uuid.NewString(), fmt.Append(nil, first)))
			first, count = first+1, count-1
		}
		require.NoError(t, b.Publish(topic, batch...))
	}
}

func payload(t *testing.T, m *message.Message) (n int) {
	t.Helper()
	_, err := fmt.Sscan(string(m.Payload), &n)
	require.NoError(t, err)
	return n
}

// next returns the next message. It fails the test if none arrives.
func next(t *testing.T, messages <-chan *message.Message) *message.Message {
	t.Helper()
	select {
	case m, ok := <-messages:
		require.True(t, ok, "the subscription ended")
		return m
	case <-time.After(patience):
		require.FailNow(t, "no message")
		return nil
	}
}

func queryTopicInt(t *testing.T, b *sqlBroker, query string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, b.db.QueryRowContext(t.Context(), query, args...).Scan(&n))
	return n
}

// TestBrokerStopsCleanly: after a consumer stops, its acked messages are not delivered again, and
// the next consumer continues with the following message.
func TestBrokerStopsCleanly(t *testing.T) {
	t.Parallel()
	const all = 1200
	b := testBroker(t, postgresDSN(t), 1)
	publish(t, b, review.Category, 0, all)
	want, stops := 0, 0
	for ; want < all; stops++ {
		ctx, cancel := context.WithCancel(t.Context())
		messages, err := b.Subscribe(ctx, review.Category)
		require.NoError(t, err)
		for range min(1+rand.IntN(60), all-want) {
			m := next(t, messages)
			require.Equal(t, want, payload(t, m), "after %d stops", stops)
			want++
			m.Ack()
		}
		cancel() // at once, as a runner does
		for m := range messages {
			require.NotNil(t, m) // delivered and not acked: delivered again
		}
	}
	require.Greater(t, stops, 20)
	left, err := b.unconsumed(t.Context())
	require.NoError(t, err)
	require.Zero(t, left)
}

// TestBrokerClose: Close is safe for concurrent use and commits the acks.
func TestBrokerClose(t *testing.T) {
	t.Parallel()
	dsn := postgresDSN(t)
	b := testBroker(t, dsn, 1)
	publish(t, b, review.Category, 0, 10)
	messages, err := b.Subscribe(t.Context(), review.Category)
	require.NoError(t, err)
	for range 4 {
		next(t, messages).Ack()
	}
	var closed sync.WaitGroup
	for range 4 {
		closed.Go(func() {
			if err := b.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	closed.Wait()
	_, open := <-messages
	require.False(t, open)
	left, err := testBroker(t, dsn, 0).unconsumed(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 6, left)
}

// TestBrokerStopsWhileWaitingForBatch: a consumer that waits for another one's batch stops at once.
func TestBrokerStopsWhileWaitingForBatch(t *testing.T) {
	t.Parallel()
	b := testBroker(t, postgresDSN(t), 2)
	publish(t, b, review.Category, 0, 2)
	first, err := b.Subscribe(t.Context(), review.Category)
	require.NoError(t, err)
	held := next(t, first)
	ctx, cancel := context.WithCancel(t.Context())
	second, err := b.Subscribe(ctx, review.Category)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		return queryTopicInt(t, b, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock' and query like '%watermill_offsets_review%'`) == 1
	}, patience, 10*time.Millisecond)
	cancel()
	select {
	case _, open := <-second:
		require.False(t, open)
	case <-time.After(patience):
		require.FailNow(t, "it does not stop")
	}
	held.Ack()
	next(t, first).Ack()
}

// TestBrokerKeepsBytes: payload and headers arrive unchanged, also if JSON would rewrite them.
func TestBrokerKeepsBytes(t *testing.T) {
	t.Parallel()
	b := testBroker(t, postgresDSN(t), 1)
	sent := message.NewMessage(uuid.NewString(), []byte("{ \"n\": 1E5,\t\"z\": -0, \"z\": \"\\u0000\" }\x00\xff"))
	sent.Metadata.Set("a", "ü \" \\")
	require.NoError(t, b.Publish(review.Category, sent))
	messages, err := b.Subscribe(t.Context(), review.Category)
	require.NoError(t, err)
	m := next(t, messages)
	require.True(t, sent.Equals(m))
	m.Ack()
}

// TestBrokerDeadline: a message that takes too long does not block other consumers and is not lost.
func TestBrokerDeadline(t *testing.T) {
	t.Parallel()
	b := testBroker(t, postgresDSN(t), 2)
	b.ackDeadline = 300 * time.Millisecond
	publish(t, b, review.Category, 0, 3)
	messages, err := b.Subscribe(t.Context(), review.Category)
	require.NoError(t, err)
	// On a slow machine an ack may come after the deadline. Then the message comes again.
	await := func(n int) *message.Message {
		m := next(t, messages)
		for ; payload(t, m) < n; m = next(t, messages) {
			m.Ack()
		}
		require.Equal(t, n, payload(t, m))
		return m
	}
	await(0).Ack()
	slow := await(1)

	publish(t, b, againTopic, 100, 1) // later than the transaction of the slow message
	others, err := b.Subscribe(t.Context(), againTopic)
	require.NoError(t, err)
	other := next(t, others)
	require.Equal(t, 100, payload(t, other))
	other.Ack()
	go func() { // its ack may be too late as well
		for m := range others {
			m.Ack()
		}
	}()
	require.Eventually(t, func() bool {
		n, err := b.unconsumed(t.Context())
		return err == nil && n == 2
	}, patience, 10*time.Millisecond, "the ack before the slow message is committed")
	var locked int
	require.NoError(t, b.db.QueryRowContext(t.Context(),
		`select count(*) from (select from watermill_offsets_review for update nowait) free`).Scan(&locked))
	require.Equal(t, 1, locked, "another process may take over")

	slow.Ack() // too late to count
	await(1).Ack()
	await(2).Ack()
}

// TestBrokerPrunes: only consumed messages are deleted.
func TestBrokerPrunes(t *testing.T) {
	t.Parallel()
	const all, consumed = 2600, 2300 // more than two batches
	dsn := postgresDSN(t)
	b := testBroker(t, dsn, 1)
	publish(t, b, review.Category, 0, all)
	require.NoError(t, b.prune(t.Context()))
	require.Equal(t, all, queryTopicInt(t, b, `select count(*) from watermill_review`), "no message is consumed yet")
	ctx, cancel := context.WithCancel(t.Context())
	messages, err := b.Subscribe(ctx, review.Category)
	require.NoError(t, err)
	for range consumed {
		next(t, messages).Ack()
	}
	cancel()
	for range messages {
	}
	require.NoError(t, b.prune(t.Context()))
	require.Equal(t, all-consumed, queryTopicInt(t, b, `select count(*) from watermill_review`))

	often := testBroker(t, dsn, 1)
	often.pruneInterval = 10 * time.Millisecond
	messages, err = often.Subscribe(t.Context(), review.Category)
	require.NoError(t, err)
	for n := consumed; n < all; n++ {
		m := next(t, messages)
		require.Equal(t, n, payload(t, m))
		m.Ack()
	}
	require.Eventually(t, func() bool { return queryTopicInt(t, b, `select count(*) from watermill_review`) == 0 },
		patience, 10*time.Millisecond)
}

// noneParked is a store without parked messages.
type noneParked struct{}

func (noneParked) ParkedCount(context.Context, string) (int64, error) { return 0, nil }

// TestBrokerKeepsMessagesOfOtherGroups: messages that another group has not acked are not deleted.
func TestBrokerKeepsMessagesOfOtherGroups(t *testing.T) {
	t.Parallel()
	b := testBroker(t, postgresDSN(t), 1)
	publish(t, b, review.Category, 0, 10)
	_, err := b.db.ExecContext(t.Context(), `insert into watermill_offsets_review values ('another', 0, '0')`)
	require.NoError(t, err)
	messages, err := b.Subscribe(t.Context(), review.Category)
	require.NoError(t, err)
	for range 10 {
		next(t, messages).Ack()
	}
	require.NoError(t, waitDrained(t.Context(), b, noneParked{}))
	require.NoError(t, b.prune(t.Context()))
	require.Equal(t, 10, queryTopicInt(t, b, `select count(*) from watermill_review`))
}

// TestBrokerCreatesTablesOnce: processes that start at the same time all find the tables.
func TestBrokerCreatesTablesOnce(t *testing.T) {
	t.Parallel()
	dsn := postgresDSN(t)
	var started sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		started.Go(func() {
			b, err := newSQLBroker(t.Context(), dsn, 0, review.Category, againTopic)
			if errs[i] = err; err == nil {
				errs[i] = b.Close()
			}
		})
	}
	started.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
}

// TestBrokerIdlePollWritesNothing: a poll of a topic without new messages assigns no transaction
// id.
func TestBrokerIdlePollWritesNothing(t *testing.T) {
	t.Parallel()
	dsn := postgresDSN(t)
	b := testBroker(t, dsn, 1)
	publish(t, b, review.Category, 0, 1)
	messages, err := b.Subscribe(t.Context(), review.Category)
	require.NoError(t, err)
	readTopic := func() (drew bool) {
		tx, err := idleTimeoutDB{b.db, b.idleTimeout}.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback()) }()
		q := b.schema.SelectQuery(review.Category, consumerGroup, nil)
		rows, err := tx.QueryContext(t.Context(), q.Query, q.Args...)
		require.NoError(t, err)
		for rows.Next() {
		}
		require.NoError(t, rows.Err())
		require.NoError(t, tx.QueryRowContext(t.Context(), `select pg_current_xact_id_if_assigned() is not null`).Scan(&drew))
		return drew
	}
	next(t, messages).Ack()
	require.NoError(t, waitDrained(t.Context(), b, noneParked{}))
	require.False(t, readTopic())
	require.NoError(t, b.Close())

	b = testBroker(t, dsn, 0)
	publish(t, b, review.Category, 1, 1)
	require.Eventually(t, readTopic, patience, 10*time.Millisecond, "a poll locks the offset if there are new messages")
}

// TestBrokerChecksConnections: a server with too few connections is refused. The error has the
// numbers.
func TestBrokerChecksConnections(t *testing.T) {
	t.Parallel()
	dsn := postgresDSN(t)
	b := testBroker(t, dsn, 0)
	gives := queryTopicInt(t, b, `select current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int`)
	pool := func(n int) string { return with(dsn, fmt.Sprintf("pool_max_conns=%d", n)) }
	_, err := newSQLBroker(t.Context(), pool(gives-1), 1, review.Category)
	require.ErrorContains(t, err, fmt.Sprintf("may open %d connections (pool_max_conns %d, the broker 3), but the server allows %d in total", gives+2, gives-1, gives))
	exact, err := newSQLBroker(t.Context(), pool(gives-3), 1, review.Category)
	require.NoError(t, err)
	require.NoError(t, exact.Close())

	_, err = newSQLBroker(t.Context(), "postgres://ann:hunter2@127.0.0.1:1/none?connect_timeout=2", 1, review.Category)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hunter2")
}

// TestBrokerStalledConsumer: a consumer that hangs loses its batch to another consumer.
func TestBrokerStalledConsumer(t *testing.T) {
	t.Parallel()
	b := testBroker(t, postgresDSN(t), 2)
	b.idleTimeout = 300 * time.Millisecond
	publish(t, b, review.Category, 0, 1)
	first, err := b.Subscribe(t.Context(), review.Category)
	require.NoError(t, err)
	held := next(t, first)
	second, err := b.Subscribe(t.Context(), review.Category)
	require.NoError(t, err)
	m := next(t, second)
	require.Equal(t, held.UUID, m.UUID)
	m.Ack()
	held.Ack()
	for _, messages := range []<-chan *message.Message{first, second} { // after a pause of a slow machine it comes again
		go func() {
			for m := range messages {
				m.Ack()
			}
		}()
	}
	require.NoError(t, waitDrained(t.Context(), b, noneParked{}))
}

// TestBrokerRefusesTopicsOfAnotherCluster: transaction ids that this cluster has not reached are
// refused, and the remedy in the error works.
func TestBrokerRefusesTopicsOfAnotherCluster(t *testing.T) {
	t.Parallel()
	dsn := postgresDSN(t)
	b := testBroker(t, dsn, 1)
	for _, stmt := range []string{
		`insert into watermill_review (uuid, transaction_id) values ('x', '123456789012')`,
		`delete from watermill_review; insert into watermill_offsets_review values ('reviews', 7, '123456789012')`,
	} {
		_, err := b.db.ExecContext(t.Context(), stmt)
		require.NoError(t, err)
		_, err = newSQLBroker(t.Context(), dsn, 0, review.Category)
		require.ErrorContains(t, err, "comes from another cluster")
	}
	// Apply the remedy in the error.
	_, err := b.db.ExecContext(t.Context(), `insert into watermill_review (uuid, transaction_id, metadata) values ('x', '123456789012', '{}');
		update watermill_review set transaction_id = '1'; update watermill_offsets_review set last_processed_transaction_id = '0'`)
	require.NoError(t, err)
	again := testBroker(t, dsn, 1)
	messages, err := again.Subscribe(t.Context(), review.Category)
	require.NoError(t, err)
	publish(t, again, review.Category, 1, 1)
	m := next(t, messages)
	require.Equal(t, "x", m.UUID)
	m.Ack()
	m = next(t, messages)
	require.Equal(t, 1, payload(t, m))
	m.Ack()
}
