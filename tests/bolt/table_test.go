package bolt

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/gob"
	"encoding/json"
	"iter"
	"time"

	"go.etcd.io/bbolt"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

// table is a part of the bucket, with values of a type. They are stored as JSON, and parked messages as gob: their
// texts may be any bytes.
type table[V any] string

// The tables.
const (
	lineages    = table[string]("lineage")
	model       = table[[]byte]("model")                  // the read model
	log         = table[eventstore.Raw]("events")         // by position
	streams     = table[int64]("streams")                 // positions, by stream and version
	places      = table[place]("places")                  // by event id
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

type place struct {
	Stream            string
	Version, Position int64
}

type snapshot struct {
	eventstore.Snapshot
	SavedAt time.Time
}

type marker struct {
	At       time.Time
	Position int64
}

type lease struct {
	Token claim.Token
	Until time.Time
}

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

// number returns the number at the end of a key.
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

// under yields the rows with a prefix.
func (t table[V]) under(s *session, prefix []byte) iter.Seq2[[]byte, V] {
	return t.from(s, prefix, prefix)
}

// last returns the last row whose key is a prefix and a number.
func (t table[V]) last(s *session, prefix []byte) (k []byte, v V) {
	c := bucketOf(s.tx).Cursor()
	k, value := c.Seek(append(t.at(prefix), 0x80)) // numbers are positive
	if k == nil {
		k, value = c.Last()
	} else {
		k, value = c.Prev()
	}
	if k == nil || !bytes.HasPrefix(k, t.at(prefix)) {
		return nil, v
	}
	return bytes.Clone(k), t.decode(s, value)
}
