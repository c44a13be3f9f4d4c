package main

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
)

// consumerGroup is the only group that consumes the topics: the service's runners in all processes.
const consumerGroup = "reviews"

const (
	sqlPoll       = 50 * time.Millisecond // between two polls of a topic without new messages
	sqlRetry      = time.Second           // pause after an error of the database
	sqlTimeout    = 5 * time.Second       // of a publication or a clean stop; shorter than a relay's drain
	sqlPruneEvery = 10 * time.Second
	sqlPruneBatch = 1000

	// sqlBatch is how many messages share a transaction of the subscriber, and so the commit of
	// their acks. A crash redelivers at most this many.
	sqlBatch = 100

	// sqlAckDeadline ends the subscriber's transaction when one message takes longer. The
	// transaction has an id, and Watermill reads only messages that are older than every open
	// transaction of the cluster. So no subscriber sees newer messages while the transaction is
	// open. A runner retries a transient error without limit, so the transaction needs a deadline.
	// The runner continues with its message. The message is then delivered once more, and its
	// marker shows that it is applied.
	sqlAckDeadline = 10 * time.Second

	// sqlIdle is how long the server keeps a subscriber's transaction open without a statement. It
	// must be longer than a batch takes. It limits how long a process that hangs or is unreachable
	// holds back the batch of its group and the newer messages of all subscribers (see
	// sqlAckDeadline). When a process ends, even by a crash, its transaction ends at once.
	sqlIdle = time.Minute
)

// sqlBroker is Watermill's SQL Pub/Sub with its topics in the service's database. It has
// connections of its own. Each subscription holds one while messages are handled. In a pool shared
// with the handlers, subscriptions could take all connections, and no handler could finish.
type sqlBroker struct {
	db            *sql.DB
	topics        []string
	pub           *wsql.Publisher
	schema        sqlSchema
	pruneInterval time.Duration // between two runs of prune
	ackDeadline   time.Duration // sqlAckDeadline, except in tests
	idleTimeout   time.Duration // sqlIdle, except in tests
	stopTimeout   time.Duration // sqlTimeout, except in tests

	lifetime context.Context // ends with Close
	cancel   func()
	work     sync.WaitGroup // subscriptions and the prune loop
	pruning  sync.Once
}

var _ broker = (*sqlBroker)(nil)

// newSQLBroker connects, checks that the server allows the connections that this process may open,
// and creates missing tables.
func newSQLBroker(ctx context.Context, dsn string, subscriptions int, topics ...string) (*sqlBroker, error) {
	// Not pgx.ParseConfig, which would send the settings of the pool to the server.
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("open the broker: %w", err) // pgx omits the password
	}
	conn := config.ConnConfig
	// The server plans each statement again: the tables are empty now and may grow soon.
	conn.DefaultQueryExecMode, conn.DescriptionCacheCapacity = pgx.QueryExecModeCacheDescribe, 128
	b := &sqlBroker{db: stdlib.OpenDB(*conn), topics: topics, pruneInterval: sqlPruneEvery, ackDeadline: sqlAckDeadline, idleTimeout: sqlIdle, stopTimeout: sqlTimeout}
	const others = 2 // connections to publish, count and prune
	b.db.SetMaxOpenConns(subscriptions + others)
	b.db.SetMaxIdleConns(subscriptions + others)
	b.schema.DefaultPostgreSQLSchema = wsql.DefaultPostgreSQLSchema{
		// bytea keeps the bytes of a payload. JSON would be rewritten.
		GeneratePayloadType: func(string) string { return "bytea" },
		SubscribeBatchSize:  sqlBatch,
	}
	b.lifetime, b.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err = b.checkConnections(ctx, int(config.MaxConns), subscriptions+others); err == nil {
		err = b.createTables(ctx)
	}
	if err == nil {
		err = b.checkCluster(ctx)
	}
	if err == nil {
		b.pub, err = wsql.NewPublisher(timeoutDB{b.db}, wsql.PublisherConfig{SchemaAdapter: b.schema}, brokerLog())
	}
	if err != nil {
		_ = b.Close()
		return nil, fmt.Errorf("open the broker: %w", err)
	}
	return b, nil
}

// checkConnections returns an error if the server does not allow the connections that this process
// may open. Without the check a lack of connections would look like a slow database.
func (b *sqlBroker) checkConnections(ctx context.Context, pool, own int) error {
	var available int
	err := b.db.QueryRowContext(ctx, `
		select current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
			- coalesce(current_setting('reserved_connections', true), '0')::int`).Scan(&available)
	if err == nil && pool+own > available {
		err = fmt.Errorf("this process may open %d connections (pool_max_conns %d, the broker %d), but the server allows %d in total: "+
			"lower pool_max_conns in the connection string, or raise the server's max_connections", pool+own, pool, own, available)
	}
	return err
}

// createTables creates the tables under a lock, because Watermill's "create table if not exists"
// fails if several processes start at once. If all tables exist, it requires no right to create
// them.
func (b *sqlBroker) createTables(ctx context.Context) error {
	if exist, err := b.tablesExist(ctx); exist || err != nil {
		return err
	}
	tx, err := b.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	statements := []wsql.Query{{Query: `select pg_advisory_xact_lock(20261121)`}}
	for _, topic := range b.topics {
		// The column for message ids is a varchar(36), the length of Kinora's UUIDs.
		statements = append(statements, b.schema.SchemaInitializingQueries(topic)...)
		statements = append(statements, b.schema.offsets.SchemaInitializingQueries(topic)...)
	}
	for _, s := range statements {
		if _, err := tx.ExecContext(ctx, s.Query); err != nil {
			return fmt.Errorf("create the topics: %w", err)
		}
	}
	return tx.Commit()
}

