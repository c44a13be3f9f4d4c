package sqlite

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/pressly/goose/v3"
	"modernc.org/sqlite"
)

//go:embed migrations/*.sql
var migrations embed.FS

// migrationsTable lists the migrations that a file has.
const migrationsTable = "kinora_migrations"

// Migrate brings the tables of the file up to date, through a separate connection and in one
// transaction. Of several migrators at once, one does the work while the others wait.
func (d *DB) Migrate(ctx context.Context) error {
	err := d.migrate(ctx)
	if err == nil {
		err = d.users.warmUp(ctx)
	}
	if err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	return nil
}

// Ready returns ErrNotMigrated if the file's tables are not those of this version. It checks the
// tables and not the log of Migrate, because the tables may come from MigrationSQL.
func (d *DB) Ready(ctx context.Context) error {
	if err := d.users.warmUp(ctx); err != nil {
		return fmt.Errorf("ready: %w", err)
	}
	return nil
}

func (d *Provider) migrate(ctx context.Context) (err error) {
	connector, err := sqlite.NewConnector(dsn(d.path, 0))
	if err != nil {
		return err
	}
	db := sql.OpenDB(nested{connector})
	db.SetMaxOpenConns(1)
	// this rolls back an uncommitted transaction
	defer func() { err = errors.Join(err, db.Close()) }()
	scripts, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	provider, err := goose.NewProvider(goose.DialectSQLite3, db, scripts,
		goose.WithTableName(migrationsTable), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return err
	}
	err = retryBusy(ctx, func() error {
		_, err := db.ExecContext(ctx, `begin immediate`)
		return err
	})
	if err != nil {
		return err
	}
	if _, err := provider.Up(ctx); err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, `commit`)
	return err
}

// MigrationSQL returns the SQL that Migrate runs, for other migration tools.
func MigrationSQL() string {
	var all strings.Builder
	files, _ := fs.Glob(migrations, "migrations/*.sql") // the pattern is valid
	for _, file := range files {
		script, _ := migrations.ReadFile(file) // the file is embedded
		fmt.Fprintf(&all, "-- %s\n%s\n", path.Base(file), strings.TrimPrefix(string(script), "-- +goose Up\n"))
	}
	return all.String()
}

// nested makes connections whose transactions are savepoints of the open transaction. Goose has
// no lock for SQLite, so Migrate takes the write lock before goose reads the list of migrations.
type nested struct{ driver.Connector }

func (n nested) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := n.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return nestedConn{c, c.(sqlite.ExecQuerierContext)}, nil
}

type nestedConn struct {
	driver.Conn
	sqlite.ExecQuerierContext
}

func (c nestedConn) BeginTx(ctx context.Context, _ driver.TxOptions) (driver.Tx, error) {
	_, err := c.ExecContext(ctx, `savepoint kinora_migration`, nil)
	return c, err
}

func (c nestedConn) Commit() error {
	_, err := c.ExecContext(context.Background(), `release kinora_migration`, nil)
	return err
}

func (c nestedConn) Rollback() error {
	_, err := c.ExecContext(context.Background(), `rollback to kinora_migration`, nil)
	return errors.Join(err, c.Commit())
}
