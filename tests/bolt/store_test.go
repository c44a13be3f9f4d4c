package bolt

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"go.etcd.io/bbolt"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

type Config struct {
	Route         outbox.Route
	MaxPayload    int              // zero means 1 MiB
	RequeueWindow time.Duration    // zero means provider.DefaultRequeueWindow
	Clock         func() time.Time // nil: time.Now
	NoSync        bool             // a crash of the machine may lose commits
}

// DB is a handle on a file. bbolt runs one transaction that writes at a time, and lets one process open a
// file. So every committed event is settled, and a unit waits only for the lock of the writer.
type DB struct {
	*provider.Routes
	events
	cfg  Config
	file *file
}

type file struct {
	bolt    *bbolt.DB
	lock    chan struct{} // of the writer, of capacity 1
	lineage string
}

func Open(path string, cfg Config) (*DB, error) {
	opened, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second, NoSync: cfg.NoSync, NoFreelistSync: cfg.NoSync})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	f := &file{bolt: opened, lock: make(chan struct{}, 1)}
	err = opened.Update(func(tx *bbolt.Tx) error {
		if _, err := tx.CreateBucketIfNotExists([]byte("kinora")); err != nil {
			return err
		}
		s := &session{tx: tx}
		if f.lineage, _ = lineages.get(s, key("log")); f.lineage == "" {
			f.lineage = rand.Text()
			lineages.put(s, key("log"), f.lineage)
		}
		return s.err
	})
	if err != nil {
		return nil, errors.Join(err, opened.Close())
	}
	return f.handle(cfg), nil
}

func (f *file) handle(cfg Config) *DB {
	cfg.RequeueWindow = cmp.Or(cfg.RequeueWindow, provider.DefaultRequeueWindow)
	if cfg.Clock == nil {
		cfg.Clock = time.Now
	}
	db := &DB{Routes: provider.NewRoutes(cfg.Route), cfg: cfg, file: f}
	db.events = events{db: db}
	return db
}

func (db *DB) Close() error { return db.file.bolt.Close() }

func (db *DB) now() time.Time { return db.cfg.Clock().UTC().Round(0) }

// session is a transaction of bbolt, with its time and its first error.
type session struct {
	tx  *bbolt.Tx
	now time.Time
	err error
}

func (s *session) fail(err error) { s.err = cmp.Or(s.err, err) }

// query runs ask on the last commit, unless the arguments are invalid.
func query[R any](ctx context.Context, db *DB, doing string, invalid error, ask func(s *session) R) (result R, err error) {
	err = db.read(ctx, doing, invalid, func(s *session) { result = ask(s) })
	return result, err
}

// update runs change in a transaction, unless the arguments are invalid.
func update[R any](ctx context.Context, db *DB, doing string, invalid error, change func(s *session) (R, error)) (result R, err error) {
	err = db.write(ctx, doing, invalid, func(s *session) (err error) {
		result, err = change(s)
		return err
	})
	if err != nil {
		var none R
		return none, err
	}
	return result, nil
}

// Tx is a transaction. It ends when the function that got it returns, or, in a unit, a second after its
// context has ended: then every call returns an error.
type Tx struct {
	db   *DB
	mu   sync.Mutex
	s    *session
	over bool
}

var errOver = errors.New("the transaction is over")

func (tx *Tx) use(fn func(s *session) error) error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.over {
		return errOver
	}
	return cmp.Or(fn(tx.s), tx.s.err)
}

// Get returns a value of the read model, or nil, and Put sets it.
func (tx *Tx) Get(name string) (value []byte, err error) {
	err = tx.use(func(s *session) error { value, _ = model.get(s, key(name)); return nil })
	return value, err
}

func (tx *Tx) Put(name string, value []byte) error {
	return tx.use(func(s *session) error { model.put(s, key(name), value); return nil })
}

func (db *DB) Get(ctx context.Context, name string) ([]byte, error) {
	return query(ctx, db, "read the read model", nil, func(s *session) []byte { value, _ := model.get(s, key(name)); return value })
}

type insideKey struct{ *file }

// begin waits until no other transaction is open.
func (db *DB) begin(ctx context.Context) (*Tx, error) {
	tx, inside := ctx.Value(insideKey{db.file}).(*Tx)
	switch err := ctx.Err(); {
	case err != nil:
		return nil, err
	case inside && tx.use(func(*session) error { return nil }) == nil:
		return nil, provider.ErrInTransaction
	}
	select {
	case db.file.lock <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for the open transaction to end: %w", ctx.Err())
	}
	opened, err := db.file.bolt.Begin(true)
	if err != nil {
		<-db.file.lock
		return nil, err
	}
	return &Tx{db: db, s: &session{tx: opened, now: db.now()}}, nil
}

// end commits the transaction, unless there is an error, or rolls it back.
func (tx *Tx) end(commit bool, err error) error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.over {
		return errOver
	}
	tx.over = true
	defer func() { <-tx.db.file.lock }()
	if err = cmp.Or(err, tx.s.err); err != nil || !commit {
		return errors.Join(err, tx.s.tx.Rollback())
	}
	return tx.s.tx.Commit()
}

func (db *DB) Transact(ctx context.Context, fn func(ctx context.Context, tx *Tx) error) error {
	tx, err := db.begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.end(false, nil) }() // fn may not return
	if err := fn(context.WithValue(ctx, insideKey{db.file}, tx), tx); err != nil {
		return err
	}
	return tx.end(true, ctx.Err())
}

// table is a part of the bucket, with values of a type. They are stored as JSON, and parked messages as gob: their
// texts may be any bytes.
type table[V any] string

