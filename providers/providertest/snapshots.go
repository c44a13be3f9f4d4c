package providertest

import (
	"errors"
	"strings"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/provider"
)

var snapshotCases = []testCase{
	{
		// Promise: G1.8
		name: "a snapshot is read as saved", play: snapshotIsRead,
		rule: "LoadSnapshot returns the snapshot that was saved last for the stream and the schema, or the zero Snapshot",
	},
	{
		name: "old snapshots of other schemas", play: oldSnapshotsGo,
		rule: "SaveSnapshot deletes snapshots of the stream for other schemas that were not replaced for a day",
	},
	{
		// Promise: G1.8
		name: "snapshots in a transaction", play: snapshotInTx,
		rule: "A snapshot that a TxStore saves is visible to it at once, and to others if the transaction commits",
	},
	{
		name: "an invalid snapshot", play: invalidSnapshot,
		rule: "A snapshot that cannot be stored is an *InvalidError, and changes nothing",
	},
}

func snapshotAt(schema string, version int64) eventstore.Snapshot {
	return eventstore.Snapshot{Schema: schema, Version: version, EventID: newID(), State: []byte("\x00\xffstate")}
}

func (s *stage) snapshot(from eventstore.SnapshotStore, stream, schema string) eventstore.Snapshot {
	s.Helper()
	found, err := from.LoadSnapshot(s.ctx, stream, schema)
	s.ok(err, "load the snapshot")
	return found
}

func (s *stage) save(stream string, of eventstore.Snapshot) {
	s.Helper()
	s.ok(s.db.SaveSnapshot(s.ctx, stream, of), "save the snapshot")
}

func snapshotIsRead(s *stage) {
	same(s, "snapshot of a stream without one", s.snapshot(s.db, "review-1", "a"), eventstore.Snapshot{})
	a, b, other := snapshotAt("a", 7), snapshotAt("b", 3), snapshotAt("a", 5)
	s.save("review-1", a)
	s.save("review-1", b)
	s.save("review-2", other)
	same(s, "snapshot", s.snapshot(s.db, "review-1", "a"), a)
	same(s, "snapshot for the other schema", s.snapshot(s.db, "review-1", "b"), b)
	same(s, "snapshot of the other stream", s.snapshot(s.db, "review-2", "a"), other)
	lower := snapshotAt("a", 2)
	s.save("review-1", lower)
	same(s, "snapshot that replaced a newer one", s.snapshot(s.db, "review-1", "a"), lower)
}

func oldSnapshotsGo(s *stage) {
	old, kept := snapshotAt("old", 1), snapshotAt("old", 1)
	s.save("review-1", old)
	s.save("review-2", kept)
	s.advance(23 * time.Hour)
	s.save("review-1", snapshotAt("new", 2))
	same(s, "snapshot of 23 hours", s.snapshot(s.db, "review-1", "old"), old)
	s.advance(2 * time.Hour)
	s.save("review-1", snapshotAt("new", 3))
	same(s, "snapshot of 25 hours", s.snapshot(s.db, "review-1", "old"), eventstore.Snapshot{})
	same(s, "version of the new one", s.snapshot(s.db, "review-1", "new").Version, int64(3))
	same(s, "snapshot of another stream", s.snapshot(s.db, "review-2", "old"), kept)
}

func snapshotInTx(s *stage) {
	first, second := snapshotAt("a", 1), snapshotAt("a", 2)
	s.save("review-1", first)
	undo := errors.New("undo")
	for _, end := range []error{undo, nil} {
		err := s.inTx(s.ctx, func(view TxView, _ Add) error {
			same(s, "snapshot before", s.snapshot(view, "review-1", "a"), first)
			s.ok(view.SaveSnapshot(s.ctx, "review-1", second), "save the snapshot")
			same(s, "snapshot in the transaction", s.snapshot(view, "review-1", "a"), second)
			same(s, "snapshot for others", s.snapshot(s.db, "review-1", "a"), first)
			return end
		})
		s.require(errors.Is(err, end), "the error %v is that of the function", err)
	}
	same(s, "snapshot after the commit", s.snapshot(s.db, "review-1", "a"), second)
}

func invalidSnapshot(s *stage) {
	good := snapshotAt("a", 1)
	s.save("review-1", good)
	for name, change := range map[string]func(n *eventstore.Snapshot) (stream string){
		"stream":       func(*eventstore.Snapshot) string { return "no stream" },
		"empty schema": func(n *eventstore.Snapshot) string { n.Schema = ""; return "review-1" },
		"long schema":  func(n *eventstore.Snapshot) string { n.Schema = strings.Repeat("s", 65); return "review-1" },
		"NUL":          func(n *eventstore.Snapshot) string { n.EventID = "a\x00"; return "review-1" },
		"version":      func(n *eventstore.Snapshot) string { n.Version = -1; return "review-1" },
		"state": func(n *eventstore.Snapshot) string {
			n.State = make([]byte, provider.MaxSnapshotBytes+1)
			return "review-1"
		},
	} {
		bad := snapshotAt("a", 2)
		err := s.db.SaveSnapshot(s.ctx, change(&bad), bad)
		s.require(errors.Is(err, eventstore.ErrInvalid), "%s: the error %v is ErrInvalid", name, err)
	}
	_, err := s.db.LoadSnapshot(s.ctx, "no stream", "a")
	s.require(errors.Is(err, eventstore.ErrInvalid), "the error %v is ErrInvalid", err)
	same(s, "snapshot", s.snapshot(s.db, "review-1", "a"), good)
}
