package sqlite

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/kinora-go/kinora/provider"
	"modernc.org/sqlite"
)

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

// UpWith applies the migrations that the file does not have: those of this version, and the later ones.
func UpWith(ctx context.Context, db *sql.DB, later ...string) error {
	all := scripts()
	for i, text := range later {
		all = append(all, script{fmt.Sprint("later", i), text})
	}
	return up(ctx, db, all)
}
