package eventstore

import (
	"context"
	"fmt"
	"strconv"

	"github.com/google/uuid"
	"github.com/kinora-go/kinora/internal/check"
)

// CommandID identifies a command, so that it may be sent again, at once or much later: see
// Repository.Update. It has 1 to 255 bytes: what the sender of the command chose for it, for example the
// Idempotency-Key of an HTTP request, and before that the operation and the client, because senders use one key for
// several operations. The same id may be used for several streams.
type CommandID string

// commands is the UUID namespace of the ids of events that commands with a CommandID append.
var commands = uuid.MustParse("2f1d6a0e-7c0b-5f2e-9b1a-6d1c3e5a7b90")

// eventID returns the id of the i-th event that the command appends to a stream.
func (c CommandID) eventID(stream string, i int) string {
	return uuid.NewSHA1(commands, []byte(stream+"\x00"+string(c)+"\x00"+strconv.Itoa(i))).String()
}

// theCommand returns the CommandID of an Update; empty: there is none.
func theCommand(given []CommandID) (CommandID, error) {
	switch {
	case len(given) == 0:
		return "", nil
	case len(given) > 1:
		return "", invalid("command id", "give at most one")
	}
	return given[0], invalid("command id", check.Text(string(given[0]), check.MaxID))
}

// outcome returns the events that a command has appended to a stream. Count is 0 if there are none.
func (c CommandID) outcome(ctx context.Context, store Store, stream string) (Appended, error) {
	finder, ok := store.(interface {
		FindEvent(ctx context.Context, id string) (Appended, error)
	})
	if !ok {
		return Appended{}, invalid("command id", "the store does not find events by their ids: it must implement provider.EventFinder")
	}
	at, err := finder.FindEvent(ctx, c.eventID(stream, 0))
	if err != nil || at.Version == 0 {
		return Appended{}, err
	}
	at.Count, at.Replayed = 0, true
	for raw, err := range store.ReadStream(ctx, stream, at.Version-1) {
		if err != nil {
			return Appended{}, err
		}
		if raw.ID != c.eventID(stream, at.Count) {
			break
		}
		at.Version, at.Position, at.Count = raw.Version, raw.Position, at.Count+1
	}
	if at.Count == 0 {
		return Appended{}, fmt.Errorf("%w: an event of the command is not in stream %s", ErrEventIDReused, stream)
	}
	return at, nil
}
