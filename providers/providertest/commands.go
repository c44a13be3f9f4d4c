package providertest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kinora-go/kinora/eventstore"
)

var commandCases = []testCase{
	{
		name: "an event is found by its id", play: eventIsFound,
		rule: "FindEvent returns the place of the event with this id, with Count 1, or a zero Appended",
	},
	{
		// Promise: G1.12
		name: "commands that are sent again", play: commandsSentAgain,
		rule: "With a CommandID, a command that has appended events is not decided again, and the result is their place with Replayed set",
	},
	{
		// Promise: G1.12
		name: "a command at once", play: commandAtOnce,
		rule: "Of commands with one id that run at the same time, one appends its events, and the others return their place",
	},
	{
		// Promise: G1.12
		name: "a command of several streams", play: commandOfSeveralStreams,
		rule: "A CommandID may be used for several streams in one transaction, and a repetition appends nothing to any of them",
	},
}

func eventIsFound(s *stage) {
	stored := drafts(3)
	at := s.append("review-1", eventstore.NoStream, stored...)
	found, err := s.db.FindEvent(s.ctx, stored[1].ID)
	s.ok(err, "find")
	same(s, "place", found, eventstore.Appended{Stream: "review-1", Version: 2, Position: at.Position - 1, Count: 1, Log: at.Log})
	for _, id := range []string{newID(), "no uuid", ""} {
		found, err = s.db.FindEvent(s.ctx, id)
		s.ok(err, "find")
		same(s, "place of "+id, found, eventstore.Appended{})
	}
	own := draft()
	s.ok(s.inTx(s.ctx, func(view TxView, _ Add) error {
		_, err := view.Append(s.ctx, "review-1", 3, []eventstore.Draft{own})
		s.ok(err, "append")
		found, err := view.FindEvent(s.ctx, own.ID)
		s.ok(err, "find in the transaction")
		same(s, "version in the transaction", found.Version, int64(4))
		found, err = s.db.FindEvent(s.ctx, own.ID)
		s.ok(err, "find")
		same(s, "version for others", found.Version, int64(0))
		return nil
	}), "commit")
}

type happened struct{ N int }

var happenedTypes = eventstore.NewTypes(eventstore.Type[happened]("thing.happened"))

// things counts its events.
type things struct{ N int }

// Apply implements eventstore.Aggregate.
func (t *things) Apply(any) { t.N++ }

// happen returns a decision that appends n events, and counts how often it is made.
func happen(n int, decided *int) func(*things) ([]any, error) {
	return func(t *things) (events []any, _ error) {
		*decided++
		for i := range n {
			events = append(events, happened{t.N + i})
		}
		return events, nil
	}
}

func (s *stage) things(cfg *eventstore.RepositoryConfig) *eventstore.Repository[*things] {
	s.Helper()
	repo, err := eventstore.NewRepository(s.db, happenedTypes, "review", func(string) *things { return &things{} }, cfg)
	s.ok(err, "repository")
	return repo
}

func commandsSentAgain(s *stage) {
	for name, cfg := range map[string]*eventstore.RepositoryConfig{
		"plain": nil, "snapshots": {Snapshots: eventstore.Snapshots{Every: 1}},
	} {
		repo, decided := s.things(cfg), 0
		update := func(n int, command eventstore.CommandID) eventstore.Appended {
			at, err := repo.Update(s.ctx, name, happen(n, &decided), command)
			s.ok(err, "update")
			return at
		}
		first, second := update(2, "a"), update(3, "b")
		update(1, "c")
		same(s, "decisions", decided, 3)
		for command, want := range map[eventstore.CommandID]eventstore.Appended{"a": first, "b": second} {
			want.Replayed = true
			same(s, "place of command "+string(command), update(7, command), want)
		}
		same(s, "decisions after the repetitions", decided, 3)
		same(s, "events", len(s.readIDs("review-"+name)), 6)
		update(0, "d")
		update(1, "d")
		same(s, "decisions of a command that appended nothing at first", decided, 5)
		refuse := errors.New("no")
		_, err := repo.Update(s.ctx, name, func(*things) ([]any, error) { return nil, refuse }, "e")
		s.require(errors.Is(err, refuse), "the error %v is that of the decision", err)
		for _, bad := range [][]eventstore.CommandID{{""}, {"a\x00"}, {"a", "b"}} {
			_, err := repo.Update(s.ctx, name, happen(1, &decided), bad...)
			s.require(errors.Is(err, eventstore.ErrInvalid), "command %q: the error %v is ErrInvalid", bad, err)
		}
	}
}

func commandAtOnce(s *stage) {
	const callers, rounds = 8, 5
	repo := s.things(&eventstore.RepositoryConfig{Retries: 100})
	for round := range rounds {
		var all sync.WaitGroup
		places := make([]eventstore.Appended, callers)
		errs := make([]error, callers)
		for i := range callers {
			all.Go(func() {
				decided := 0
				places[i], errs[i] = repo.Update(s.ctx, "once", happen(2, &decided), eventstore.CommandID(fmt.Sprint("command ", round)))
			})
		}
		all.Wait()
		replayed := 0
		for i, at := range places {
			s.ok(errs[i], "update")
			if at.Replayed {
				replayed++
			}
			at.Replayed = false
			want := places[0]
			want.Replayed = false
			same(s, "place", at, want)
		}
		same(s, "events", len(s.readIDs("review-once")), 2*(round+1))
		s.require(replayed >= callers-1, "%d of %d are repetitions", replayed, callers)
	}
}

func commandOfSeveralStreams(s *stage) {
	repo, decided := s.things(nil), 0
	transfer := func(ctx context.Context, undo error) error {
		return s.inTx(ctx, func(view TxView, add Add) error {
			from, err := repo.UpdateTx(ctx, view, "from", happen(1, &decided), "transfer")
			s.ok(err, "update")
			to, err := repo.UpdateTx(ctx, view, "to", happen(1, &decided), "transfer")
			s.ok(err, "update")
			same(s, "both are repetitions, or none", from.Replayed, to.Replayed)
			if !from.Replayed {
				s.ok(add(ctx, "transfers", 1), "add")
			}
			return undo
		})
	}
	undo := errors.New("undo")
	s.require(errors.Is(transfer(s.ctx, undo), undo), "the transaction is rolled back")
	for range 3 {
		s.ok(transfer(s.ctx, nil), "transfer")
	}
	same(s, "decisions", decided, 4)
	for _, stream := range []string{"review-from", "review-to"} {
		same(s, "events of "+stream, len(s.readIDs(stream)), 1)
	}
	same(s, "transfers", s.total("transfers"), 1)
}
