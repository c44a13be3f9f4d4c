package provider

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
)

// Lane identifies a queue of messages that wait for each other: those of one ordering key, or a single message.
type Lane [sha256.Size]byte

// MarshalText makes a Lane hexadecimal digits.
func (l Lane) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, l[:]), nil }

// Scan implements sql.Scanner for bytes. Of those of a lane that Kinora did not make it takes what fits.
func (l *Lane) Scan(src any) error {
	b, ok := src.([]byte)
	if !ok {
		return fmt.Errorf("a lane of type %T", src)
	}
	*l = Lane{}
	copy(l[:], b)
	return nil
}

// LaneOfKey is the lane of the messages with this ordering key.
func LaneOfKey(key string) Lane { return sha256.Sum256([]byte("key\x00" + key)) }

// LaneOfMessage is the lane of a message that waits for no other, and no other for it.
func LaneOfMessage(id string) Lane { return sha256.Sum256([]byte("id\x00" + id)) }
