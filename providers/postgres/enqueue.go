package postgres

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/crash"
	"github.com/kinora-go/kinora/outbox"
)

const enqueueSQL = `
insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
select n.message_id, n.topic, n.key, n.payload, n.headers, ck.t, ck.t
from (select clock_timestamp() t) ck,
	unnest($1::text[], $2::text[], $3::text[], $4::bytea[], $5::jsonb[]) with ordinality n(message_id, topic, key, payload, headers, o)
order by n.o
on conflict (topic, message_id) do nothing`

// orderedKeysSQL waits for the other transactions that enqueue under these keys, in this order. It comes before
// the entries draw their ids: then these ids follow those of whoever was waited for.
const orderedKeysSQL = `select pg_advisory_xact_lock(k) from unnest($1::bigint[]) with ordinality u(k, o) order by o`

// orderedKeys are the locks of what wants an ordered key, in an order of their own: two calls never wait for one
// another.
func (db *Provider) orderedKeys(ms []outbox.Message) []int64 {
	var locks []int64
	for _, m := range ms {
		if m.OrderedKey && m.Key != "" { // else the key is the message's own id, new to everybody
			locks = append(locks, orderedKey(db.cfg.Schema, m.Topic, m.Key))
		}
	}
	slices.Sort(locks)
	return slices.Compact(locks)
}

// queueEnqueue queues what adds messages to the outbox.
func (db *Provider) queueEnqueue(b *pgx.Batch, ms []outbox.Message) error {
	args, err := db.enqueueArgs(ms)
	if err != nil || args == nil {
		return err
	}
	if locks := db.orderedKeys(ms); len(locks) > 0 {
		b.Queue(orderedKeysSQL, locks)
	}
	b.Queue(db.q(enqueueSQL), args...)
	return nil
}

// Enqueue adds messages to the outbox of the transaction. A message whose id is in the outbox for that topic
// already is ignored. Input that could not be stored is an *eventstore.InvalidError, nothing written.
func (t *Tx) Enqueue(ctx context.Context, ms ...outbox.Message) error {
	b := &pgx.Batch{}
	if err := t.db.queueEnqueue(b, ms); err != nil || b.Len() == 0 {
		return err
	}
	crash.Point("enqueue: before")
	err := t.tx.SendBatch(ctx, b).Close()
	crash.Point("enqueue: after")
	if err != nil {
		return fmt.Errorf("enqueue: %w", clear(err))
	}
	return nil
}

// enqueueArgs is nil where there is nothing to enqueue.
func (db *Provider) enqueueArgs(ms []outbox.Message) ([]any, error) {
	if len(ms) == 0 {
		return nil, nil
	}
	var ids, topics, keys []string
	var payloads [][]byte
	var headers []json.RawMessage
	for i, m := range ms {
		m, err := m.Normalize(db.cfg.MaxPayload)
		if err != nil {
			return nil, fmt.Errorf("enqueue message %d: %w", i, err)
		}
		h, err := headersJSON(m.Headers)
		if err != nil {
			return nil, fmt.Errorf("enqueue message %d: %w", i, err)
		}
		payload := m.Payload
		if payload == nil {
			payload = []byte{}
		}
		ids, topics, keys = append(ids, m.ID), append(topics, m.Topic), append(keys, m.Key)
		payloads, headers = append(payloads, payload), append(headers, h)
	}
	return []any{ids, topics, keys, payloads, headers}, nil
}

func headersJSON(h map[string]string) (json.RawMessage, error) {
	if h == nil {
		h = map[string]string{}
	}
	return json.Marshal(h)
}
