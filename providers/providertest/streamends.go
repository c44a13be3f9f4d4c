package providertest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var streamEndCases = []testCase{
	{
		// Promise: G1.10
		name: "nothing after the end", play: nothingAfterTheEnd,
		rule: "After an event of TypeEnded every append is ErrStreamEnded and writes nothing, except a repeated one that is stored; the transaction stays usable",
	},
	{
		name: "the end is the last event", play: endIsLast,
		rule: "An append with an event behind one of TypeEnded is an *InvalidError",
	},
	{
		// Promise: G1.10
		name: "appends while a stream ends", play: appendsWhileEnding,
		rule: "Of appends that run at the same time, none is behind the event that ends the stream",
	},
	{
		name: "an aggregate that has ended", play: aggregateEnds,
		rule: "Update of a stream that has ended is ErrStreamEnded and decides nothing, and no snapshot is stored for it",
	},
}

var archiveCases = []testCase{
	{
		// Promise: G1.11
		name: "archive a stream", play: archiveStream, options: Options{Route: outbox.ByCategory},
		rule: "Archive deletes the events before the end, and the snapshots; the last event, the version, the entries and other streams stay, and readers of the log do not wait",
	},
	{
		name: "archive a stream that has not ended", play: archiveNotEnded,
		rule: "Archive of a stream that has not ended, or does not exist, is ErrNotEnded and deletes nothing",
	},
}

var archiveAheadCases = []testCase{
	{
		// Promise: G1.11
		name: "archive ahead of a reader", play: archiveAhead,
		rule: "Archive is ErrNotPassed with their names, and deletes nothing, while a projector that takes events of the stream has not passed them, unless it is ignored",
	},
}

// archiver is what a store that archives has.
type archiver interface {
	Archive(ctx context.Context, stream string, o eventstore.ArchiveOptions) (int64, error)
}

// end returns the event that ends a stream.
func end() eventstore.Draft {
	return eventstore.Draft{ID: newID(), Type: eventstore.TypeEnded, Schema: 1, Data: []byte("{}")}
}

func nothingAfterTheEnd(s *stage) {
	for name, expected := range map[string]eventstore.Expected{"exact": 2, "any": eventstore.Any} {
		stream := "review-" + name
		first, last := drafts(2), []eventstore.Draft{draft(), end()}
		s.append(stream, eventstore.NoStream, first...)
		s.append(stream, expected, last...)
		before := s.dump(stream)
		for _, bad := range []eventstore.Expected{eventstore.Any, eventstore.NoStream, 3, 4, 5} {
			for _, ds := range [][]eventstore.Draft{drafts(1), drafts(2), {end()}, {first[0], draft()}} {
				_, err := s.db.Append(s.ctx, stream, bad, ds)
				s.require(errors.Is(err, eventstore.ErrStreamEnded), "an append at %d: the error %v is ErrStreamEnded", bad, err)
				s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
					_, err := view.Append(s.ctx, stream, bad, ds)
					s.require(errors.Is(err, eventstore.ErrStreamEnded), "in a transaction: the error %v is ErrStreamEnded", err)
					return nil
				}), "commit")
			}
		}
		s.unchanged(before, "appends behind the end")
		at, err := s.db.Append(s.ctx, stream, expected, last)
		s.ok(err, "append the end again")
		same(s, "replayed", at.Replayed, true)
		at, err = s.db.Append(s.ctx, stream, eventstore.NoStream, first)
		s.ok(err, "append again what is before the end")
		same(s, "replayed", at.Replayed, true)
	}
	s.append("review-at-once", eventstore.NoStream, end())
	_, err := s.db.Append(s.ctx, "review-at-once", eventstore.Any, drafts(1))
	s.require(errors.Is(err, eventstore.ErrStreamEnded), "a stream that begins with its end: the error %v is ErrStreamEnded", err)
}

func endIsLast(s *stage) {
	_, err := s.db.Append(s.ctx, "review-1", eventstore.Any, []eventstore.Draft{end(), draft()})
	s.invalid(err, "append behind the end")
	same(s, "events", len(s.readIDs("review-1")), 0)
}