// The tables.
const (
	lineages    = table[string]("lineage")
	model       = table[[]byte]("model")                  // the read model
	log         = table[eventstore.Raw]("events")         // by position
	streams     = table[int64]("streams")                 // positions, by stream and version
	places      = table[eventstore.Appended]("places")    // by event id
	snapshots   = table[snapshot]("snapshots")            // by stream and schema
	entries     = table[provider.Entry]("entries")        // by Seq
	open        = table[bool]("open")                     // the Seqs of open entries
	queues      = table[bool]("queues")                   // open entries by topic, key and Seq
	messages    = table[int64]("messages")                // Seqs of entries, by topic and message id
	markers     = table[marker]("markers")                // by handler, generation and message id
	lowWater    = table[time.Time]("low_water")           // by handler: markers up to this time may be deleted
	parked      = table[provider.Parked]("parked")        // by Seq
	parkedIDs   = table[int64]("parked_ids")              // Seqs of messages not replayed, by projector, generation and id
	lanes       = table[bool]("lanes")                    // open messages by projector, generation, lane and Seq
	runners     = table[time.Time]("runners")             // the ends of their leases
	inFlight    = table[[]string]("in_flight")            // by runner and number
	checkpoints = table[provider.Checkpoint]("progress")  // by projector and generation
	generations = table[provider.Generation]("generated") // by projector and number
	leases      = table[lease]("leases")                  // by name
	sequences   = table[int64]("sequences")               // the last numbers of tables
)

type (
	snapshot struct {
		eventstore.Snapshot
		SavedAt time.Time
	}
	marker struct {
		At       time.Time
		Position int64
	}
	lease struct {
		Token claim.Token
		Until time.Time
	}
)

// key joins texts and numbers into an unambiguous key. Keys that begin with the same texts are next to
// each other, numbers in their order. Texts that are too long for bbolt are hashed.
func key(parts ...any) (k []byte) {
	for _, part := range parts {
		switch p := part.(type) {
		case string:
			if len(p) > 1024 {
				sum := sha256.Sum256([]byte(p))
				p = "\xff" + string(sum[:])
			}
			k = append(binary.BigEndian.AppendUint32(k, uint32(len(p))), p...)
		case int:
			k = binary.BigEndian.AppendUint64(k, uint64(p))
		case int64:
			k = binary.BigEndian.AppendUint64(k, uint64(p))
		case provider.Lane:
			k = append(k, p[:]...)
		}
	}
	return k
}

// text returns the first text of a key, and the rest.
func text(k []byte) (string, []byte) {
	n := 4 + binary.BigEndian.Uint32(k)
	return string(k[4:n]), k[n:]
}

func number(k []byte) int64 { return int64(binary.BigEndian.Uint64(k[len(k)-8:])) }

func (t table[V]) decode(s *session, value []byte) (v V) {
	if p, ok := any(&v).(*provider.Parked); ok {
		s.fail(gob.NewDecoder(bytes.NewReader(value)).Decode(p))
	} else {
		s.fail(json.Unmarshal(value, &v))
	}
	return v
}

func bucketOf(tx *bbolt.Tx) *bbolt.Bucket { return tx.Bucket([]byte("kinora")) }

// at returns the key of a row in the bucket of all tables.
func (t table[V]) at(k []byte) []byte { return append([]byte(t+"/"), k...) }

func (t table[V]) get(s *session, k []byte) (v V, ok bool) {
	if value := bucketOf(s.tx).Get(t.at(k)); value != nil {
		return t.decode(s, value), true
	}
	return v, false
}

func (t table[V]) has(s *session, k []byte) bool { return bucketOf(s.tx).Get(t.at(k)) != nil }

func (t table[V]) put(s *session, k []byte, v V) {
	var value bytes.Buffer
	if _, ok := any(v).(provider.Parked); ok {
		s.fail(gob.NewEncoder(&value).Encode(v))
	} else {
		s.fail(json.NewEncoder(&value).Encode(v))
	}
	s.fail(bucketOf(s.tx).Put(t.at(k), value.Bytes()))
}

func (t table[V]) drop(s *session, k []byte) { s.fail(bucketOf(s.tx).Delete(t.at(k))) }

// next returns a new number, which no row of the table had.
func (t table[V]) next(s *session) int64 {
	n, _ := sequences.get(s, key(string(t)))
	sequences.put(s, key(string(t)), n+1)
	return n + 1
}

// from yields the rows with a prefix, from a key on. The body may drop or change the row that it got,
// and no other row of the table.
func (t table[V]) from(s *session, prefix, first []byte) iter.Seq2[[]byte, V] {
	return func(yield func([]byte, V) bool) {
		c := bucketOf(s.tx).Cursor()
		for k, value := c.Seek(t.at(first)); k != nil && bytes.HasPrefix(k, t.at(prefix)); {
			k = bytes.Clone(k)
			if !yield(k[len(t)+1:], t.decode(s, value)) {
				return
			}
			next, after := c.Seek(k)
			if value = after; bytes.Equal(next, k) {
				next, value = c.Next()
			}
			k = next
		}
	}
}

func (t table[V]) under(s *session, prefix []byte) iter.Seq2[[]byte, V] {
	return t.from(s, prefix, prefix)
}

// last returns the last row whose key is a prefix and a number.
func (t table[V]) last(s *session, prefix []byte) (k []byte, v V) {
	c := bucketOf(s.tx).Cursor()
	step := c.Prev
	if behind, _ := c.Seek(append(t.at(prefix), 0x80)); behind == nil { // numbers are positive
		step = c.Last
	}
	k, value := step()
	if k == nil || !bytes.HasPrefix(k, t.at(prefix)) {
		return nil, v
	}
	return bytes.Clone(k), t.decode(s, value)
}
