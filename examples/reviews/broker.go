package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
)

// broker carries messages from the relay to the runner.
type broker interface {
	message.Publisher
	message.Subscriber // Close closes both, and may be called again
	unconsumer
}

// unconsumer tells how much is still on its way. With a broker that keeps messages, what is published need not
// be applied yet.
type unconsumer interface {
	// unconsumed counts the messages that are published and not acked yet, in all topics.
	unconsumed(ctx context.Context) (int64, error)
}

const (
	memoryKind = "memory"
	sqlKind    = "sql"
)

// checkBroker refuses what cannot work before anything is opened.
func checkBroker(kind string, d database) error {
	if kind == sqlKind && d.kind != "postgres" {
		return errors.New("--broker sql keeps its topics in PostgreSQL: it wants --db postgres://…")
	}
	return nil
}

// openBroker opens a broker for a process with so many subscriptions. Close it after what uses it has stopped.
func openBroker(ctx context.Context, kind string, d database, subscriptions int, topics ...string) (broker, error) {
	if err := checkBroker(kind, d); err != nil {
		return nil, err
	}
	if kind == sqlKind {
		return newSQLBroker(ctx, d.path, subscriptions, topics...)
	}
	return newBroker(), nil
}

// memoryBroker is an in-process broker that waits for acks. One that does not would take a message, let the
// relay mark it published, and lose it in a crash: such a broker keeps nothing.
type memoryBroker struct{ *gochannel.GoChannel }

func newBroker() memoryBroker {
	return memoryBroker{gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, brokerLog())}
}

// unconsumed is none: what is published has been acked.
func (memoryBroker) unconsumed(context.Context) (int64, error) { return 0, nil }

// brokerLog makes Watermill log as the rest does, its remarks on everyday work for debugging only.
func brokerLog() watermill.LoggerAdapter {
	everyday := map[slog.Level]slog.Level{slog.LevelInfo: slog.LevelDebug}
	return discreet{watermill.NewSlogLoggerWithLevelMapping(slog.Default(), everyday)}
}

// discreet leaves out Watermill's traces: they hold the arguments of statements, which is what people wrote.
type discreet struct{ watermill.LoggerAdapter }

func (discreet) Trace(string, watermill.LogFields) {}

// Error leaves to those who debug what was broken off on purpose, and a rollback that failed after an error that
// is reported by itself: its connection is gone.
func (l discreet) Error(msg string, err error, fields watermill.LogFields) {
	if _, rollback := fields["query_err"]; rollback || errors.Is(err, context.Canceled) {
		l.Debug(msg, fields.Add(watermill.LogFields{"error": err}))
		return
	}
	l.LoggerAdapter.Error(msg, err, fields)
}

func (l discreet) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return discreet{l.LoggerAdapter.With(fields)}
}
