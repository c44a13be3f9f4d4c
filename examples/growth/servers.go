package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/kinora-go/kinora/providers/postgres"
)

// server is a private PostgreSQL server. It ends with this process.
type server struct {
	port, dir string
	script    *exec.Cmd
	life      io.WriteCloser
}

// startServer starts a server from the installed binaries: a new one, or a standby of primary.
func startServer(ctx context.Context, primary *server) (*server, error) {
	bin, err := postgresBinaries()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "kinora-postgres-")
	if err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	from := ""
	if primary != nil {
		from = primary.dsn("postgres")
	}
	s := &server{port: port, dir: dir, script: exec.Command("sh", "-c", privateServer, "sh", bin, dir, port, from)} //nolint:gosec // a constant
	s.script.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if s.script.SysProcAttr.Credential, err = unprivileged(dir); err != nil {
		return nil, err
	}
	s.script.Dir = dir
	if s.life, err = s.script.StdinPipe(); err != nil {
		return nil, err
	}
	if err := s.script.Start(); err != nil {
		return nil, err
	}
	if err := s.await(ctx, time.Time{}); err != nil {
		return nil, errors.Join(fmt.Errorf("start PostgreSQL: %w", err), s.stop())
	}
	return s, nil
}

// freePort returns a port that no server listens on. It is below those of outgoing connections, so none of them takes it while
// the server is down.
func freePort() (port string, err error) {
	for range 100 {
		port = strconv.Itoa(10000 + rand.IntN(22000))
		l, listening := net.Listen("tcp", "127.0.0.1:"+port)
		if err = listening; err == nil {
			return port, l.Close()
		}
	}
	return "", err
}

// privateServer runs a server until standard input ends, and removes its data. A line of standard input crashes it: it ends
// at once, without a checkpoint, and is started again.
const privateServer = `
bin=$1; dir=$2; port=$3
if [ -n "$4" ]; then
	"$bin/pg_basebackup" -D data -d "$4" -R -c fast --no-sync > log 2>&1 || exit 1
else
	"$bin/initdb" -D data -U postgres -A trust -E UTF8 --locale=C --no-sync > log 2>&1 || exit 1
fi
start() {
	"$bin/postgres" -D data -p "$port" -k "$dir" -c listen_addresses=127.0.0.1 -c fsync=off >> log 2>&1 < /dev/null &
	pid=$!
}
start
# repeatedly, because a server that has just started ignores a signal
while read -r line; do
	while kill -QUIT $pid 2> /dev/null; do sleep 0.02; done
	start
done
while kill -INT $pid 2> /dev/null; do sleep 0.1; done
cd / && rm -rf "$dir"
`

func (s *server) dsn(database string) string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%s/%s?sslmode=disable", s.port, database)
}

// open opens a database of the server.
func (s *server) open(ctx context.Context, database string, cfg *postgres.Config) (*postgres.DB, error) {
	return postgres.Open(ctx, s.dsn(database), cfg)
}

// create creates a database with Kinora's tables, and those that a statement creates.
func (s *server) create(ctx context.Context, database, tables string) (err error) {
	conn, err := pgx.Connect(ctx, s.dsn("postgres"))
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, `create database `+database)
	if err = errors.Join(err, conn.Close(ctx)); err != nil {
		return err
	}
	db, err := s.open(ctx, database, nil)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := db.Migrate(ctx); err != nil {
		return err
	}
	_, err = db.Pool().Exec(ctx, tables)
	return err
}

// crash ends the server at once (the signal of pg_ctl stop -m immediate), and starts it again.
func (s *server) crash(ctx context.Context) error {
	before, err := s.began(ctx)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(s.life, "crash\n"); err != nil {
		return err
	}
	return s.await(ctx, before)
}

// began returns when the server was started.
func (s *server) began(ctx context.Context) (at time.Time, err error) {
	conn, err := pgx.Connect(ctx, s.dsn("postgres"))
	if err != nil {
		return at, err
	}
	err = conn.QueryRow(ctx, `select pg_postmaster_start_time()`).Scan(&at)
	return at, errors.Join(err, conn.Close(ctx))
}

// await waits until the server accepts connections and was started after a time.
func (s *server) await(ctx context.Context, after time.Time) error {
	for {
		at, err := s.began(ctx)
		if err == nil && at.After(after) {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// stop ends the server, and removes its data.
func (s *server) stop() error {
	return errors.Join(s.life.Close(), s.script.Wait(), os.RemoveAll(s.dir))
}

// postgresBinaries returns the directory of an installed server.
func postgresBinaries() (string, error) {
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/postgres") // Debian's location
	if len(found) > 0 {
		return filepath.Dir(found[len(found)-1]), nil
	}
	p, err := exec.LookPath("postgres")
	if err != nil {
		return "", errors.New("no PostgreSQL: install Debian's package postgresql")
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
