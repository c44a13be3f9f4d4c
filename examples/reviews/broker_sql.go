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

// consumerGroup is the one group that consumes the topics: the service's runners, in whatever processes.
const consumerGroup = "reviews"

const (
	sqlPoll       = 50 * time.Millisecond // between two looks at a topic where nothing is new
	sqlRetry      = time.Second           // after an error of the database
	sqlLimit      = 5 * time.Second       // for a publication, a look, or an orderly end: shorter than a relay's drain
	sqlPruneEvery = 10 * time.Second
	sqlPruneBatch = 1000

	// sqlBatch is how many messages share a transaction of the subscriber, and with it the commit of their acks:
	// what a crash redelivers at most.
	sqlBatch = 100

	// sqlAckDeadline ends the subscriber's transaction when one message takes longer. That transaction has an
	// id, and Watermill reads only what is older than every open one in the cluster: while it is open, no
	// subscriber anywhere sees newer messages. A runner repeats what fails for a passing reason without limit,
	// so there must be an end. The runner goes on with its message all the same; when it is done the message
	// comes once more, and its marker says so.
	sqlAckDeadline = 10 * time.Second

	// sqlIdle is how long the server lets a subscriber's transaction stand without a statement: longer than a
	// batch takes. It bounds what a process that is stopped, or out of reach, holds back: the batch of its
	// group, and what the deadline above says. The end of a process, however sudden, ends its transaction at once.
	sqlIdle = time.Minute
)

// sqlBroker is Watermill's SQL Pub/Sub with its topics in the service's database. Its connections are its own:
// each subscription keeps one while messages are handled, and from a pool that handlers share, subscriptions
// could take all that handlers need to come to an end.
type sqlBroker struct {
	db     *sql.DB
	topics []string
	pub    *wsql.Publisher
	schema sqlSchema
	every  time.Duration // between two prunings
	wait   time.Duration // sqlAckDeadline, but in tests
	idle   time.Duration // sqlIdle, but in tests

	life    context.Context // ends with Close
	end     func()
	work    sync.WaitGroup // subscriptions, and what prunes
	pruning sync.Once
}

var _ broker = (*sqlBroker)(nil)

// newSQLBroker connects, checks that the server has the connections that this process may open, and makes what
// tables the database lacks.
func newSQLBroker(ctx context.Context, dsn string, subscriptions int, topics ...string) (*sqlBroker, error) {
	// pgx.ParseConfig would send the settings of the pool to the server.
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("open the broker: %w", err) // pgx leaves out the password
	}
	conn := config.ConnConfig
	// The server plans each time, for the tables as they are: they are empty now and may be long soon.
	conn.DefaultQueryExecMode, conn.DescriptionCacheCapacity = pgx.QueryExecModeCacheDescribe, 128
	b := &sqlBroker{db: stdlib.OpenDB(*conn), topics: topics, every: sqlPruneEvery, wait: sqlAckDeadline, idle: sqlIdle}
	const others = 2 // connections for publishing, looking, and pruning
	b.db.SetMaxOpenConns(subscriptions + others)
	b.db.SetMaxIdleConns(subscriptions + others)
	b.schema.DefaultPostgreSQLSchema = wsql.DefaultPostgreSQLSchema{
		// A payload is bytes, and goes out as the same bytes each time; JSON would be rewritten.
		GeneratePayloadType: func(string) string { return "bytea" },
		SubscribeBatchSize:  sqlBatch,
	}
	b.life, b.end = context.WithCancel(context.WithoutCancel(ctx))
	if err = b.checkConnections(ctx, int(config.MaxConns), subscriptions+others); err == nil {
		err = b.createTables(ctx)
	}
	if err == nil {
		err = b.checkCluster(ctx)
	}
	if err == nil {
		b.pub, err = wsql.NewPublisher(limited{b.db}, wsql.PublisherConfig{SchemaAdapter: b.schema}, brokerLog())
	}
	if err != nil {
		_ = b.Close()
		return nil, fmt.Errorf("open the broker: %w", err)
	}
	return b, nil
}

// checkConnections: to run out of them later would look like a database that is slow.
func (b *sqlBroker) checkConnections(ctx context.Context, pool, own int) error {
	var gives int
	err := b.db.QueryRowContext(ctx, `
		select current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
			- coalesce(current_setting('reserved_connections', true), '0')::int`).Scan(&gives)
	if err == nil && pool+own > gives {
		err = fmt.Errorf("this process may open %d connections (pool_max_conns %d, the broker %d) and the server gives %d to all: "+
			"lower pool_max_conns in the connection string, or raise the server's max_connections", pool+own, pool, own, gives)
	}
	return err
}

