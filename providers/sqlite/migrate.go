package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path"
	"strings"
	"time"

	"github.com/kinora-go/kinora/internal/migration"
	"github.com/kinora-go/kinora/provider"
	"modernc.org/sqlite"
)

//go:embed migrations/*.sql
var migrations embed.FS

const (
	createMigrations = `create table if not exists kinora_migrations (
    id         integer primary key autoincrement,
    version_id integer not null,
    is_applied integer not null,
    tstamp     text not null default (datetime('now'))
) strict`

	migrationVersion = `select coalesce(max(version_id), 0) from kinora_migrations where is_applied`
	oldestProgram    = `select coalesce(max(oldest), 0) from kinora_migrations where is_applied and version_id > ?1`

	recordMigration = `insert into kinora_migrations (version_id, is_applied) values (?1, 1)`
	recordOldest    = `update kinora_migrations set oldest = ?2 where version_id = ?1`

	oldestSince = 3 // the version that has the column
)

// Migrate brings the file's tables up to date, in one transaction of a connection of its own. Of several
// migrators at once one does the work. The others wait until ctx ends, and log that they wait (slog.Default).
// It changes nothing if a newer program has migrated the file, and returns a *NewerError if this program does not run on it. It
// changes nothing and returns ErrEncoding if the file is not in UTF-8.
func (d *DB) Migrate(ctx context.Context) error {
	err := d.migrate(ctx)
	if err == nil {
		err = d.users.warmUp(ctx)
	}
	return wrap("migrate", err)
}

// ErrReadOnly: the file cannot be written: its rights, or those of its directory, or query_only.
var ErrReadOnly = errors.New("the database is read-only: give the process the right to write the file and its directory, and leave query_only off")

// Ready returns ErrEncoding, ErrReadOnly, a *NewerError if the file's tables are newer than this package runs on, and
// ErrNotMigrated if they are not those of its version or the one before. For the latter it compares the
// tables, not the recorded version.
func (d *DB) Ready(ctx context.Context) error { return d.ReadyFor(ctx, provider.AnyService) }

// ReadyFor implements provider.ReadyChecker. It is Ready: every service has all rights on a file.
func (d *Provider) ReadyFor(ctx context.Context, _ provider.Service) error {
	err := checkFile(ctx, d.users)
	if err == nil {
		err = d.users.checkWritable(ctx)
	}
	if err == nil {
		err = d.users.warmUp(ctx)
	}
	if err == nil || isBusy(err) || ctx.Err() != nil { // the latter two are no fault of the file
		return nil
	}
	return fmt.Errorf("ready: %w", err)
}

const readEncoding = `pragma encoding`

// checkFile refuses a file that is not in UTF-8, or newer than the program runs on; not one without versions.
func checkFile(ctx context.Context, q querier) error {
	var encoding string
	if err := one(ctx, q, []any{&encoding}, readEncoding); err != nil {
		return err
	}
	if encoding != "UTF-8" {
		return fmt.Errorf("the encoding is %s: %w", encoding, ErrEncoding)
	}
	version, err := versionOf(ctx, q)
	var oldest int64
	if known := known(); err == nil && version > known {
		if err = one(ctx, q, []any{&oldest}, oldestProgram, known); err == nil {
			err = migration.Fits(version, known, oldest, nil)
		}
	}
	return err
}

// versionOf returns the version of a file, 0 if it has none.
func versionOf(ctx context.Context, q querier) (version int64, err error) {
	if err = one(ctx, q, []any{&version}, migrationVersion); errors.Is(err, ErrNotMigrated) {
		err = nil
	}
	return version, err
}

// known is the version of the tables that this program knows.
func known() int64 { return int64(len(scripts())) }

// checkWritable returns ErrReadOnly if a connection of the pool cannot write.
func (p *pool) checkWritable(ctx context.Context) error {
	conn, err := p.db.Conn(ctx)
	if err != nil {
		return explain(err)
	}
	defer func() { _ = conn.Close() }()
	return checkWritable(ctx, conn)
}

func checkWritable(ctx context.Context, conn *sql.Conn) error {
	var queryOnly, readOnly bool
	err := conn.QueryRowContext(ctx, `pragma query_only`).Scan(&queryOnly)
	if err != nil {
		return explain(err)
	}
	err = conn.Raw(func(c any) (err error) {
		if c, ok := c.(driverConn); ok {
			readOnly, err = c.IsReadOnly("main")
		}
		return err
	})
	if queryOnly || readOnly {
		return ErrReadOnly
	}
	return explain(err)
}

func (d *Provider) migrate(ctx context.Context) (err error) {
	if err := d.notInside(ctx); err != nil {
		return err
	}
	connector, err := sqlite.NewConnector(dsn(d.path, 0))
	if err != nil {
		return err
	}
	db := sql.OpenDB(connector)
	db.SetMaxOpenConns(1)
	defer func() { err = errors.Join(err, db.Close()) }() // rolls back
	// The write lock comes before the look at the version, so that migrators run one after another.
	say := time.AfterFunc(2*time.Second, func() {
		slog.Warn("the migration waits for the write lock of the file, which another connection or process has", "file", d.path)
	})
	err = retryBusy(ctx, func() error {
		_, err := db.ExecContext(ctx, `begin immediate`)
		return err
	})
	say.Stop()
	if err == nil {
		err = checkFile(ctx, &pool{db: db})
	}
	if err != nil {
		return err
	}
	if err := up(ctx, db, scripts()); err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, `commit`)
	return err
}

// up applies the migrations that the file does not have. db has one connection, in a write transaction.
func up(ctx context.Context, db *sql.DB, all []script) error {
	if _, err := db.ExecContext(ctx, createMigrations); err != nil {
		return err
	}
	var version int
	if err := db.QueryRowContext(ctx, migrationVersion).Scan(&version); err != nil {
		return err
	}
	for i, m := range all {
		if i < version {
			continue
		}
		_, err := db.ExecContext(ctx, m.text)
		if err == nil {
			_, err = db.ExecContext(ctx, recordMigration, i+1)
		}
		if err == nil && i+1 >= oldestSince {
			_, err = db.ExecContext(ctx, recordOldest, i+1, migration.Oldest(m.text))
		}
		if err != nil {
			return wrap(m.name, err)
		}
	}
	return nil
}

// MigrationSQL is what Migrate runs, for those who run it by other means. Its last lines record the versions, as Migrate does.
func MigrationSQL() string {
	var all strings.Builder
	all.WriteString(createMigrations + ";\n")
	for _, m := range scripts() {
		fmt.Fprintf(&all, "-- %s\n%s\n", m.name, strings.TrimSpace(m.text))
	}
	for i, m := range scripts() {
		fmt.Fprintf(&all, "insert into kinora_migrations (version_id, is_applied, oldest) values (%d, 1, %d);\n", i+1, migration.Oldest(m.text))
	}
	return all.String()
}

// script is a file of SQL statements.
type script struct{ name, text string }

// scripts returns the migrations in order. The first makes version 1.
func scripts() (all []script) {
	files, _ := fs.Glob(migrations, "migrations/*.sql") // never fails: the pattern is valid
	for _, file := range files {
		text, _ := migrations.ReadFile(file) // never fails: the file is part of the program
		all = append(all, script{path.Base(file), string(text)})
	}
	return all
}
