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
// transaction. Of several migrators at once, one does the work while the others wait. If a newer
// program has migrated the file, Migrate changes nothing and returns a *NewerError. If the file is
// not encoded as UTF-8, it returns ErrEncoding.
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

// Ready returns ErrEncoding, a *NewerError if a newer program has migrated the file, and
// ErrNotMigrated if its tables are not those of this version. For ErrNotMigrated it checks the
// tables, not the log of Migrate.
func (d *DB) Ready(ctx context.Context) error {
	err := checkFile(ctx, d.users)
	if err == nil {
		err = d.users.warmUp(ctx)
	}
	if err != nil {
		return fmt.Errorf("ready: %w", err)
	}
	return nil
}

const (
	readEncoding = `pragma encoding`
	readMigrated = `select coalesce(max(version_id), 0) from kinora_migrations where is_applied`
)

// checkFile returns an error for a file that is not in UTF-8 or is newer than the program. A file
// without a log of versions passes.
func checkFile(ctx context.Context, q querier) error {
	var encoding string
	if err := one(ctx, q, []any{&encoding}, readEncoding); err != nil {
		return err
	}
	if encoding != "UTF-8" {
		return fmt.Errorf("the encoding is %s: %w", encoding, ErrEncoding)
	}
	var version int64
	err := one(ctx, q, []any{&version}, readMigrated)
	files, _ := fs.Glob(migrations, "migrations/*.sql") // the pattern is valid
	switch known := int64(len(files)); {
	case errors.Is(err, ErrNotMigrated):
		return nil
	case err == nil && version > known:
		return &NewerError{Database: version, Program: known}
	}
	return err
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
	if err == nil {
		err = checkFile(ctx, &pool{db: db})
	}
	if err != nil {
		return err
	}
	if _, err := provider.Up(ctx); err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, `commit`)
	return err
}

// MigrationSQL returns the SQL that Migrate runs, for other migration tools. Its last lines record
// the versions, as Migrate does.
func MigrationSQL() string {
	var all strings.Builder
	files, _ := fs.Glob(migrations, "migrations/*.sql") // the pattern is valid
	for _, file := range files {
		script, _ := migrations.ReadFile(file) // the file is embedded
		fmt.Fprintf(&all, "-- %s\n%s\n", path.Base(file), strings.TrimPrefix(string(script), "-- +goose Up\n"))
	}
	fmt.Fprintf(&all, "create table if not exists %s (id integer primary key autoincrement, version_id integer not null, "+
		"is_applied integer not null, tstamp timestamp default (datetime('now')));\n", migrationsTable)
	for v := range len(files) + 1 {
		fmt.Fprintf(&all, "insert into %s (version_id, is_applied) values (%d, 1);\n", migrationsTable, v)
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
