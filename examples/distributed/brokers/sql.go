package brokers

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
)

// sqlBroker is Watermill's topics in tables of PostgreSQL.
type sqlBroker struct {
	dsn string
	log watermill.LoggerAdapter
}

var sqlSchema = wsql.DefaultPostgreSQLSchema{
	// bytea keeps the bytes of a payload. The default, JSON, refuses other bytes.
	GeneratePayloadType: func(string) string { return "bytea" },
	// The messages that a consumer takes in one transaction. Their acks commit together, so a
	// killed runner gets at most this many messages again.
	SubscribeBatchSize: 50,
}

// Prepare creates the tables of topics. Watermill's statements fail if several processes run them at
// the same time, so they run under a lock.
func (s sqlBroker) Prepare(ctx context.Context, topics ...string) (err error) {
	db, err := s.open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	statements := []wsql.Query{{Query: `select pg_advisory_xact_lock(20261124)`}}
	for _, topic := range topics {
		statements = append(statements, sqlSchema.SchemaInitializingQueries(topic)...)
		statements = append(statements, wsql.DefaultPostgreSQLOffsetsAdapter{}.SchemaInitializingQueries(topic)...)
	}
	for _, q := range statements {
		if _, err := tx.ExecContext(ctx, q.Query, q.Args...); err != nil {
			return wrap("create the topics", err)
		}
	}
	return tx.Commit()
}

func (s sqlBroker) Publisher() (message.Publisher, error) {
	db, err := s.open()
	if err != nil {
		return nil, err
	}
	// One Publish call is one statement: all messages or none.
	p, err := wsql.NewPublisher(db, wsql.PublisherConfig{SchemaAdapter: sqlSchema}, s.log)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return sqlPublisher{p, db}, nil
}

// sqlAckDeadline ends the consumer's transaction if one message takes longer. While such a
// transaction is open, no consumer of any topic in this cluster sees newer messages: Watermill reads
// only messages that are older than every open transaction. A retried message needs this limit.
const sqlAckDeadline = 10 * time.Second

func (s sqlBroker) Subscriber(group string) (message.Subscriber, error) {
	// Connections of its own: a subscription holds one while its messages are handled. In a pool
	// that is shared with the handlers, subscriptions could take them all.
	db, err := s.open()
	if err != nil {
		return nil, err
	}
	deadline := sqlAckDeadline
	sub, err := wsql.NewSubscriber(db, wsql.SubscriberConfig{
		ConsumerGroup:  group, // one of its consumers reads at a time; the others wait for a lock
		AckDeadline:    &deadline,
		PollInterval:   100 * time.Millisecond,
		ResendInterval: 100 * time.Millisecond, // after a nack, in the same transaction
		RetryInterval:  time.Second,            // after an error of the database
		SchemaAdapter:  sqlSchema,
		OffsetsAdapter: wsql.DefaultPostgreSQLOffsetsAdapter{},
	}, s.log)
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return sqlSubscriber{sub, db}, nil
}

func (s sqlBroker) open() (*sql.DB, error) { return sql.Open("pgx", s.dsn) }

// sqlPublisher closes its connections too.
type sqlPublisher struct {
	*wsql.Publisher
	db *sql.DB
}

func (p sqlPublisher) Close() error { return errors.Join(p.Publisher.Close(), p.db.Close()) }

// sqlSubscriber closes its connections too.
type sqlSubscriber struct {
	*wsql.Subscriber
	db *sql.DB
}

func (s sqlSubscriber) Close() error { return errors.Join(s.Subscriber.Close(), s.db.Close()) }
