package postgres

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// ListenerConfig tells how a Listener works; the zero value is the default.
type ListenerConfig struct {
	DSN    string        // where to listen: the same database, past a pooler in transaction mode; empty: as the pool connects
	Probe  time.Duration // how long all is quiet until it looks whether notifications still arrive; zero means 1m
	Logger *slog.Logger  // nil: slog.Default()
}

// Listener wakes the relays of this process when another one adds entries: a DB with Config.Notify on the same
// database and schema. It has one connection of its own. Nothing depends on it: relays without it, or while it is
// cut off, find the same entries by looking (outbox.RelayConfig.Poll).
type Listener struct {
	db      *DB
	cfg     ListenerConfig
	config  *pgx.ConnConfig
	probes  string // a channel that nobody else uses
	log     *slog.Logger
	once    sync.Once
	running chan struct{}
	deaf    bool // said so
}

// NewListener makes a listener for the relays of db. It checks cfg and does nothing else yet.
func NewListener(db *DB, cfg *ListenerConfig) (*Listener, error) {
	if db == nil {
		return nil, errors.New("listener: wants a DB")
	}
	l := &Listener{db: db, running: make(chan struct{}), probes: "kinora_probe_" + strings.ToLower(rand.Text())}
	if cfg != nil {
		l.cfg = *cfg
	}
	if l.cfg.Probe < 0 {
		return nil, fmt.Errorf("listener: probe %s: want no negative duration", l.cfg.Probe)
	}
	if l.cfg.Probe == 0 {
		l.cfg.Probe = time.Minute
	}
	if l.cfg.Logger == nil {
		l.cfg.Logger = slog.Default()
	}
	l.log = l.cfg.Logger.With("channel", db.channel())
	l.config = db.pool.Config().ConnConfig
	if l.cfg.DSN != "" {
		var err error
		if l.config, err = pgx.ParseConfig(l.cfg.DSN); err != nil {
			return nil, fmt.Errorf("listener: %w", err)
		}
	}
	return l, nil
}

// Running is closed once Run works: it connects, and wakes relays when it has.
func (l *Listener) Running() <-chan struct{} { return l.running }

const (
	listenMin   = 100 * time.Millisecond // the first pause after a connection is lost; it doubles to listenMax
	listenMax   = 10 * time.Second
	listenLimit = 5 * time.Second // for connecting, for a statement, and for a probe to arrive
)

var (
	errDeaf   = errors.New("notifications do not arrive") // a probe was sent and did not
	errUnsent = errors.New("no probe could be sent")
	errQuiet  = errors.New("quiet") // nothing has arrived for so long
)

// Run listens until ctx ends; then it returns nil. It runs once.
//   - A connection that is lost, or on which a probe does not arrive, is made anew, and relays are woken, since
//     something may have been missed.
//   - Where probes do not arrive on a new connection either, as through a pooler in transaction mode, it says so
//     once, and looks again every ListenerConfig.Probe.
func (l *Listener) Run(ctx context.Context) error {
	started := false
	l.once.Do(func() { started = true })
	if !started {
		return errors.New("listener: it runs once")
	}
	close(l.running)
	for pause := listenMin; ctx.Err() == nil; {
		heard, err := l.session(ctx)
		if heard {
			pause = listenMin
		}
		wait := pause/2 + mathrand.N(pause) // others lost their connections at the same moment
		switch {
		case ctx.Err() != nil:
		case errors.Is(err, errDeaf) && heard: // the connection is half-open, perhaps
			l.log.Warn("listen", "error", err, "again_in", wait)
		case errors.Is(err, errDeaf):
			wait = l.cfg.Probe
			l.log.Log(ctx, l.aloud(), "notifications do not arrive, polling goes on: is there a pooler in transaction mode? name the server in ListenerConfig.DSN",
				"again_in", wait)
			l.deaf = true
		default:
			l.log.Warn("listen", "error", err, "again_in", wait)
		}
		pause = min(2*pause, listenMax)
		sleep(ctx, wait)
	}
	return nil
}

// aloud is a warning the first time.
func (l *Listener) aloud() slog.Level {
	if l.deaf {
		return slog.LevelDebug
	}
	return slog.LevelWarn
}

// session listens on one connection, until it fails; heard tells whether it did listen. What a probe has not shown
// to be heard is not listened for: through a pooler, LISTEN stays behind on a connection of others, which nobody
// notifies then.
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
		if errors.Is(err, errDeaf) {
			_ = execute(ctx, conn, "unlisten "+l.probes)
		}
		return false, err
	}
	if err := execute(ctx, conn, "listen "+l.db.channel()); err != nil {
		return false, err
	}
	if l.deaf {
		l.log.Info("notifications arrive again")
		l.deaf = false
	}
	l.db.wake.signal() // for what was added before
	for {
		_, err := l.await(ctx, conn, l.cfg.Probe)
		if errors.Is(err, errQuiet) {
			err = l.probe(ctx, conn)
		}
		if errors.Is(err, errUnsent) { // the pool is busy, perhaps, which says nothing about this connection
			l.log.Debug("listen", "error", err)
			err = execute(ctx, conn, "select 1")
		}
		if err != nil {
			return true, err
		}
	}
}

// connect makes a connection that is none of the pool's, so that the pool may be of one connection.
func (l *Listener) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, listenLimit)
	defer cancel()
	config := l.config.Copy()
	config.OnNotification = nil // WaitForNotification wants them
	if before := l.db.pool.Config().BeforeConnect; before != nil && l.cfg.DSN == "" {
		if err := before(ctx, config); err != nil {
			return nil, err
		}
	}
	return pgx.ConnectConfig(ctx, config)
}

func execute(ctx context.Context, conn *pgx.Conn, statement string) error {
	ctx, cancel := context.WithTimeout(ctx, listenLimit)
	defer cancel()
	_, err := conn.Exec(ctx, statement)
	return err
}

// probe notifies conn through the pool, as others do, and waits until that arrives.
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
			return errDeaf
		}
		if err != nil || payload == nonce {
			return err
		}
	}
}

// await waits for one notification, wakes relays if it is for them, and returns a probe's payload.
func (l *Listener) await(ctx context.Context, conn *pgx.Conn, long time.Duration) (string, error) {
	limit, cancel := context.WithTimeout(ctx, long)
	defer cancel()
	n, err := conn.WaitForNotification(limit)
	switch {
	case err == nil && n.Channel == l.probes:
		return n.Payload, nil
	case err == nil:
		l.db.wake.signal()
		return "", nil
	case ctx.Err() == nil && limit.Err() != nil && !conn.IsClosed():
		return "", errQuiet
	}
	return "", err
}

// sleep waits for d, or for the end of ctx.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
