package postgres

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/kinora-go/kinora/provider"
)

// LockKey returns the key of an advisory lock.
var LockKey = lockKey

// LockClassHold is the class of the lock under which entries are held.
const LockClassHold = lockClassHold

// IsAmbiguous reports whether a unit may be committed although its commit failed with err.
var IsAmbiguous = isAmbiguous

// ConnConfig returns the configuration of connections outside the pool.
var ConnConfig = connConfig

// NewNotifier returns a notifier for tests of its timing.
func NewNotifier(send func(context.Context)) *notifier {
	return &notifier{send: send, stop: make(chan struct{})}
}

func (n *notifier) Ask()   { n.request() }
func (n *notifier) Close() { n.close() }

// BeginDryRun, Changes and End are a dry run.
func (db *DB) BeginDryRun(ctx context.Context) (*dryRun, error) { return db.beginDryRun(ctx) }

func (d *dryRun) Changes(ctx context.Context, tx pgx.Tx) ([]provider.Change, error) {
	return d.changes(ctx, tx)
}
func (d *dryRun) End(ctx context.Context) { d.end(ctx) }

// TaskCandidatesSQL reads the tasks that are due.
const TaskCandidatesSQL = taskCandidatesSQL

const OldestSince = oldestSince

// StorableNeed and OriginalNeed are how a need is written and read.
var StorableNeed, OriginalNeed = storableNeed, originalNeed

// Migrations are those of this version.
func Migrations() []string { return migrations }

// Up applies those of all that the schema does not have.
func (db *DB) Up(ctx context.Context, tx pgx.Tx, all []string) error { return db.up(ctx, tx, all) }

// WaitingAppends returns how many appends wait for the next transaction.
func WaitingAppends(db *DB) int {
	db.queue.mu.Lock()
	defer db.queue.mu.Unlock()
	return len(db.queue.waiting)
}

// HoldAppends takes the place of all transactions of appends until the returned function is called.
func HoldAppends(db *DB) (release func()) {
	db.queue.mu.Lock()
	defer db.queue.mu.Unlock()
	db.queue.running += db.queue.most
	return func() {
		for range db.queue.most {
			db.queue.end(db.Provider)
		}
	}
}

// MostAppends returns how many transactions of appends run at a time.
func MostAppends(db *DB) int { return db.queue.most }
