package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/testserver"
)

const poolerRemedy = "no pgbouncer: install Debian's package pgbouncer (make test does), or set KINORA_SKIP=pgbouncer"

// ErrNoPooler means that pgbouncer is not installed.
var ErrNoPooler = errors.New(poolerRemedy)

// keepPooler runs pgbouncer until standard input ends, and removes its directory.
const keepPooler = `
"$1" "$2/pgbouncer.ini" >> "$2/log" 2>&1 < /dev/null &
pid=$!
cat > /dev/null
while kill -TERM $pid 2> /dev/null; do sleep 0.1; done
rm -rf "$2"
`

// Pooler is a private pgbouncer in transaction mode.
type Pooler struct {
	host string
	keep *testserver.Process
}

// NewPooler starts a pgbouncer in transaction mode in front of a server, for one test. Settings
// ("default_pool_size=1") override its own. Without the binary the test fails with a remedy, unless
// KINORA_SKIP=pgbouncer.
func NewPooler(t testing.TB, server string, settings ...string) *Pooler {
	t.Helper()
	testserver.Skip(t, "pgbouncer")
	p, err := StartPooler(server, settings...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	return p
}

// DSN returns the connection string for dsn's database through the pooler, with added parameters
// ("default_query_exec_mode=exec").
func (p *Pooler) DSN(t testing.TB, dsn string, parameters ...string) string {
	t.Helper()
	through, err := p.Through(dsn, parameters...)
	if err != nil {
		t.Fatal(err)
	}
	return through
}

// Through is DSN without a test.
func (p *Pooler) Through(dsn string, parameters ...string) (string, error) {
	u, err := url.Parse(dsn)
	if err != nil {
		return "", err
	}
	u.Host = p.host
	query := u.Query()
	for _, parameter := range parameters {
		name, value, _ := strings.Cut(parameter, "=")
		query.Set(name, value)
	}
	u.RawQuery = query.Encode()
	return u.String(), nil
}

// Stop stops the pooler.
func (p *Pooler) Stop() { p.keep.Stop() }

// StartPooler is NewPooler without a test: the caller calls Stop. ErrNoPooler: pgbouncer is not
// installed. If another program takes the port before pgbouncer does, it is started again with another one.
func StartPooler(server string, settings ...string) (p *Pooler, failed error) {
	for range 20 {
		if p, failed = startPooler(server, settings); !errors.Is(failed, testserver.ErrOtherServer) {
			break
		}
	}
	return p, failed
}

func startPooler(server string, settings []string) (*Pooler, error) {
	bin, err := exec.LookPath("pgbouncer")
	if err != nil {
		if bin = "/usr/sbin/pgbouncer"; missing(bin) { // not in every user's PATH
			return nil, ErrNoPooler
		}
	}
	to, err := pgx.ParseConfig(server)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "kinora-pgbouncer-")
	if err != nil {
		return nil, err
	}
	port, err := testserver.FreePort()
	if err != nil {
		return nil, err
	}
	ini := fmt.Sprintf("[databases]\n* = host=%s port=%d user=%s", to.Host, to.Port, to.User)
	if to.Password != "" { // an empty password is a syntax error
		ini += " password='" + strings.ReplaceAll(to.Password, "'", "''") + "'"
	}
	ini += "\n[pgbouncer]\n"
	for _, s := range append([]string{"listen_addr=127.0.0.1", fmt.Sprintf("listen_port=%d", port), "unix_socket_dir=", "auth_type=any",
		"pool_mode=transaction", "default_pool_size=10", "max_client_conn=500"}, settings...) {
		ini += s + "\n"
	}
	if err := os.WriteFile(filepath.Join(dir, "pgbouncer.ini"), []byte(ini), 0o644); err != nil { //nolint:gosec // of a test
		return nil, err
	}
	p := &Pooler{host: fmt.Sprintf("127.0.0.1:%d", port)}
	if p.keep, err = testserver.RunUnprivileged(dir, keepPooler, bin, dir); err != nil {
		return nil, fmt.Errorf("start pgbouncer: %w", err)
	}
	dsn := fmt.Sprintf("postgres://%s@%s/%s?sslmode=disable&default_query_exec_mode=exec", url.PathEscape(to.User), p.host, to.Database)
	log := filepath.Join(dir, "log")
	err = p.keep.Await(log, func(ctx context.Context) error {
		said, err := os.ReadFile(log)
		switch {
		case err != nil:
			return err
		case bytes.Contains(said, []byte("cannot listen on")):
			return fmt.Errorf("%w %d", testserver.ErrOtherServer, port)
		case !bytes.Contains(said, []byte("listening on")):
			return errors.New("pgbouncer does not listen yet")
		}
		return run(ctx, dsn, "select 1")
	})
	if err != nil {
		p.Stop()
		return nil, fmt.Errorf("start pgbouncer: %w", err)
	}
	return p, nil
}

func missing(file string) bool {
	_, err := os.Stat(file)
	return err != nil
}
