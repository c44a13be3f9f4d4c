package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

const poolerRemedy = "no pgbouncer: install Debian's package pgbouncer (make test does), or set KINORA_SKIP=pgbouncer"

// ErrNoPooler means that pgbouncer is not installed.
var ErrNoPooler = errors.New(poolerRemedy)

// keepPooler runs pgbouncer and stops it when standard input ends, as keep does for a server.
const keepPooler = `
"$1" "$2/pgbouncer.ini" >> "$2.log" 2>&1 < /dev/null &
pid=$!
cat > /dev/null
while kill -TERM $pid 2> /dev/null; do sleep 0.1; done
rm -rf "$2" "$2.log"
`

// Pooler is a private pgbouncer in transaction mode.
type Pooler struct {
	host string
	life *os.File // pgbouncer ends when this is closed, and so when this process ends
	done chan struct{}
}

// NewPooler starts a pgbouncer in transaction mode in front of a server, for one test. Settings
// ("default_pool_size=1") override its own. Without the binary the test fails with a remedy, unless
// KINORA_SKIP=pgbouncer.
func NewPooler(t testing.TB, server string, settings ...string) *Pooler {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("KINORA_SKIP"), ","), "pgbouncer") {
		t.Skip("KINORA_SKIP=pgbouncer")
	}
	p, err := startPooler(server, settings...)
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
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = p.host
	query := u.Query()
	for _, parameter := range parameters {
		name, value, _ := strings.Cut(parameter, "=")
		query.Set(name, value)
	}
	u.RawQuery = query.Encode()
	return u.String()
}

// Stop stops the pooler.
func (p *Pooler) Stop() {
	_ = p.life.Close()
	<-p.done
}

func startPooler(server string, settings ...string) (*Pooler, error) {
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
	port, err := freePort()
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
	cmd := exec.Command("sh", "-c", keepPooler, "keep", bin, dir)
	if err := asOther(cmd, dir); err != nil {
		return nil, err
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdin = read
	err = cmd.Start()
	_ = read.Close()
	if err != nil {
		_ = write.Close()
		return nil, fmt.Errorf("start pgbouncer: %w", err)
	}
	p := &Pooler{host: fmt.Sprintf("127.0.0.1:%d", port), life: write, done: make(chan struct{})}
	go func() { _ = cmd.Wait(); _ = os.RemoveAll(dir); _ = os.Remove(dir + ".log"); close(p.done) }()
	if err := p.await(fmt.Sprintf("postgres://%s@%s/%s?sslmode=disable&default_query_exec_mode=exec", url.PathEscape(to.User), p.host, to.Database), dir+".log"); err != nil {
		p.Stop()
		return nil, err
	}
	return p, nil
}

func (p *Pooler) await(dsn, log string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var err error
	for ctx.Err() == nil {
		if err = run(ctx, dsn, "select 1"); err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("pgbouncer stopped while starting: %w", err)
		case <-time.After(10 * time.Millisecond):
		}
	}
	output, _ := os.ReadFile(log)
	return fmt.Errorf("pgbouncer does not answer: %w\n%s", err, output)
}

func missing(file string) bool {
	_, err := os.Stat(file)
	return err != nil
}
