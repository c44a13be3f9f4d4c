package postgres

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/projector"
)

const parkSQL = `
insert into kinora.parked (projector, handler, message_id, topic, key, payload, headers, class, code, attempts, message_hash,
	key_hash, type, holds, version, message_raw, key_raw)
values ($1::text, $2::text, $3::text, $4::text, $5::text, $6::bytea, $7::bytea, $8::text, $9::text, $10::int, $11::bytea,
	$12::bytea, $13::text, $14::boolean, $15::text, $16::bytea, $17::bytea)
on conflict (message_hash, handler, projector) where state <> 'replayed' and message_hash <> '' do nothing`

func parkArgs(p projector.Parked) ([]any, error) {
	h, err := headersJSON(p.Headers)
	if err != nil {
		return nil, fmt.Errorf("park: %w", err)
	}
	payload := p.Payload
	if payload == nil {
		payload = []byte{}
	}
	// What is parked may be anything: text that PostgreSQL refuses must not keep it from being set aside. Id and key are kept as
	// they came, which a replay goes by. Of the headers, NUL is kept, and what is no UTF-8 is replaced.
	return []any{p.Projector, p.Handler, storable(p.MessageID), storable(p.Topic), storable(p.Key), payload, []byte(h),
		p.Class.String(), storable(p.Code), p.Attempts, hashOf(p.MessageID), hashOf(p.Key), storable(p.Type), p.Holds, storable(p.Version),
		rawOf(p.MessageID), rawOf(p.Key)}, nil
}

// hashOf tells ids apart, and keys, that are the same once they are storable. It is empty for none.
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

// rawOf is what storable would change, else nil.
func rawOf(s string) []byte {
	if storable(s) == s {
		return nil
	}
	return []byte(s)
}

const (
	parkedColumns = `p.id, p.projector, p.handler, p.message_id, p.message_raw, p.topic, p.key, p.key_raw, p.type, p.holds, p.payload, p.headers, p.class, p.code,
	p.attempts, p.version, p.parked_at, p.state, p.resolved_at, p.resolved_by, p.reason`

	// What a filter picks; $1 to $7 are its arguments everywhere, and $8 is the limit.
	parkedFilter = `
	p.handler >= '' and ($1::text = '' or p.projector = $1::text) and ($2::text = '' or p.handler = $2::text)
	and ($3::bytea = '' or p.key_hash = $3::bytea) and ($4::text is null or p.class = $4::text) and ($5::text = '' or p.code = $5::text)
	and ($6::bigint[] is null or p.id = any($6::bigint[])) and p.id > $7::bigint`

	parkedSQL = `select ` + parkedColumns + ` from kinora.parked p where p.state = $9::text and ` + parkedFilter + `
	order by p.id limit $8::bigint`
)

func parkedArgs(f projector.ParkedFilter, limit int64) []any {
	if f.Limit > 0 {
		limit = int64(f.Limit)
	}
	var class *string
	if f.Class != nil {
		name := f.Class.String()
		class = &name
	}
	return []any{f.Projector, f.Handler, hashOf(f.Key), class, storable(f.Code), f.Seqs, f.After, limit}
}

// ParkedMessages implements projector.ParkedInspector.
func (db *DB) ParkedMessages(ctx context.Context, f projector.ParkedFilter) ([]projector.Parked, error) {
	args := append([]any{planned}, parkedArgs(f, 100)...)
	rows, err := db.pool.Query(ctx, db.q(parkedSQL), append(args, f.State.String())...)
	if err == nil {
		var list []projector.Parked
		if list, err = pgx.CollectRows(rows, scanParked); err == nil {
			return list, nil
		}
	}
	return nil, fmt.Errorf("list parked messages: %w", clear(err))
}

const parkedCountSQL = `select count(*) from kinora.parked where state = 'parked' and handler >= '' and ($1::text = '' or projector = $1::text)`

// ParkedCount implements projector.ParkedInspector.
func (db *DB) ParkedCount(ctx context.Context, name string) (n int64, err error) {
	if err := db.pool.QueryRow(ctx, db.q(parkedCountSQL), name).Scan(&n); err != nil {
		return 0, fmt.Errorf("count parked messages: %w", clear(err))
	}
	return n, nil
}

func scanParked(row pgx.CollectableRow) (projector.Parked, error) {
	var p projector.Parked
	var headers, rawID, rawKey []byte
	var c, state string
	var resolved *time.Time
	err := row.Scan(&p.Seq, &p.Projector, &p.Handler, &p.MessageID, &rawID, &p.Topic, &p.Key, &rawKey, &p.Type, &p.Holds, &p.Payload, &headers, &c, &p.Code,
		&p.Attempts, &p.Version, &p.At, &state, &resolved, &p.By, &p.Reason)
	if err != nil {
		return p, err
	}
	if rawID != nil {
		p.MessageID = string(rawID)
	}
	if rawKey != nil {
		p.Key = string(rawKey)
	}
	p.Class, p.At = projector.ParseClass(c), p.At.UTC()
	for s := projector.StillParked; s <= projector.Skipped; s++ {
		if s.String() == state {
			p.State = s
		}
	}
	if resolved != nil {
		p.ResolvedAt = resolved.UTC()
	}
	return p, json.Unmarshal(headers, &p.Headers)
}

// projectorOf is the projector whose handler this is.
func projectorOf(handler string) string {
	name, _, _ := strings.Cut(handler, "/")
	return name
}
