package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/kinora-go/kinora/outbox"
)

// broker carries messages from the relay to the runner.
type broker interface {
	message.Publisher
	message.Subscriber // Close closes both, and may be called again
}

// demoBroker is a broker of the demo.
type demoBroker interface {
	broker
	unconsumedCounter
}

// unconsumedCounter counts the messages in flight: a broker may store published messages before
// they are applied.
type unconsumedCounter interface {
	// unconsumed counts the messages of all topics that are published and not acked yet.
	unconsumed(ctx context.Context) (int64, error)
}

// The values of --broker.
const (
	noneKind   = "none"
	memoryKind = "memory"
	sqlKind    = "sql"
	natsKind   = "nats"
	redisKind  = "redis"
	kafkaKind  = "kafka"
)

// brokerURL is the address of a broker that is a server of its own.
type brokerURL struct {
	BrokerURL string `name:"broker-url" env:"REVIEWS_BROKER_URL" placeholder:"URL" help:"The address of the broker of --broker nats, redis or kafka. Default: nats://127.0.0.1:4222, redis://127.0.0.1:6379/0 or kafka://127.0.0.1:9092. Several hosts are separated by commas."`
}

// of returns the broker of a kind.
func (u brokerURL) at(kind string) brokerAddress { return brokerAddress{kind: kind, url: u.BrokerURL} }

// brokerAddress is a broker.
type brokerAddress struct {
	kind, url   string
	ackDeadline time.Duration // of sqlKind. Zero means sqlAckDeadline.
}

// routeFor returns the topics of events. Without a broker they have none, and so no entries in the
// outbox.
func routeFor(broker string) outbox.Route {
	if broker == noneKind {
		return nil
	}
	return outbox.ByCategory
}

// check checks the flags before anything is opened.
func (a brokerAddress) check(d database) error {
	remote := a.kind == natsKind || a.kind == redisKind || a.kind == kafkaKind
	switch {
	case a.kind == sqlKind && d.kind != "postgres":
		return errors.New("--broker sql stores its topics in PostgreSQL: use --db postgres://…")
	case remote && a.url != "" && !strings.HasPrefix(a.url, a.kind+"://"):
		return fmt.Errorf("--broker-url must begin with %s://, as --broker is %s", a.kind, a.kind)
	}
	return nil
}

// open opens the broker for a process with the given number of subscriptions. Close the broker
// after its users have stopped.
func (a brokerAddress) open(ctx context.Context, d database, subscriptions int, topics ...string) (broker, error) {
	if err := a.check(d); err != nil {
		return nil, err
	}
	switch a.kind {
	case sqlKind:
		b, err := newSQLBroker(ctx, d.path, subscriptions, topics...)
		if err == nil && a.ackDeadline > 0 {
			b.ackDeadline, b.idleTimeout = a.ackDeadline, max(sqlIdle, 2*a.ackDeadline)
		}
		return b, err
	case natsKind, redisKind, kafkaKind:
		return newRemoteBroker(ctx, a, topics...)
	}
	return newBroker(), nil
}

// openDemo opens a broker of the demo.
func (a brokerAddress) openDemo(ctx context.Context, d database, subscriptions int, topics ...string) (demoBroker, error) {
	b, err := a.open(ctx, d, subscriptions, topics...)
	if err != nil {
		return nil, err
	}
	return b.(demoBroker), nil // --broker has no other kind there
}

// memoryBroker is an in-process broker that waits for acks. Without that wait the relay would mark
// messages as published that a crash then loses, because the broker stores nothing.
type memoryBroker struct{ *gochannel.GoChannel }

func newBroker() memoryBroker {
	return memoryBroker{gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, brokerLog())}
}

// unconsumed returns 0: Publish waits for the acks.
func (memoryBroker) unconsumed(context.Context) (int64, error) { return 0, nil }

// brokerLog returns a logger for Watermill on the default slog logger. Watermill's info records
// become debug records.
func brokerLog() watermill.LoggerAdapter {
	levels := map[slog.Level]slog.Level{slog.LevelInfo: slog.LevelDebug}
	return filteredLogger{watermill.NewSlogLoggerWithLevelMapping(slog.Default(), levels)}
}

// filteredLogger drops Watermill's trace records: they contain the arguments of statements, and so
// text that people wrote.
type filteredLogger struct{ watermill.LoggerAdapter }

func (filteredLogger) Trace(string, watermill.LogFields) {}

// Error logs two kinds of errors as debug records: those of a canceled context, and those of a
// rollback after a query failed, because the error of the query is reported separately.
func (l filteredLogger) Error(msg string, err error, fields watermill.LogFields) {
	if _, rollback := fields["query_err"]; rollback || errors.Is(err, context.Canceled) {
		l.Debug(msg, fields.Add(watermill.LogFields{"error": err}))
		return
	}
	l.LoggerAdapter.Error(msg, err, fields)
}

func (l filteredLogger) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return filteredLogger{l.LoggerAdapter.With(fields)}
}
