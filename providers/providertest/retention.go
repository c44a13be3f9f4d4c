package providertest

import (
	"time"

	"github.com/kinora-go/kinora/outbox"
)

var retentionCases = []testCase{
	{
		name: "old resolved entries are deleted", play: deletedByAge,
		rule: "DeleteEntries deletes entries that have been published or skipped for longer than keep says, and no others",
	},
	{
		name: "published ones that others keep", play: leavesOthersEntries,
		rule: "Retention.Published: zero: leave alone published entries that others keep",
	},
	{
		name: "a deleted entry is forgotten", play: deletedIsNew,
		rule: "A message whose id is in the outbox for that topic already is ignored, unless its entry was deleted",
	},
	{
		name: "deleting page by page", play: deletedInPages,
		rule: "DeleteEntries reads some thousand entries after Seq after. It returns how many it deleted, and the Seq to continue after; 0 at the end",
	},
}

// prune fails the case unless Prune deletes so many.
func (s *stage) prune(published, skipped time.Duration, want int) {
	s.Helper()
	n, err := outbox.Prune(s.ctx, s.db, outbox.EntryRetention{Published: published, Skipped: skipped})
	s.ok(err, "prune")
	same(s, "entries deleted", n, want)
}

func deletedByAge(s *stage) {
	s.prune(time.Hour, time.Hour, 0)
	each := s.oneOfEach("1")
	before := s.dump()
	s.prune(time.Hour, time.Hour, 0)
	s.unchanged(before, "a prune of young entries")
	s.advance(2 * time.Hour)
	young := s.oneOfEach("2")
	s.prune(time.Hour, 3*time.Hour, 1)
	same(s, "published entries left", len(s.entries(outbox.Filter{Seqs: []int64{each[outbox.Published].Seq}})), 0)
	s.prune(3*time.Hour, time.Hour, 1)
	same(s, "skipped entries left", len(s.entries(outbox.Filter{Seqs: []int64{each[outbox.Skipped].Seq}})), 0)
	s.advance(10_000 * time.Hour)
	s.prune(0, 0, 1) // the default: 30 days for skipped entries, none for published ones
	s.prune(time.Nanosecond, 0, 1)
	for _, es := range []map[outbox.Status]outbox.Entry{each, young} {
		for status, e := range es {
			if status != outbox.Published && status != outbox.Skipped {
				s.inStatus(status, e)
			}
		}
	}
}

func leavesOthersEntries(s *stage) {
	each := s.oneOfEach("1")
	s.advance(2 * time.Hour)
	s.prune(0, time.Hour, 1)
	delete(each, outbox.Skipped)
	for status, e := range each {
		s.inStatus(status, e)
	}
	same(s, "entries left", len(s.entries(outbox.Filter{})), len(each))
}

func deletedIsNew(s *stage) {
	each := s.oneOfEach("1")
	s.advance(2 * time.Hour)
	s.prune(time.Hour, time.Hour, 2)
	for status, e := range each {
		want := 0
		if status == outbox.Published || status == outbox.Skipped {
			want = 1
		}
		same(s, "entries of a message that was "+string(status), len(s.enqueue(e.OutboxMessage)), want)
	}
}

func deletedInPages(s *stage) {
	const n = 4400
	ms := line(n, "mail", "")
	for _, i := range []int{0, 1, n / 2, n - 1} {
		ms[i].Topic = "audit" // not deleted
	}
	entries := s.enqueue(ms...)
	s.resolve(s.db.Skip, outbox.Filter{Topic: "mail"}, n-4)
	s.advance(2 * time.Hour)
	remove := func(after int64) (int, int64) {
		deleted, next, err := s.db.DeleteEntries(s.ctx, outbox.EntryRetention{Published: time.Hour, Skipped: time.Hour}, after)
		s.ok(err, "delete entries")
		s.require(next == 0 || next > after, "the next Seq %d is greater than %d", next, after)
		return deleted, next
	}
	for _, after := range []int64{entries[n-1].Seq, entries[n-1].Seq + 1000} {
		deleted, next := remove(after)
		same(s, "deleted after the last, next", []any{deleted, next}, []any{0, int64(0)})
	}
	total := 0
	for after := entries[n/2].Seq; ; {
		deleted, next := remove(after)
		total += deleted
		if after = next; next == 0 {
			break
		}
	}
	same(s, "entries deleted behind the middle", total, n/2-2)
	s.counted(map[outbox.Status]int64{outbox.Pending: 4, outbox.Skipped: n/2 - 2})
	s.prune(time.Hour, time.Hour, n/2-2)
	s.counted(map[outbox.Status]int64{outbox.Pending: 4})
	s.prune(time.Hour, time.Hour, 0)
}
