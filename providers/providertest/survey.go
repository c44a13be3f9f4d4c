package providertest

import (
	"fmt"
	"time"

	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

func (s *stage) survey(limit int) provider.Survey {
	s.Helper()
	all, err := s.operations().Survey(s.ctx, limit)
	s.ok(err, "survey")
	return all
}

func emptySurvey(s *stage) {
	all := s.survey(100)
	s.require(!all.Now.IsZero(), "it has the time of the store")
	all.Now, all.InFlight = time.Time{}, nil
	same(s, "rows", len(all.Builds)+len(all.Stuck)+len(all.Entries)+len(all.Tasks)+len(all.DueTasks)+len(all.Services)+len(all.Leases)+len(all.Waits)+len(all.Waiting), 0)
	same(s, "head", []any{all.Head, all.Settled}, []any{provider.LogPlace{}, int64(0)})
	is, known, err := s.operations().SchemaVersion(s.ctx)
	s.ok(err, "read the version")
	s.require(is == known && is > 0, "the version %d is the program's %d", is, known)
}

// survey fills the store, and checks each part of a survey with a limit above and below the numbers.
func survey(s *stage) {
	var last eventstore.Appended
	for i := range 3 {
		last = s.append(fmt.Sprintf("review-%d", i), eventstore.NoStream, drafts(1)...)
	}
	parked := s.park(0, s.failed("m-1", "ann"), s.behind("m-2", "ann"), s.behind("m-3", "ann"), s.failed("m-4", "ben"))
	stuck := s.failed("m-5", "cid")
	s.open(s.parking(-time.Second, stuck))
	s.open(s.parking(0, s.behind("m-6", "cid"), s.behind("m-7", "cid")))
	s.park(0, s.unable("m-8", "dan", "event b 2"), s.behind("m-9", "dan"))
	_, err := s.db.SetCheckpoint(s.ctx, provider.Build{Projector: "other", Generation: 1}, provider.Checkpoint{}, provider.Checkpoint{
		Place: provider.LogPlace{Position: 1}, Mode: provider.ModeCatchUp, Handlers: []provider.Began{{Handler: "other/a", Type: "t"}},
	})
	s.ok(err, "set a checkpoint")
	_, err = s.db.AcquireLease(s.ctx, "reader/other", claim.Terms{Holder: "me", Token: claim.NewToken(), Lease: time.Hour})
	s.ok(err, "acquire a lease")
	s.ok(s.db.InFlight(s.ctx, s.build(), provider.Worker{Runner: "me", Number: 1}, []string{"m-1", "m-2"}), "record messages in flight")
	s.enqueue(outbox.Message{ID: "e-1", Topic: "t", Key: "a"}, outbox.Message{ID: "e-2", Topic: "t", Key: "a"}, outbox.Message{ID: "e-3", Topic: "t", Key: "b"},
		outbox.Message{ID: "e-4", Topic: "t", Key: "c"}, outbox.Message{ID: "e-5", Topic: "t", Key: "c"})
	claimed, err := provider.ClaimEntries(s.ctx, s.db, provider.EntryQuery{}, claim.Terms{Holder: "relay", Lease: time.Hour, Limit: 4})
	s.ok(err, "claim")
	_, err = s.db.MarkEntries(s.ctx, []provider.EntryMark{{Seq: claimed[0].Seq, Token: claimed[0].Token, To: outbox.Abandoned, Error: "refused"}, {Seq: claimed[1].Seq, Token: claimed[1].Token, To: outbox.Pending}})
	s.ok(err, "mark")
	_, err = s.db.HoldEntries(s.ctx, 0, 100)
	s.ok(err, "hold")

	all := s.survey(100)
	same(s, "head", all.Head.Position, last.Position)
	same(s, "settled", all.Settled, last.Position)
	s.require(!all.Head.RecordedAt.IsZero() && all.Head.ID != "", "the head has a time and an id: %+v", all.Head)
	same(s, "builds", len(all.Builds), 2)
	other, own := all.Builds[0], all.Builds[1]
	same(s, "another build", []any{other.Projector, other.Generation, other.Checkpoint.Mode, other.Checkpoint.Place.Position, other.Checkpoint.Handlers, other.Parked},
		[]any{"other", 1, provider.ModeCatchUp, int64(1), []provider.Began{{Handler: "other/a", Type: "t"}}, provider.Count{}})
	same(s, "parked", []any{own.Build, own.Parked, own.Lanes, own.StuckLanes}, []any{s.build(), provider.Count{N: 9}, provider.Count{N: 4}, provider.Count{N: 1}})
	s.require(own.Oldest.Equal(parked[0].At), "the oldest was parked at %v: %v", parked[0].At, own.Oldest)
	same(s, "stuck", len(all.Stuck), 1)
	first := all.Stuck[0].First
	same(s, "the stuck message", []any{first.MessageID, first.Key, first.Code, first.State, len(first.Payload), len(first.Headers), all.Stuck[0].Behind},
		[]any{"m-5", "cid", "panic", provider.StateStuck, 0, 0, provider.Count{N: 2}})
	var entries []string
	for _, e := range all.Entries {
		entries = append(entries, fmt.Sprint(e.Status, " ", e.Holder, " ", e.N, " ", e.AtLeast))
		s.require(!e.Oldest.IsZero() && e.Until.IsZero() == (e.Status != outbox.Claimed), "the times of %+v", e)
	}
	same(s, "entries", entries, []string{"abandoned  1 false", "claimed relay 2 false", "held  1 false", "pending  1 false"})
	same(s, "leases", []any{len(all.Leases), all.Leases[0].Name, all.Leases[0].Holder}, []any{1, "reader/other", "me"})
	same(s, "in flight", all.InFlight, map[string]int64{"me": 2})

	few := s.survey(2)
	same(s, "parked, with a limit of 2", []any{few.Builds[1].Parked, few.Builds[1].StuckLanes}, []any{provider.Count{N: 2, AtLeast: true}, provider.Count{N: 1}})
	same(s, "behind, with a limit of 2", few.Stuck[0].Behind, provider.Count{N: 2, AtLeast: true})
	for _, e := range few.Entries { // two rows were looked at, of pending and claimed ones
		s.require(e.AtLeast || e.Status != outbox.Claimed && e.Status != outbox.Pending, "more than two entries are open: %+v", e)
	}
	if s.tasks != nil {
		s.surveyTasks()
	}
}

func (s *stage) surveyTasks() {
	s.Helper()
	s.ok(s.inTask(s.ctx, func(v taskView) error {
		return v.Enqueue(s.ctx, provider.TaskDraft{ID: "t-1", Kind: "a/one", Input: []byte(`1`)}, provider.TaskDraft{ID: "t-2", Kind: "a/one", Input: []byte(`1`)},
			provider.TaskDraft{ID: "t-3", Kind: "a/two", Input: []byte(`1`)}, provider.TaskDraft{ID: "t-4", Kind: "b/one", Input: []byte(`1`), After: time.Hour})
	}), "enqueue tasks")
	taken, err := provider.ClaimTasks(s.ctx, s.tasks, provider.TaskQuery{Kinds: []string{"a/two"}}, claim.Terms{Holder: "worker", Lease: time.Hour})
	s.ok(err, "claim tasks")
	_, err = s.tasks.ChangeTasks(s.ctx, []provider.TaskChange{{ID: "t-3", Token: taken[0].Token, To: provider.TaskAbandoned, Code: "x"}})
	s.ok(err, "abandon a task")
	_, err = provider.ClaimTasks(s.ctx, s.tasks, provider.TaskQuery{Kinds: []string{"a/one"}}, claim.Terms{Holder: "worker", Lease: time.Hour, Limit: 1})
	s.ok(err, "claim tasks")
	all := s.survey(100)
	var tasks []string
	for _, t := range all.Tasks {
		tasks = append(tasks, fmt.Sprint(t.Status, " ", t.Holder, " ", t.N, " ", t.AtLeast))
		s.require(!t.Oldest.IsZero() && t.Until.IsZero() == (t.Status != provider.TaskClaimed), "the times of %+v", t)
	}
	same(s, "tasks", tasks, []string{"abandoned  1 false", "claimed worker 1 false", "pending  2 false"})
	s.require(len(all.DueTasks) == 1 && all.DueTasks[0].Kind == "a/one" && !all.DueTasks[0].Due.After(all.Now), "a/one is due: %+v", all.DueTasks)
	s.advance(2 * time.Hour)
	all = s.survey(100)
	s.require(len(all.DueTasks) == 2 && all.DueTasks[1].Kind == "b/one", "each kind has a task that is due: %+v", all.DueTasks)
}