func appendsWhileEnding(s *stage) {
	for round := range 10 {
		stream := fmt.Sprint("review-", round)
		s.append(stream, eventstore.NoStream, draft())
		var refused atomic.Int64
		together(8, func(i int) {
			for n := range 10 {
				ds := []eventstore.Draft{draft()}
				if i == 0 && n == 5 {
					ds = []eventstore.Draft{draft(), end()}
				}
				_, err := s.db.Append(s.ctx, stream, eventstore.Any, ds)
				if errors.Is(err, eventstore.ErrStreamEnded) {
					refused.Add(1)
				} else if err != nil {
					s.Errorf("append: %v", err)
				}
			}
		})
		events := s.read(s.db, stream, 0)
		for i, e := range events {
			same(s, "the event is the last one", e.Type == eventstore.TypeEnded, i == len(events)-1)
		}
		same(s, "events and refused appends", int64(len(events))+refused.Load(), int64(1+80+1))
	}
}

func aggregateEnds(s *stage) {
	repo, decided := s.things(&eventstore.RepositoryConfig{Snapshots: eventstore.Snapshots{Every: 1, Schema: "v1"}}), 0
	_, err := repo.Update(s.ctx, "1", happen(2, &decided))
	s.ok(err, "update")
	_, err = repo.Update(s.ctx, "1", func(*things) ([]any, error) { return []any{happened{}, eventstore.Ended{}}, nil }, "end")
	s.ok(err, "end")
	_, err = repo.Update(s.ctx, "1", happen(1, &decided))
	s.require(errors.Is(err, eventstore.ErrStreamEnded), "the error %v is ErrStreamEnded", err)
	same(s, "decisions", decided, 1)
	at, err := repo.Update(s.ctx, "1", happen(1, &decided), "end")
	s.ok(err, "repeat the command that has ended it")
	same(s, "replayed", at.Replayed, true)
	_, version, err := repo.Load(s.ctx, "1")
	s.ok(err, "load")
	same(s, "version", version, int64(4))
	s.archives(func(a archiver) {
		_, err := a.Archive(s.ctx, "review-1", eventstore.ArchiveOptions{})
		s.ok(err, "archive")
		_, version, err := repo.Load(s.ctx, "1")
		s.ok(err, "load what is archived")
		same(s, "version of what is archived", version, int64(4))
		_, err = repo.Update(s.ctx, "1", happen(1, &decided))
		s.require(errors.Is(err, eventstore.ErrStreamEnded), "the error %v of an archived aggregate is ErrStreamEnded", err)
	})
}

// archives calls fn if the store archives.
func (s *stage) archives(fn func(archiver)) {
	if a, ok := s.store.(archiver); ok {
		fn(a)
	}
}

