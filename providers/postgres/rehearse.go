package postgres

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/projector"
)

// A rehearsal sees what changed from two sides: new versions of rows from inside its transaction, old ones from
// another, on a connection of its own. Which tables to look at, the server's own counts say; they may hold more of earlier
// transactions, so that the difference counts.
const (
	countChangesSQL = `
select relid::bigint, n_tup_ins, n_tup_upd, n_tup_del, format('%I.%I', schemaname, relname),
	case when pg_table_is_visible(relid) then relname::text else schemaname || '.' || relname end
from pg_stat_xact_user_tables where schemaname <> $1::text and schemaname !~ '^pg_temp_' and n_tup_ins + n_tup_upd + n_tup_del > 0`

	rehearsalSQL = `select current_setting('track_counts') = 'on', pg_current_xact_id()::text`

	// How the texts of values look is set in a session, or by the handler.
	formatsSQL = `
select current_setting('TimeZone'), current_setting('DateStyle'), current_setting('IntervalStyle'), current_setting('bytea_output'),
	current_setting('extra_float_digits'), current_setting('lc_monetary')`
	setFormatsSQL = `
select set_config('TimeZone', $1::text, true), set_config('DateStyle', $2::text, true), set_config('IntervalStyle', $3::text, true),
	set_config('bytea_output', $4::text, true), set_config('extra_float_digits', $5::text, true), set_config('lc_monetary', $6::text, true)`

	// What waits for the unit's locks may be before the look from outside, and would wait for it: that is no deadlock to the server.
	asideSQL = `select set_config('lock_timeout', '1s', true)`

	checkNowSQL = `set constraints all immediate`
)

// changed is a table that a rehearsed unit changed, and how many rows of it were inserted, updated and deleted, those counted
// that were undone.
type changed struct {
	relid         int64
	ins, upd, del int64
	name          string // as SQL has it
	told          string // as Change has it
}

var errNoCounts = errors.New("a rehearsal needs track_counts, which is off on this server")

// rehearse does all that the unit does, tells what changed, and leaves it to its caller to undo it.
func (db *DB) rehearse(ctx context.Context, s *seat, tx, outside pgx.Tx, w projector.Work, fresh []int, apply func(context.Context, pgx.Tx, []int) ([]outbox.Message, error)) error {
	r := rehearsal{tx: tx, outside: outside}
	var counts bool
	if err := tx.QueryRow(ctx, rehearsalSQL).Scan(&counts, &r.xid); err != nil {
		return class(fmt.Errorf("rehearse: %w", err))
	}
	if !counts {
		return refused("track_counts", errNoCounts)
	}
	before, err := db.countChanges(ctx, tx)
	if err != nil {
		return class(err)
	}
	if _, err := db.apply(ctx, s, tx, w, fresh, apply); err != nil {
		return class(err)
	}
	if err := unended(tx); err != nil {
		return err
	}
	if tx.Conn().PgConn().TxStatus() == 'E' {
		return commit(ctx, tx) // which says so
	}
	changes, err := db.changes(ctx, &r, before)
	if err != nil {
		return class(err)
	}
	w.Rehearse(changes)
	return nil
}

func (db *DB) countChanges(ctx context.Context, tx pgx.Tx) (map[int64]changed, error) {
	rows, err := tx.Query(ctx, countChangesSQL, db.cfg.Schema)
	if err != nil {
		return nil, fmt.Errorf("count changes: %w", err)
	}
	counts := map[int64]changed{}
	var c changed
	if _, err := pgx.ForEachRow(rows, []any{&c.relid, &c.ins, &c.upd, &c.del, &c.name, &c.told}, func() error {
		counts[c.relid] = c
		return nil
	}); err != nil {
		return nil, fmt.Errorf("count changes: %w", err)
	}
	return counts, nil
}

// changes are all of the transaction's, those of deferred triggers included.
func (db *DB) changes(ctx context.Context, r *rehearsal, before map[int64]changed) ([]projector.Change, error) {
	if _, err := r.tx.Exec(ctx, checkNowSQL); err != nil {
		return nil, fmt.Errorf("check what is deferred: %w", err)
	}
	after, err := db.countChanges(ctx, r.tx)
	if err != nil {
		return nil, err
	}
	if err := r.unlocked(ctx); err != nil {
		return nil, err
	}
	var formats [6]any
	var texts [6]string
	for i := range texts {
		formats[i] = &texts[i]
	}
	if err := r.tx.QueryRow(ctx, formatsSQL).Scan(formats[:]...); err != nil {
		return nil, fmt.Errorf("look at formats: %w", err)
	}
	if _, err := r.outside.Exec(ctx, setFormatsSQL, formats[:]...); err != nil {
		return nil, fmt.Errorf("set formats: %w", err)
	}
	var all []projector.Change
	for _, c := range inOrder(after) {
		was := before[c.relid]
		c.ins, c.upd, c.del = c.ins-was.ins, c.upd-was.upd, c.del-was.del
		if c.ins+c.upd+c.del == 0 {
			continue
		}
		some, err := r.table(ctx, c)
		if err != nil {
			return nil, fmt.Errorf("look at what changed in %s: %w", c.told, err)
		}
		all = append(all, some...)
	}
	return all, nil
}

// connConfig is what a connection beside the pool is made with, as its own are.
func connConfig(ctx context.Context, pool *pgxpool.Config) (*pgx.ConnConfig, error) {
	c := pool.ConnConfig.Copy()
	if c.ConnectTimeout <= 0 {
		c.ConnectTimeout = 2 * time.Minute // the pool's
	}
	if pool.BeforeConnect != nil {
		if err := pool.BeforeConnect(ctx, c); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// settle does with a new connection beside the pool what is done with the pool's own. Where that fails, the connection is closed.
func settle(ctx context.Context, pool *pgxpool.Config, conn *pgx.Conn) error {
	if pool.AfterConnect == nil {
		return nil
	}
	err := pool.AfterConnect(ctx, conn)
	if err != nil {
		shut(ctx, conn)
	}
	return err
}

// shut closes a connection, and waits for nobody who does not answer.
func shut(ctx context.Context, conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// aside begins a transaction beside the pool, which may have one connection only, and before the unit's: behind a pooler, others that
// wait for what the unit has locked may have all of the server's connections.
func (db *DB) aside(ctx context.Context) (tx pgx.Tx, end func(), err error) {
	config := db.pool.Config()
	connect, err := connConfig(ctx, config)
	if err != nil {
		return nil, nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, connect)
	if err != nil {
		return nil, nil, err
	}
	end = func() {
		if tx != nil {
			rollback(ctx, tx) // the server notices a connection that is gone a moment later
		}
		shut(ctx, conn)
	}
	if err = settle(ctx, config, conn); err == nil {
		tx, err = conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly})
	}
	if err == nil {
		_, err = tx.Exec(ctx, asideSQL) // also where begin itself is not sent on
	}
	if err != nil {
		end()
		return nil, nil, err
	}
	return tx, end, nil
}