// createTables makes the tables itself, under a lock: Watermill's "create table if not exists" fails in one of
// several processes that start at once. Where all are there it needs no right to create any.
func (b *sqlBroker) createTables(ctx context.Context) error {
	if there, err := b.tablesExist(ctx); there || err != nil {
		return err
	}
	tx, err := b.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	statements := []wsql.Query{{Query: `select pg_advisory_xact_lock(20261121)`}}
	for _, topic := range b.topics {
		// Its column for message ids is a varchar(36): Kinora's are UUIDs, of 36 characters.
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

func (b *sqlBroker) tablesExist(ctx context.Context) (there bool, err error) {
	for _, topic := range b.topics {
		err = b.db.QueryRowContext(ctx, `select to_regclass($1) is not null and to_regclass($2) is not null`,
			b.schema.MessagesTable(topic), b.schema.offsets.MessagesOffsetsTable(topic)).Scan(&there)
		if err != nil || !there {
			return false, err
		}
	}
	return true, nil
}

const foreignSQL = `
select exists (select from {offsets} where last_processed_transaction_id >= pg_snapshot_xmax(pg_current_snapshot()))
	or exists (select from {messages} where transaction_id >= pg_snapshot_xmax(pg_current_snapshot()))`

// checkCluster refuses topics that were restored into another cluster: their transaction ids mean nothing there,
// and new messages, with lower ones, would be passed over.
func (b *sqlBroker) checkCluster(ctx context.Context) error {
	for _, topic := range b.topics {
		var foreign bool
		if err := b.db.QueryRowContext(ctx, b.on(topic, foreignSQL)).Scan(&foreign); err != nil {
			return err
		}
		if foreign {
			return fmt.Errorf("topic %s comes from another cluster: where no process is at work, set %s.transaction_id to 1 and %s.last_processed_transaction_id to 0, "+
				"so that all that is kept is delivered once more", topic, b.schema.MessagesTable(topic), b.schema.offsets.MessagesOffsetsTable(topic))
		}
	}
	return nil
}

// limited limits Watermill's publications, which heed no context: a relay must be able to drain. One that is
// broken off may have been committed all the same; the relay sends it again, and that is a duplicate.
type limited struct{ *sql.DB }

func (l limited) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, sqlLimit)
	defer cancel()
	return l.DB.ExecContext(ctx, query, args...)
}

// Publish adds messages to a topic, all of them in one statement, or none. So a batch keeps its order, and so
// does a key whose next entries are published after these have committed: Watermill orders by transaction.
func (b *sqlBroker) Publish(topic string, messages ...*message.Message) error {
	return b.pub.Publish(topic, messages...)
}

// Close ends subscriptions in good order, so that what was acked does not come again. It waits for that.
func (b *sqlBroker) Close() error {
	b.end()
	b.work.Wait()
	return b.db.Close() // Watermill's Publisher has nothing to close
}

// on puts the tables of a topic into a statement.
func (b *sqlBroker) on(topic, statement string) string { return b.schema.offsets.on(topic, statement) }

const unconsumedSQL = `
select count(*) from {messages} where (transaction_id, "offset") > (
	coalesce((select last_processed_transaction_id from {offsets} where consumer_group = $1), '0'),
	coalesce((select offset_acked from {offsets} where consumer_group = $1), 0))`

func (b *sqlBroker) unconsumed(ctx context.Context) (total int64, err error) {
	for _, topic := range b.topics {
		var n int64
		if err := b.db.QueryRowContext(ctx, b.on(topic, unconsumedSQL), consumerGroup).Scan(&n); err != nil {
			return 0, fmt.Errorf("count what is not consumed: %w", err)
		}
		total += n
	}
	return total, nil
}

// pruneSQL deletes what every group has acked. Processes that prune at the same time take different rows.
const pruneSQL = `
delete from {messages} where ctid = any (array(
	select m.ctid from {messages} m, (
		select last_processed_transaction_id at_tx, offset_acked at_offset from {offsets} order by 1, 2 limit 1) acked
	where (m.transaction_id, m."offset") <= (acked.at_tx, acked.at_offset)
	order by m.transaction_id, m."offset" limit $1
	for update of m skip locked))`

// prune deletes consumed messages of all topics: Watermill keeps them for ever.
func (b *sqlBroker) prune(ctx context.Context) error {
	for _, topic := range b.topics {
		for n := int64(sqlPruneBatch); n == sqlPruneBatch; { // small transactions, for the reason of sqlAckDeadline
			r, err := b.db.ExecContext(ctx, b.on(topic, pruneSQL), sqlPruneBatch)
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

// pruneAlways is for a process that subscribes: one that only publishes has nothing consumed.
func (b *sqlBroker) pruneAlways() {
	for {
		if sleep(b.life, b.every) != nil {
			return
		}
		if err := b.prune(b.life); err != nil && b.life.Err() == nil {
			slog.Warn("prune the topics", "err", err, "again_in", b.every)
		}
	}
}

// sqlSchema is Watermill's tables, read by their primary key. Watermill's own statement sorts all that is not
// consumed yet for each batch.
type sqlSchema struct {
	wsql.DefaultPostgreSQLSchema
	offsets sqlOffsets
}

// sqlOffsets locks the group's place only where there is something to read. Watermill's own statement always
// does, which draws a transaction id and waits for the disk, at every look.
type sqlOffsets struct {
	wsql.DefaultPostgreSQLOffsetsAdapter
}

func (o sqlOffsets) on(topic, statement string) string {
	return strings.NewReplacer("{messages}", sqlSchema{}.MessagesTable(topic), "{offsets}", o.MessagesOffsetsTable(topic)).Replace(statement)
}
