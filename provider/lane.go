package provider

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
)

// Lane identifies a queue of messages that wait for each other: those of one ordering key, or a
// single message.
type Lane [sha256.Size]byte

// MarshalText returns the lane in hexadecimal.
func (l Lane) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, l[:]), nil }

// Scan implements sql.Scanner for []byte. Shorter values are padded with zeros, and longer ones
// are cut.
func (l *Lane) Scan(src any) error {
	b, ok := src.([]byte)
	if !ok {
		return fmt.Errorf("lane: cannot scan %T: must be []byte", src)
	}
	*l = Lane{}
	copy(l[:], b)
	return nil
}

// LaneOfKey returns the lane of the messages with an ordering key.
func LaneOfKey(key string) Lane { return sha256.Sum256([]byte("key\x00" + key)) }

// LaneOfMessage returns the lane of a single message: it waits for no other message, and no other
// waits for it.
func LaneOfMessage(id string) Lane { return sha256.Sum256([]byte("id\x00" + id)) }
