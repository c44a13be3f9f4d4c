package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/provider"
	"modernc.org/sqlite"
)

// EntryCandidates and TakeEntry are the steps of ClaimEntries.
func (d *Provider) EntryCandidates(ctx context.Context, q provider.EntryQuery, limit int) ([]provider.Entry, error) {
	if err := provider.CheckQuery(q); err != nil {
		return nil, fmt.Errorf("read candidates: %w", err)
	}
	entries, err := candidatesOf(ctx, d.reads, q, limit)
	return result(entries, "read candidates", err)
}

func (d *Provider) TakeEntry(ctx context.Context, e provider.Entry, q provider.EntryQuery, t claim.Terms) (taken provider.Entry, ok bool, err error) {
	if t, err = t.WithDefaults(); err != nil {
		return e, false, err
	}
	err = d.writeTx(ctx, func(u *unit) error {
		taken, ok, err = u.take(ctx, e, q, t)
		return err
	})
	if err != nil {
		return e, false, fmt.Errorf("take entry %d: %w", e.Seq, err)
	}
	return taken, ok, nil
}

// TakeTask is a step of ClaimTasks.
func (d *Provider) TakeTask(ctx context.Context, c provider.Task, q provider.TaskQuery, t claim.Terms) (taken provider.Task, ok bool, err error) {
	if t, err = t.WithDefaults(); err != nil {
		return c, false, err
	}
	err = d.writeTx(ctx, func(u *unit) error {
		r, now, err := u.task(ctx, c.ID)
		if errors.Is(err, sql.ErrNoRows) || err == nil && !r.IsAsRead(&c) {
			return nil
		}
		if err == nil {
			taken, ok, err = u.takeTask(ctx, r, q, t, now)
		}
		return err
	})
	if err != nil {
		return c, false, fmt.Errorf("take task %s: %w", c.ID, err)
	}
	return taken, ok, nil
}

// DryRun is a dry run of tx, a transaction of conn.
type DryRun struct {
	*dryRun
	conn *sql.Conn
}

// StartDryRun watches tx until Stop.
func StartDryRun(ctx context.Context, conn *sql.Conn, tx *sql.Tx) (*DryRun, error) {
	d := &DryRun{newDryRun(), conn}
	d.tx = tx
	if _, err := tx.ExecContext(ctx, beginDryRun); err != nil {
		return nil, err
	}
	return d, d.hook(d.note)
}

func (d *DryRun) hook(fn sqlite.PreUpdateHookFn) error {
	return d.conn.Raw(func(c any) error {
		h, ok := c.(sqlite.HookRegisterer)
		if !ok {
			return fmt.Errorf("connections of type %T do not report changes", c)
		}
		h.RegisterPreUpdateHook(fn)
		return nil
	})
}

func (d *DryRun) Changes(ctx context.Context) ([]provider.Change, error) { return d.changes(ctx) }
func (d *DryRun) Limit(rows int)                                         { d.limit = rows }
func (d *DryRun) Stop()                                                  { _ = d.hook(nil) }

const OldestSince = oldestSince

// Migrations returns the texts of the migrations.
func Migrations() (all []string) {
	for _, m := range scripts() {
		all = append(all, m.text)
	}
	return all
}

// UpTo applies the migrations up to a version.
func UpTo(ctx context.Context, db *sql.DB, version int) error {
	return up(ctx, db, scripts()[:version])
}

// UpWith applies the migrations that the file does not have: those of this version, and the later ones.
func UpWith(ctx context.Context, db *sql.DB, later ...string) error {
	all := scripts()
	for i, text := range later {
		all = append(all, script{fmt.Sprint("later", i), text})
	}
	return up(ctx, db, all)
}