func archiveStream(s *stage) {
	s.archives(func(a archiver) {
		old := drafts(5)
		s.append("review-1", eventstore.NoStream, old...)
		s.append("other-1", eventstore.NoStream, drafts(3)...)
		late := eventstore.Snapshot{Schema: "v1", Version: 5, EventID: old[4].ID, State: []byte("x")}
		s.ok(s.db.SaveSnapshot(s.ctx, "review-1", late), "save a snapshot")
		tombstone := end()
		last := s.append("review-1", 5, tombstone)
		s.append("other-1", 3, drafts(2)...)
		entries := s.entries(outbox.Filter{})
		n, err := a.Archive(s.ctx, "review-1", eventstore.ArchiveOptions{})
		s.ok(err, "archive")
		same(s, "deleted events", n, int64(5))
		left := s.read(s.db, "review-1", 0)
		same(s, "events left", len(left), 1)
		same(s, "version of the last event", left[0].Version, int64(6))
		same(s, "position of the last event", left[0].Position, last.Position)
		same(s, "entries", len(s.entries(outbox.Filter{})), len(entries))
		for _, save := range []bool{false, true} {
			if save { // an update that was slow
				s.ok(s.db.SaveSnapshot(s.ctx, "review-1", late), "save a snapshot")
			}
			kept, err := s.db.LoadSnapshot(s.ctx, "review-1", "v1")
			s.ok(err, "load the snapshot")
			same(s, "version of the snapshot", kept.Version, int64(0))
		}
		var ids []string
		for _, e := range s.log(provider.LogQuery{}) {
			ids = append(ids, e.Stream)
		}
		same(s, "the log", ids, []string{"other-1", "other-1", "other-1", "review-1", "other-1", "other-1"})
		for _, ds := range [][]eventstore.Draft{drafts(1), old, {old[4], draft()}, {old[4], tombstone}} {
			_, err := s.db.Append(s.ctx, "review-1", eventstore.Any, ds)
			s.require(errors.Is(err, eventstore.ErrStreamEnded), "the error %v of an append to it is ErrStreamEnded", err)
		}
		n, err = a.Archive(s.ctx, "review-1", eventstore.ArchiveOptions{})
		s.ok(err, "archive again")
		same(s, "deleted events", n, int64(0))
		if s.reopen != nil {
			same(s, "events left through a new handle", len(s.reopen().readIDs("review-1")), 1)
		}
	})
}

func archiveNotEnded(s *stage) {
	s.archives(func(a archiver) {
		s.append("review-1", eventstore.NoStream, drafts(3)...)
		for _, stream := range []string{"review-1", "review-2"} {
			_, err := a.Archive(s.ctx, stream, eventstore.ArchiveOptions{})
			s.require(errors.Is(err, eventstore.ErrNotEnded), "the error %v is ErrNotEnded", err)
		}
		same(s, "events", len(s.readIDs("review-1")), 3)
		_, err := a.Archive(s.ctx, "no stream", eventstore.ArchiveOptions{})
		s.invalid(err, "archive an invalid name")
	})
}

func archiveAhead(s *stage) {
	s.archives(func(a archiver) {
		s.append("review-1", eventstore.NoStream, drafts(3)...)
		last := s.read(s.db, "review-1", 2)[0].Position
		s.append("review-1", 3, end())
		refused := func(what string) {
			_, err := a.Archive(s.ctx, "review-1", eventstore.ArchiveOptions{Ignore: []string{"another"}})
			s.require(errors.Is(err, eventstore.ErrNotPassed) && strings.Contains(err.Error(), ": "+s.name+". "), "%s: the error %v is ErrNotPassed with the projector", what, err)
			same(s, "events after "+what, len(s.readIDs("review-1")), 4)
		}
		checkpoint := func(position int64, types ...string) provider.Checkpoint {
			c := provider.Checkpoint{Place: place(position), Lineage: s.logID(), Mode: provider.ModeCatchUp, Token: claim.NewToken()}
			for _, t := range types {
				c.Handlers = append(c.Handlers, provider.Began{Handler: s.name + "/a", Type: t})
			}
			return c
		}
		c := s.set(provider.Checkpoint{}, checkpoint(last-1, draft().Type, eventstore.TypeEnded))
		refused("a projector before the last event that is to be deleted")
		s.set(c, checkpoint(last, draft().Type, eventstore.TypeEnded))
		n, err := a.Archive(s.ctx, "review-1", eventstore.ArchiveOptions{})
		s.ok(err, "archive behind a projector")
		same(s, "deleted events", n, int64(3))

		s.append("review-2", eventstore.NoStream, drafts(2)...)
		s.append("review-2", 2, end())
		_, err = a.Archive(s.ctx, "review-2", eventstore.ArchiveOptions{})
		s.require(errors.Is(err, eventstore.ErrNotPassed), "the error %v is ErrNotPassed", err)
		n, err = a.Archive(s.ctx, "review-2", eventstore.ArchiveOptions{Ignore: []string{s.name}})
		s.ok(err, "archive and ignore a projector")
		same(s, "deleted events", n, int64(2))
	})
}
