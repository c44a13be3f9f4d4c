package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"modernc.org/sqlite"
)

// checkPath makes path absolute. It refuses paths that name no file.
func checkPath(path string) (string, error) {
	switch {
	case path == "" || path == ":memory:":
		return "", fmt.Errorf("sqlite: open %q: an in-memory database ends with its connection: use package providers/memory", path)
	case strings.HasPrefix(path, "file:"):
		return "", fmt.Errorf("sqlite: open %q: a URI is not a path: open the URI with database/sql and pass the pool to New", path)
	case strings.ContainsRune(path, 0):
		return "", fmt.Errorf("sqlite: open %q: the path has a NUL byte: remove it", path)
	}
	abs, err := filepath.Abs(path)
	return result(abs, fmt.Sprintf("open %s", path), err)
}

// These characters would end the path of a URI, or begin an escape.
var escapePath = strings.NewReplacer("%", "%25", "?", "%3F", "#", "%23")

// dsn returns a URI, which can express every path. Its authority is empty, because a path may
// begin with "//".
func dsn(path string, busy time.Duration) string {
	p := filepath.ToSlash(path)
	if !strings.HasPrefix(p, "/") {
		// a Windows path with a drive letter
		p = "/" + p
	}
	q := url.Values{"_txlock": {"immediate"}, "_pragma": {
		"busy_timeout(" + strconv.FormatInt(busy.Milliseconds(), 10) + ")",
		"foreign_keys(1)", "synchronous(full)",
	}}
	return "file://" + escapePath.Replace(p) + "?" + q.Encode()
}

func setBusyTimeout(ms int64) string { return "pragma busy_timeout = " + strconv.FormatInt(ms, 10) }

// useWAL sets the journal mode. The mode is not part of the dsn, because it is stored in the
// file, and another process may be changing it at the same time.
func useWAL(ctx context.Context, db *sql.DB) error {
	return retryBusy(ctx, func() error {
		var mode string
		if err := db.QueryRowContext(ctx, `pragma journal_mode = wal`).Scan(&mode); err != nil {
			return err
		}
		if mode != "wal" {
			return fmt.Errorf("the journal mode is %s: this file system does not support wal", mode)
		}
		return nil
	})
}

// probe checks whether New can use a pool, and returns the path of its file. It uses one
// connection of the pool.
func probe(ctx context.Context, db *sql.DB) (path string, err error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	// This check comes first: another driver would bring another SQLite library, and closing a
	// file in one library drops the locks that the other holds on the file in this process.
	_, err = conn.ExecContext(ctx, `select kinora_no_such_function()`)
	if _, ok := errors.AsType[*sqlite.Error](err); !ok {
		return "", fmt.Errorf("its driver %T is not the one of modernc.org/sqlite: %w", db.Driver(), err)
	}
	const mainFile = `select file from pragma_database_list where name = 'main'`
	var file sql.NullString
	if err := conn.QueryRowContext(ctx, mainFile).Scan(&file); err != nil {
		return "", err
	}
	if file.String == "" {
		return "", errors.New("its database is in memory: use package providers/memory")
	}
	var mode string
	if err := conn.QueryRowContext(ctx, `pragma journal_mode`).Scan(&mode); err != nil {
		return "", err
	}
	if mode != "wal" {
		return "", fmt.Errorf(`its journal mode is %s: open it with "_pragma=journal_mode(wal)"`, mode)
	}
	if err := checkWritable(ctx, conn); err != nil {
		return "", err
	}
	return file.String, probeImmediate(ctx, conn, file.String)
}

// probeImmediate checks that the pool's transactions are immediate. It holds the write lock on
// another connection: meanwhile a transaction of the pool can begin only if it does not take that
// lock.
func probeImmediate(ctx context.Context, conn *sql.Conn, path string) (err error) {
	connector, err := sqlite.NewConnector(dsn(path, 0))
	if err != nil {
		return err
	}
	other := sql.OpenDB(connector)
	defer func() { err = errors.Join(err, other.Close()) }()
	var timeout int64
	if err := conn.QueryRowContext(ctx, `pragma busy_timeout`).Scan(&timeout); err != nil {
		return err
	}
	if _, err := conn.ExecContext(ctx, setBusyTimeout(0)); err != nil {
		return err
	}
	defer func() {
		_, restored := conn.ExecContext(context.WithoutCancel(ctx), setBusyTimeout(timeout))
		err = errors.Join(err, restored)
	}()
	var held *sql.Tx
	err = retryBusy(ctx, func() error {
		var err error
		held, err = other.BeginTx(ctx, nil)
		return err
	})
	if err != nil {
		return fmt.Errorf("take the write lock: %w", err)
	}
	tx, begun := conn.BeginTx(ctx, nil)
	if begun == nil {
		begun = errors.Join(errors.New(`its transactions are not immediate: open it with "_txlock=immediate"`), tx.Rollback())
	} else if isBusy(begun) {
		begun = nil
	}
	return errors.Join(begun, held.Rollback())
}
