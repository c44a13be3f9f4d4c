package postgres_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// recorder is the publisher of a relay in a separate process. All recorders append to one file,
// so the order of its lines is the order of publications.
type recorder struct {
	file   *os.File
	dir    string
	name   string
	failed float64       // share of the calls that fail before publishing
	slow   time.Duration // delay before each call
}

func (r *recorder) Publish(_ string, ms ...*message.Message) error {
	time.Sleep(r.slow) // a test asks for it
	if rand.Float64() < r.failed {
		return errors.New("the network")
	}
	var lines bytes.Buffer
	for _, m := range ms {
		key := m.Metadata[outbox.HeaderKey]
		if _, err := os.Stat(filepath.Join(r.dir, "refuse-"+key)); err == nil {
			_, _ = r.file.Write(lines.Bytes())
			return errors.New("refused")
		}
		if _, err := os.Stat(filepath.Join(r.dir, "deadly-"+m.UUID)); err == nil {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		fmt.Fprintf(&lines, "%d %s %s %s\n", time.Now().UnixNano(), r.name, key, m.Payload)
	}
	_, err := r.file.Write(lines.Bytes())
	return err
}

func (*recorder) Close() error { return nil }

// relayChild runs a relay until SIGTERM. Its environment configures it.
func relayChild() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	slog.SetLogLoggerLevel(slog.LevelError)
	dir := os.Getenv("KINORA_TEST_DIR")
	duration := func(name string) time.Duration {
		d, _ := time.ParseDuration(os.Getenv(name))
		return d
	}
	attempts, _ := strconv.Atoi(os.Getenv("KINORA_TEST_ATTEMPTS"))
	failed, _ := strconv.ParseFloat(os.Getenv("KINORA_TEST_FAILED"), 64)
	file, err := os.OpenFile(filepath.Join(dir, "published"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		pub := &recorder{file, dir, os.Getenv("KINORA_TEST_NAME"), failed, duration("KINORA_TEST_SLOW")}
		err = relayOnce(ctx, pub, &outbox.RelayConfig{
			Lease: duration("KINORA_TEST_LEASE"), Poll: 10 * time.Millisecond, Holder: pub.name,
			// tests read the published entries
			Keep:             outbox.EntryRetention{Published: time.Hour},
			OrderedPublisher: os.Getenv("KINORA_TEST_ORDERED") != "",
			Backoff:          claim.Backoff{Base: 20 * time.Millisecond, Max: 100 * time.Millisecond, Attempts: attempts},
		})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func relayOnce(ctx context.Context, pub message.Publisher, cfg *outbox.RelayConfig) error {
	db, err := postgres.Open(ctx, os.Getenv("KINORA_TEST_DSN")+"&pool_max_conns=4", nil)
	if err != nil {
		return err
	}
	defer db.Close()
	relay, err := outbox.NewRelay(db, pub, cfg)
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

// fleet is relays in separate processes, with one outbox and one recorder.
type fleet struct {
	*testing.T
	db  *postgres.DB
	dsn string
	dir string
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	dsn := postgrestest.DSN(t, nil)
	db, err := postgres.Open(t.Context(), dsn, nil)
	require.NoError(t, err)
	t.Cleanup(db.Close)
	return &fleet{t, db, dsn, t.TempDir()}
}

// start starts a relay. env is "NAME=value", NAME without KINORA_TEST_.
func (f *fleet) start(name string, env ...string) *exec.Cmd {
	f.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "KINORA_TEST_CHILD=relay", "KINORA_TEST_DSN="+f.dsn, "KINORA_TEST_DIR="+f.dir, "KINORA_TEST_NAME="+name, "KINORA_TEST_ATTEMPTS=-1")
	for _, e := range env {
		cmd.Env = append(cmd.Env, "KINORA_TEST_"+e)
	}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(f, cmd.Start())
	f.Cleanup(func() {
		_ = cmd.Process.Kill()
		_, _ = cmd.Process.Wait()
	})
	return cmd
}

// set makes the recorder refuse a key, or die of a message, until unset.
func (f *fleet) set(what string) {
	require.NoError(f, os.WriteFile(filepath.Join(f.dir, what), nil, 0o600))
}

func (f *fleet) unset(what string) { require.NoError(f, os.Remove(filepath.Join(f.dir, what))) }

// line is one publication.
type line struct {
	at      time.Time
	by, key string
	v       int
}

func (f *fleet) published() (all []line) {
	f.Helper()
	file, err := os.Open(filepath.Join(f.dir, "published"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	require.NoError(f, err)
	defer file.Close()
	text, err := io.ReadAll(file)
	require.NoError(f, err)
	for one := range strings.Lines(string(text)) {
		var l line
		var at int64
		if _, err := fmt.Sscanf(one, "%d %s %s %d\n", &at, &l.by, &l.key, &l.v); err != nil {
			require.False(f, strings.HasSuffix(one, "\n"), "an incomplete line: %q", one)
			continue // the last line is being written
		}
		l.at = time.Unix(0, at)
		all = append(all, l)
	}
	return all
}

// enqueue adds n messages with random keys. Each has its number in its key, which continues from
// earlier calls.
func (f *fleet) enqueue(next map[string]int, keys []string, n int) {
	f.Helper()
	require.NoError(f, pgx.BeginFunc(f.Context(), f.db.Pool(), func(tx pgx.Tx) error {
		ms := make([]outbox.Message, n)
		for i := range ms {
			key := keys[rand.IntN(len(keys))]
			next[key]++
			ms[i] = outbox.Message{Topic: "t", Key: key, Payload: strconv.AppendInt(nil, int64(next[key]), 10)}
		}
		return f.db.InTx(tx).Enqueue(f.Context(), ms...)
	}))
}

func (f *fleet) open() int {
	f.Helper()
	return count(f.T, f.db, `select count(*) from kinora.outbox where status not in ('published', 'skipped')`)
}

// inOrder checks that each key's first publications are 1, 2, … up to the number enqueued, and
// returns the number of repeated publications.
func (f *fleet) inOrder(next map[string]int) (repeats int) {
	f.Helper()
	last := map[string]int{}
	disorder := 0
	for _, l := range f.published() {
		switch {
		case l.v == last[l.key]+1:
			last[l.key] = l.v
		case l.v > last[l.key]:
			disorder++
			last[l.key] = l.v
		default:
			repeats++
		}
	}
	require.Zero(f, disorder, "first publications out of order")
	require.Equal(f, next, last, "every message was published")
	return repeats
}
