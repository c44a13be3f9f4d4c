package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/kinora-go/kinora/providers/postgres"
)

// startPostgres returns a new database, and a function that removes it. The server is the one that
// KINORA_POSTGRES names, or a private one from the installed binaries.
func startPostgres(ctx context.Context) (dsn string, drop func() error, err error) {
	if server := os.Getenv("KINORA_POSTGRES"); server != "" {
		return createDatabase(ctx, server)
	}
	bin, err := postgresBinaries()
	if err != nil {
		return "", nil, err
	}
	dir, err := os.MkdirTemp("", "kinora-postgres-")
	if err != nil {
		return "", nil, err
	}
	addresses, err := freeAddresses(1)
	if err != nil {
		return "", nil, err
	}
	_, port, _ := net.SplitHostPort(addresses[0])
	script := exec.Command("sh", "-c", privateServer, "sh", bin, filepath.Join(dir, "data"), port) //nolint:gosec // a constant
	script.Dir = dir
	script.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if script.SysProcAttr.Credential, err = unprivileged(dir); err != nil {
		return "", nil, err
	}
	life, err := script.StdinPipe() // the server ends with it, and so with this process
	if err != nil {
		return "", nil, err
	}
	if err := script.Start(); err != nil {
		return "", nil, err
	}
	drop = func() error { return errors.Join(life.Close(), script.Wait(), os.RemoveAll(dir)) }
	dsn = fmt.Sprintf("postgres://postgres@127.0.0.1:%s/postgres?sslmode=disable", port)
	if err := awaitPostgres(ctx, dsn); err != nil {
		return "", nil, errors.Join(fmt.Errorf("start PostgreSQL: %w", err), drop())
	}
	return dsn, drop, nil
}

// privateServer runs a server until standard input ends.
const privateServer = `
set -e
"$1/initdb" -D "$2" -U postgres -A trust -E UTF8 --locale=C --no-sync > "$2.log" 2>&1
"$1/postgres" -D "$2" -p "$3" -k "${2%/data}" -c listen_addresses=127.0.0.1 -c fsync=off >> "$2.log" 2>&1 < /dev/null &
pid=$!
set +e
cat > /dev/null
while kill -INT $pid 2> /dev/null; do sleep 0.1; done
`

func awaitPostgres(ctx context.Context, dsn string) error {
	for {
		conn, err := pgx.Connect(ctx, dsn)
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// createDatabase creates a database on a server.
func createDatabase(ctx context.Context, server string) (dsn string, drop func() error, err error) {
	config, err := pgxpool.ParseConfig(server)
	if err != nil {
		return "", nil, err
	}
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		return "", nil, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	name := fmt.Sprintf("kinora_distributed_%d", os.Getpid())
	if _, err := conn.Exec(ctx, `create database `+name); err != nil {
		return "", nil, err
	}
	drop = func() error {
		conn, err := pgx.ConnectConfig(context.Background(), config.ConnConfig)
		if err != nil {
			return err
		}
		_, err = conn.Exec(context.Background(), `drop database `+name+` with (force)`)
		return errors.Join(err, conn.Close(context.Background()))
	}
	return inDatabase(server, name), drop, nil
}

// prepareDB creates Kinora's tables and those of the read models.
func prepareDB(ctx context.Context, db *postgres.DB) error {
	if err := db.Migrate(ctx); err != nil {
		return err
	}
	_, err := db.Pool().Exec(ctx, tables)
	return err
}

// postgresBinaries returns the directory of an installed server.
func postgresBinaries() (string, error) {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres") // Debian's location
	if len(found) > 0 {
		return filepath.Dir(found[len(found)-1]), nil
	}
	p, err := exec.LookPath("postgres")
	if err != nil {
		return "", errors.New("no PostgreSQL: install Debian's package postgresql, or set KINORA_POSTGRES to the connection string of a server")
	}
	return filepath.Dir(p), nil
}

// unprivileged returns the user for a server if this process runs as root, which PostgreSQL refuses.
// That user then owns dir.
func unprivileged(dir string) (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil //nolint:nilnil // no other user is necessary
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		return nil, err
	}
	uid, _ := strconv.ParseUint(u.Uid, 10, 32)
	gid, _ := strconv.ParseUint(u.Gid, 10, 32)
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, os.Chown(dir, int(uid), int(gid))
}

// inDatabase returns the connection string of another database of a server.
func inDatabase(server, name string) string {
	u, err := url.Parse(server)
	if err != nil || u.Scheme == "" {
		return server + " dbname=" + name
	}
	u.Path = "/" + name
	return u.String()
}
