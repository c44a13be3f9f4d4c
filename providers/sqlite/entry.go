package sqlite

import (
	"context"
	"database/sql"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// insertEntry takes the creation time from ?6 or, if that is null, from the clock.
const insertEntry = `
insert into kinora_outbox (message_id, topic, key, payload, headers, created_at, next_attempt_at)
values (?1, ?2, ?3, ?4, ?5, coalesce(?6, ` + clock + `), coalesce(?6, ` + clock + `))
on conflict (topic, message_id) do nothing`

// enqueue adds a message created at a time (int64), or now (nil). It reports whether the message
// is new.
func (s session) enqueue(ctx context.Context, m outbox.Message, at any) (bool, error) {
	n, err := s.changed(ctx, insertEntry, m.ID, m.Topic, m.Key, blobOf(m.Payload), headersOf(m.Headers), at)
	return n == 1, err
}

func (s session) enqueueAll(ctx context.Context, ready []outbox.Message) error {
	for _, m := range ready {
		if _, err := s.enqueue(ctx, m, nil); err != nil {
			return err
		}
	}
	return nil
}

// blobOf never returns nil, because the columns are not null.
func blobOf(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

func headersOf(h map[string]string) string {
	if len(h) == 0 {
		return `{}`
	}
	return jsonOf(h)
}

const entryColumns = `id, message_id, topic, key, payload, headers, status, attempts, suspect, token, claimed_by,
	last_error, next_attempt_at, created_at, last_attempt_at, published_at`

func scanEntry(rows *sql.Rows) (e outbox.Entry, err error) {
	var headers string
	var token []byte
	var next, created int64
	var attempted, published sql.NullInt64
	err = rows.Scan(&e.Seq, &e.ID, &e.Topic, &e.Key, &e.Payload, &headers, &e.Status, &e.Attempts, &e.Suspect, &token,
		&e.ClaimedBy, &e.LastError, &next, &created, &attempted, &published)
	if err != nil {
		return e, err
	}
	copy(e.Token[:], token)
	e.Headers, err = provider.ParseHeaders(headers)
	e.Malformed = err != nil
	setTime(&e, &e.NextAttemptAt, sql.NullInt64{Int64: next, Valid: true})
	setTime(&e, &e.CreatedAt, sql.NullInt64{Int64: created, Valid: true})
	setTime(&e, &e.LastAttemptedAt, attempted)
	setTime(&e, &e.PublishedAt, published)
	return e, nil
}

// setTime sets a time of e. If ms is out of range, e is malformed. Null is the zero time.
func setTime(e *outbox.Entry, to *time.Time, ms sql.NullInt64) {
	if !ms.Valid {
		return
	}
	var ok bool
	if *to, ok = provider.StoredTime(timeOf(ms.Int64)); !ok {
		e.Malformed = true
	}
}

// entriesOf returns the entries of a query that selects entryColumns.
func entriesOf(ctx context.Context, q querier, query string, args ...any) ([]outbox.Entry, error) {
	var entries []outbox.Entry
	err := eachRow(ctx, q, func(rows *sql.Rows) error {
		e, err := scanEntry(rows)
		entries = append(entries, e)
		return err
	}, query, args...)
	if err != nil {
		return nil, err
	}
	return entries, nil
}

// tokenOf returns nil (null) for the zero Token, which means no claim.
func tokenOf(t claim.Token) any {
	if t == (claim.Token{}) {
		return nil
	}
	return t[:]
}

// listOf returns a JSON array for json_each, or nil (null), which means all, for an empty list.
func listOf[T any](list []T) any {
	if len(list) == 0 {
		return nil
	}
	return jsonOf(list)
}

// anyOf returns a JSON array for json_each, or nil (null), which means all, for a nil list.
func anyOf[T any](list []T) any {
	if list == nil {
		return nil
	}
	return jsonOf(list)
}

// Enqueued implements provider.Waker.
func (d *Provider) Enqueued() <-chan struct{} { return d.added.wait() }
