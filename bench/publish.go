package main

import (
	"context"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
)

// publishers is the number of transactions at a time.
const publishers = 8

// publishLine compares a message that is published in a transaction of the caller, through Kinora's
// publisher and through that of Watermill's forwarder.
func publishLine(db *postgres.DB, peer work) line {
	return line{"outbox/publish-in-tx", "messages/s", "Watermill forwarder, publishing in a transaction",
		program{work: inTx(func(ctx context.Context, tx pgx.Tx) error {
			return outbox.NewPublisher(db.InTx(tx)).Publish("review", message.NewMessage(watermill.NewUUID(), []byte(payload)))
		})},
		program{work: peer},
		program{work: inTx(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, limitPublish, uuid.Must(uuid.NewV7()), []byte(payload), []byte(`{}`))
			return err
		})}}
}

const limitPublish = `insert into lim.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
values ($1::text, 'review', $1::text, $2, $3, now(), now())`

// inTx runs each step in a transaction.
func inTx(step func(ctx context.Context, tx pgx.Tx) error) work {
	return func(ctx context.Context, b *bed) (int64, error) {
		return many(ctx, publishers, 1, func(ctx context.Context, _ string, _ int64) error {
			return pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error { return step(ctx, tx) })
		})
	}
}
