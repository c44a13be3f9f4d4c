package postgres

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/projector"
)

const parkSQL = `
insert into kinora.parked (projector, handler, message_id, topic, key, payload, headers, class, code, attempts, message_hash)
values ($1::text, $2::text, $3::text, $4::text, $5::text, $6::bytea, $7::bytea, $8::text, $9::text, $10::int, $11::bytea)
on conflict (message_hash, handler, projector) where message_hash <> '' do nothing`

func parkArgs(p projector.Parked) ([]any, error) {
	h, err := headersJSON(p.Headers)
	if err != nil {
		return nil, fmt.Errorf("park: %w", err)
	}
	payload := p.Payload
	if payload == nil {
		payload = []byte{}
	}
	// What is parked may be anything: text that PostgreSQL refuses must not keep it from being set aside. The
	// headers, as bytes, keep the original.
	return []any{p.Projector, p.Handler, storable(p.MessageID), storable(p.Topic), storable(p.Key), payload, []byte(h),
		p.Class.String(), storable(p.Code), p.Attempts, hashOf(p.MessageID)}, nil
}

// hashOf tells ids apart that are the same once they are storable. It is empty for no id.
func hashOf(id string) []byte {
	if id == "" {
		return []byte{}
	}
	h := sha256.Sum256([]byte(id))
	return h[:]
}

func storable(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

const parkedSQL = `
select id, projector, handler, message_id, topic, key, payload, headers, class, code, attempts, parked_at
from kinora.parked where ($1::text = '' or projector = $1::text) and id > $2::bigint order by id limit $3::bigint`

// ParkedMessages implements projector.ParkedInspector.
func (db *DB) ParkedMessages(ctx context.Context, name string, after int64, limit int) ([]projector.Parked, error) {
	if limit <= 0 {
		limit = 100
	}
	rows, err := db.pool.Query(ctx, db.q(parkedSQL), name, after, limit)
	if err == nil {
		var list []projector.Parked
		if list, err = pgx.CollectRows(rows, scanParked); err == nil {
			return list, nil
		}
	}
	return nil, fmt.Errorf("list parked messages: %w", clear(err))
}

const parkedCountSQL = `select count(*) from kinora.parked where $1::text = '' or projector = $1::text`

// ParkedCount implements projector.ParkedInspector.
func (db *DB) ParkedCount(ctx context.Context, name string) (n int64, err error) {
	if err := db.pool.QueryRow(ctx, db.q(parkedCountSQL), name).Scan(&n); err != nil {
		return 0, fmt.Errorf("count parked messages: %w", clear(err))
	}
	return n, nil
}

func scanParked(row pgx.CollectableRow) (projector.Parked, error) {
	var p projector.Parked
	var headers []byte
	var c string
	err := row.Scan(&p.Seq, &p.Projector, &p.Handler, &p.MessageID, &p.Topic, &p.Key, &p.Payload, &headers, &c, &p.Code, &p.Attempts, &p.At)
	if err != nil {
		return p, err
	}
	p.Class, p.At = projector.ParseClass(c), p.At.UTC()
	return p, json.Unmarshal(headers, &p.Headers)
}

// projectorOf is the projector whose handler this is.
func projectorOf(handler string) string {
	name, _, _ := strings.Cut(handler, "/")
	return name
}