func (b *sqlBroker) tablesExist(ctx context.Context) (exist bool, err error) {
	for _, topic := range b.topics {
		err = b.db.QueryRowContext(ctx, `select to_regclass($1) is not null and to_regclass($2) is not null`,
			b.schema.MessagesTable(topic), b.schema.offsets.MessagesOffsetsTable(topic)).Scan(&exist)
		if err != nil || !exist {
			return false, err
		}
	}
	return true, nil
}

const foreignSQL = `
select exists (select from {offsets} where last_processed_transaction_id >= pg_snapshot_xmax(pg_current_snapshot()))
	or exists (select from {messages} where transaction_id >= pg_snapshot_xmax(pg_current_snapshot()))`

// checkCluster returns an error if the topics were restored into another cluster. Their transaction
// ids have no meaning there, and new messages with lower ids would never be read.
func (b *sqlBroker) checkCluster(ctx context.Context) error {
	for _, topic := range b.topics {
		var foreign bool
		if err := b.db.QueryRowContext(ctx, b.withTables(topic, foreignSQL)).Scan(&foreign); err != nil {
			return err
		}
		if foreign {
			return fmt.Errorf("topic %s comes from another cluster: stop all processes, then set %s.transaction_id to 1 and %s.last_processed_transaction_id to 0; "+
				"all stored messages are then delivered once more", topic, b.schema.MessagesTable(topic), b.schema.offsets.MessagesOffsetsTable(topic))
		}
	}
	return nil
}

// timeoutDB limits the time of Watermill's publications, which take no context, so that a relay can
// drain. A canceled publication may still be committed. The relay then publishes a duplicate.
type timeoutDB struct{ *sql.DB }

func (l timeoutDB) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, sqlTimeout)
	defer cancel()
	return l.DB.ExecContext(ctx, query, args...)
}

// Publish adds messages to a topic in one statement: all of them or none. So a batch keeps its
// order. A key keeps its order too if its next entries are published after this commit, because
// Watermill orders by transaction.
func (b *sqlBroker) Publish(topic string, messages ...*message.Message) error {
	return b.pub.Publish(topic, messages...)
}

// Close ends the subscriptions and waits until all acks are committed, so that no acked message is
// delivered again.
func (b *sqlBroker) Close() error {
	b.cancel()
	b.work.Wait()
	return b.db.Close() // Watermill's Publisher has nothing to close
}

// withTables replaces the placeholders in a statement with the tables of a topic.
func (b *sqlBroker) withTables(topic, statement string) string {
	return b.schema.offsets.withTables(topic, statement)
}

const unconsumedSQL = `
select count(*) from {messages} where (transaction_id, "offset") > (
	coalesce((select last_processed_transaction_id from {offsets} where consumer_group = $1), '0'),
	coalesce((select offset_acked from {offsets} where consumer_group = $1), 0))`

func (b *sqlBroker) unconsumed(ctx context.Context) (total int64, err error) {
	for _, topic := range b.topics {
		var n int64
		if err := b.db.QueryRowContext(ctx, b.withTables(topic, unconsumedSQL), consumerGroup).Scan(&n); err != nil {
			return 0, fmt.Errorf("count unconsumed messages: %w", err)
		}
		total += n
	}
	return total, nil
}

// pruneSQL deletes the messages that every group has acked. Processes that prune at the same time
// delete different rows.
const pruneSQL = `
delete from {messages} where ctid = any (array(
	select m.ctid from {messages} m, (
		select last_processed_transaction_id at_tx, offset_acked at_offset from {offsets} order by 1, 2 limit 1) acked
	where (m.transaction_id, m."offset") <= (acked.at_tx, acked.at_offset)
	order by m.transaction_id, m."offset" limit $1
	for update of m skip locked))`

// prune deletes the consumed messages of all topics. Watermill never deletes them.
func (b *sqlBroker) prune(ctx context.Context) error {
	for _, topic := range b.topics {
		for n := int64(sqlPruneBatch); n == sqlPruneBatch; { // short transactions: see sqlAckDeadline
			r, err := b.db.ExecContext(ctx, b.withTables(topic, pruneSQL), sqlPruneBatch)
			if err == nil {
				n, err = r.RowsAffected()
			}
			if err != nil {
				return fmt.Errorf("prune topic %s: %w", topic, err)
			}
		}
	}
	return nil
}

// pruneLoop prunes until Close. Only a process that subscribes runs it.
func (b *sqlBroker) pruneLoop() {
	for {
		if sleep(b.lifetime, b.pruneInterval) != nil {
			return
		}
		if err := b.prune(b.lifetime); err != nil && b.lifetime.Err() == nil {
			slog.Warn("prune topics failed", "err", err, "retry_in", b.pruneInterval)
		}
	}
}

// sqlSchema reads Watermill's tables by their primary key. Watermill's own statement sorts all
// unconsumed messages for each batch.
type sqlSchema struct {
	wsql.DefaultPostgreSQLSchema
	offsets sqlOffsets
}

// sqlOffsets locks the group's offset only if there are new messages. Watermill's own statement
// always locks it. Each poll then assigns a transaction id and waits for the disk.
type sqlOffsets struct {
	wsql.DefaultPostgreSQLOffsetsAdapter
}

func (o sqlOffsets) withTables(topic, statement string) string {
	return strings.NewReplacer("{messages}", sqlSchema{}.MessagesTable(topic), "{offsets}", o.MessagesOffsetsTable(topic)).Replace(statement)
}
