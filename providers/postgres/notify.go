package postgres

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/internal/pauses"
)

// A notification has a separate transaction: PostgreSQL commits notifying ones one after another.
const notifySQL = `select pg_notify($1::text, $2::text)`

// channel returns the channel of this schema's notifications. Channels belong to a database. A
// schema's name has at most 41 bytes, a channel's 63.
func (db *Provider) channel() string { return "kinora_outbox_" + db.cfg.Schema }

// added tells relays that entries can be claimed.
func (db *Provider) added() { db.signal(&db.wake) }

// tasksDue tells workers that tasks became due.
func (db *Provider) tasksDue() { db.signal(&db.due) }

// appended tells readers of the log that there are events, and relays if there are entries.
func (db *Provider) appended(entries bool) {
	if entries {
		db.wake.signal()
	}
	db.signal(&db.appends)
}

// signal wakes those who listen to w, and those of other processes with Config.Notify.
func (db *Provider) signal(w *waker) {
	w.signal()
	if db.cfg.Notify {
		db.notifier.request()
	}
}

// notify sends one notification. Without a payload it means that there are entries or events.
// Callers may ignore its error, because relays and readers of the log poll.
func (db *Provider) notify(ctx context.Context, channel, payload string) error {
	_, err := db.pool.Exec(ctx, notifySQL, channel, payload)
	return err
}

// notifier sends the requested notifications one at a time, with pauses of 10ms. Requests during a pause share one
// notification.
type notifier struct {
	send    func(ctx context.Context)
	stop    chan struct{} // closed by close
	mu      sync.Mutex
	running bool
	wanted  bool // requested since the current one began, which may be too early for it
	closed  bool
	cancel  context.CancelFunc // cancels the one being sent
	flights sync.WaitGroup
}

func (n *notifier) request() {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.closed:
	case n.running:
		n.wanted = true
	default:
		ctx, cancel := context.WithCancel(context.Background())
		n.running, n.cancel = true, cancel
		n.flights.Go(func() {
			defer cancel()
			for again := true; again; again = n.again() {
				limit, cancel := context.WithTimeout(ctx, 5*time.Second) // also for a connection
				n.send(limit)
				cancel()
				pauses.Wait(ctx, 10*time.Millisecond, n.stop)
			}
		})
	}
}

func (n *notifier) again() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.running = n.wanted && !n.closed
	n.wanted = n.wanted && n.closed // for close
	return n.running
}

// close sends a requested notification, so that a process that appends and ends has notified. It waits at most a second.
func (n *notifier) close() {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return
	}
	n.closed = true
	close(n.stop)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if n.cancel != nil {
		defer context.AfterFunc(ctx, n.cancel)()
	}
	n.mu.Unlock()
	n.flights.Wait()
	if n.wanted { // no further requests are accepted
		n.send(ctx)
	}
}

// ListenerConfig is the configuration of a Listener. The zero value is the default.
type ListenerConfig struct {
	// the same database, not through a pooler in transaction mode; empty: as the pool connects
	DSN string
	// how long without notifications until a probe checks that they arrive; zero means 1m
	Probe  time.Duration
	Logger *slog.Logger // nil: slog.Default()
}

// Listener wakes the relays, workers and readers of the log of this process when another process adds entries, tasks or
// events through a DB with Config.Notify on the same database and schema. It has a separate connection. It is optional:
// without it, they find the same by polling (outbox.RelayConfig.Poll, task.WorkerConfig.Poll).
type Listener struct {
	db      *DB
	cfg     ListenerConfig
	config  *pgx.ConnConfig // of DSN
	probes  string          // a channel for this listener only
	log     *slog.Logger
	started atomic.Bool
	running chan struct{}
	warned  bool // a warning was logged
}

// NewListener returns a listener for the relays, workers and readers of db. It only checks cfg: Run connects.
func NewListener(db *DB, cfg *ListenerConfig) (*Listener, error) {
	if db == nil {
		return nil, errors.New("listener: NewListener requires a DB")
	}
	l := &Listener{db: db, running: make(chan struct{}), probes: "kinora_probe_" + strings.ToLower(rand.Text())}
	if cfg != nil {
		l.cfg = *cfg
	}
	if l.cfg.Probe < 0 {
		return nil, fmt.Errorf("listener: Probe is %s: it must not be negative; zero means 1m", l.cfg.Probe)
	}
	l.cfg.Probe, l.cfg.Logger = cmp.Or(l.cfg.Probe, time.Minute), cmp.Or(l.cfg.Logger, slog.Default())
	l.log = l.cfg.Logger.With("channel", db.channel())
	if l.cfg.DSN != "" {
		var err error
		if l.config, err = pgx.ParseConfig(l.cfg.DSN); err != nil {
			return nil, fmt.Errorf("listener: %w", err)
		}
	}
	return l, nil
}

// Running is closed once Run has begun. Run then connects, and wakes relays and readers.
func (l *Listener) Running() <-chan struct{} { return l.running }

const listenLimit = 5 * time.Second // for connecting, for a statement, and for a probe to arrive

var (
	errSilent = errors.New("notifications do not arrive") // a probe was sent and did not arrive
	errUnsent = errors.New("cannot send a probe")
	errQuiet  = errors.New("quiet") // no notification arrived for some time
)

// Run listens until ctx ends, and then returns nil. Call it once. After a lost connection, or if a probe does not arrive, it
// connects again and wakes all, because notifications may have been missed. If probes do not arrive on a new connection
// either, as through a pooler in transaction mode, it warns once, and tries again every ListenerConfig.Probe.
func (l *Listener) Run(ctx context.Context) error {
	if l.started.Swap(true) {
		return errors.New("listener: Run called twice: create another Listener")
	}
	close(l.running)
	pause := pauses.Doubling{First: 100 * time.Millisecond, Longest: 10 * time.Second}
	for ctx.Err() == nil {
		heard, err := l.session(ctx)
		if heard {
			pause.Reset()
		}
		wait := pause.Next()
		wait = wait/2 + mathrand.N(wait) // others lost their connections at the same time
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, errSilent) && !heard:
			wait = l.cfg.Probe
			level := slog.LevelWarn
			if l.warned {
				level = slog.LevelDebug
			}
			l.log.Log(ctx, level, "notifications do not arrive, relays keep polling: behind a pooler in transaction mode, set ListenerConfig.DSN to the server",
				"again_in", wait)
			l.warned = true
		default: // if it heard and is silent, the connection may be half-open
			l.log.Warn("listen", "error", err, "again_in", wait)
		}
		pauses.Wait(ctx, wait, nil)
	}
	return nil
}

// session listens on one connection until it fails. heard reports whether it listened. It listens
// on the schema's channel only after a probe has arrived: through a pooler, LISTEN stays on a
// connection that others use, where it would receive nothing.
func (l *Listener) session(ctx context.Context) (heard bool, err error) {
	conn, err := l.connect(ctx)
	if err != nil {
		return false, err
	}
	defer func() {
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(limit)
	}()
	if err := execute(ctx, conn, "listen "+l.probes); err != nil {
		return false, err
	}
	if err := l.probe(ctx, conn); err != nil {
		if errors.Is(err, errSilent) {
			_ = execute(ctx, conn, "unlisten "+l.probes)
		}
		return false, err
	}
	if err := execute(ctx, conn, "listen "+l.db.channel()); err != nil {
		return false, err
	}
	if l.warned {
		l.log.Info("notifications arrive again")
		l.warned = false
	}
	l.wake() // for rows that were added before
	for {
		_, err := l.await(ctx, conn, l.cfg.Probe)
		if errors.Is(err, errQuiet) {
			err = l.probe(ctx, conn)
		}
		// the pool may be busy, which says nothing about this connection
		if errors.Is(err, errUnsent) {
			l.log.Debug("listen", "error", err)
			err = execute(ctx, conn, "select 1")
		}
		if err != nil {
			return true, err
		}
	}
}

// connect opens a connection outside the pool, so that the pool may have only one.
func (l *Listener) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, listenLimit)
	defer cancel()
	config := l.config
	if config == nil {
		var err error
		if config, err = connConfig(ctx, l.db.pool.Config()); err != nil {
			return nil, err
		}
	}
	config.OnNotification = nil // required by WaitForNotification
	return pgx.ConnectConfig(ctx, config)
}

func execute(ctx context.Context, conn *pgx.Conn, statement string) error {
	ctx, cancel := context.WithTimeout(ctx, listenLimit)
	defer cancel()
	_, err := conn.Exec(ctx, statement)
	return err
}

// probe notifies conn through the pool, as others do, and waits until the notification arrives.
func (l *Listener) probe(ctx context.Context, conn *pgx.Conn) error {
	nonce, long := rand.Text(), min(l.cfg.Probe, listenLimit)
	limit, cancel := context.WithTimeout(ctx, long)
	defer cancel()
	if err := l.db.notify(limit, l.probes, nonce); err != nil {
		return fmt.Errorf("%w: %w", errUnsent, err)
	}
	for {
		payload, err := l.await(ctx, conn, long)
		if errors.Is(err, errQuiet) {
			return errSilent
		}
		if err != nil || payload == nonce {
			return err
		}
	}
}

// await waits for a notification, and returns the payload of a probe. Any other wakes relays and readers.
func (l *Listener) await(ctx context.Context, conn *pgx.Conn, long time.Duration) (string, error) {
	limit, cancel := context.WithTimeout(ctx, long)
	defer cancel()
	n, err := conn.WaitForNotification(limit)
	switch {
	case err == nil && n.Channel == l.probes:
		return n.Payload, nil
	case err == nil:
		l.wake()
		return "", nil
	case ctx.Err() == nil && limit.Err() != nil && !conn.IsClosed():
		return "", errQuiet
	}
	return "", err
}

func (l *Listener) wake() {
	l.db.wake.signal()
	l.db.appends.signal()
	l.db.due.signal()
}
