package providertest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/kinora-go/kinora/eventstore"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

var inspectCases = []testCase{
	{
		name: "counts by status", play: countsByStatus,
		rule: "StatusCounts counts entries by status: those given, or all. The result has each of them, even if the count is zero",
	},
	{
		name: "filters", play: filters,
		rule: "Entries lists what f selects, in order of Seq; the zero Filter selects all, up to 100",
	},
	{
		name: "filters by stream and age", play: streamAndAge, options: Options{Route: outbox.ByCategory},
		rule: "Filter.Stream: of the event; Filter.Older: created longer than this ago, on the store's clock",
	},
	{
		name: "many at once", play: manyChanged,
		rule: "Filter.Limit: zero means 100 for Entries, and no limit for Requeue and Skip; otherwise the first ones in order of Seq",
	},
	{
		name: "requeue", play: requeue,
		rule: "Requeue makes the abandoned and failed entries that f selects pending, due now, with no attempts counted, no longer suspect. Held entries behind them are pending again. Entries in another status are unchanged",
	},
	{
		// Promise: G3.5
		name: "requeue what was attempted long ago", play: requeueStale,
		rule: "If one of the entries to requeue was last attempted longer than RequeueWindow ago, the error is ErrStale unless f.Force is set, and nothing is changed",
	},
	{
		name: "a requeue after a shorter window", play: requeueWindow, options: Options{RequeueWindow: time.Hour},
		rule: "Config.RequeueWindow is how long after its last attempt an entry can be requeued without Force",
	},
	{
		name: "skip", play: skip,
		rule: "Skip gives up the pending, failed, held and abandoned entries that f selects; the later entries of their keys are claimed without them. Entries in another status are unchanged",
	},
}

// oneOfEach makes an entry in every status, in the order of provider.EntryStatuses, alternately
// of topic "mail" and "audit", each with a separate key: "1 claimed" for series 1. Only the held
// one has the topic and key of the failed one, for which it waits.
func (s *stage) oneOfEach(series string) map[outbox.Status]outbox.Entry {
	s.Helper()
	each := map[outbox.Status]outbox.Entry{}
	for i, status := range provider.EntryStatuses() {
		topic, key := []string{"mail", "audit"}[i%2], series+" "+string(status)
		if status == outbox.Held {
			topic, key = each[outbox.Failed].Topic, each[outbox.Failed].Key
		}
		e := s.enqueue(line(1, topic, key)...)[0]
		switch status {
		case outbox.Pending:
		case outbox.Held:
			s.hold(1)
		case outbox.Skipped:
			n, err := s.db.Skip(s.ctx, outbox.Filter{Seqs: []int64{e.Seq}})
			s.ok(err, "skip")
			same(s, "entries skipped", n, 1)
		default:
			s.mark(outbox.Mark{Seq: e.Seq, Token: s.claimPast(e.Seq).Token, To: status, After: lease, Error: "*net.OpError"})
		}
		each[status] = s.entry(e.Seq)
		same(s, "status", each[status].Status, status)
	}
	return each
}

func (s *stage) counts() map[outbox.Status]int64 {
	s.Helper()
	counts, err := s.db.StatusCounts(s.ctx)
	s.ok(err, "count entries")
	return counts
}

// counted fails the case unless these are the counts.
func (s *stage) counted(want map[outbox.Status]int64) {
	s.Helper()
	all := provider.ZeroCounts(nil)
	maps.Copy(all, want)
	same(s, "counts", s.counts(), all)
}

func countsByStatus(s *stage) {
	want := map[outbox.Status]int64{}
	for _, status := range provider.EntryStatuses() {
		want[status] = 0
	}
	same(s, "counts of an empty outbox", s.counts(), want)
	for _, status := range provider.EntryStatuses() {
		want[status] = 2
	}
	s.oneOfEach("1")
	s.oneOfEach("2")
	same(s, "counts", s.counts(), want)
	for _, of := range [][]outbox.Status{{outbox.Pending, outbox.Abandoned}, {outbox.Skipped, outbox.Failed}, provider.EntryStatuses()} {
		some := map[outbox.Status]int64{}
		for _, status := range of {
			some[status] = 2
		}
		counts, err := s.db.StatusCounts(s.ctx, of...)
		s.ok(err, "count some")
		same(s, fmt.Sprint("counts of ", of), counts, some)
	}
}

func filters(s *stage) {
	first, second := s.oneOfEach("1"), s.oneOfEach("2")
	var all []outbox.Entry
	for _, each := range []map[outbox.Status]outbox.Entry{first, second} {
		for _, status := range provider.EntryStatuses() {
			all = append(all, each[status])
		}
	}
	pick := func(is ...int) []int64 {
		seqs := []int64{}
		for _, i := range is {
			seqs = append(seqs, all[i].Seq)
		}
		return seqs
	}
	for name, c := range map[string]struct {
		f    outbox.Filter
		want []int64
	}{
		"everything":      {outbox.Filter{}, seqsOf(all)},
		"a status":        {outbox.Filter{Status: []outbox.Status{outbox.Claimed}}, pick(1, 8)},
		"two statuses":    {outbox.Filter{Status: []outbox.Status{outbox.Skipped, outbox.Pending}}, pick(0, 6, 7, 13)},
		"two open ones":   {outbox.Filter{Status: []outbox.Status{outbox.Failed, outbox.Claimed}}, pick(1, 3, 8, 10)},
		"the held":        {outbox.Filter{Status: []outbox.Status{outbox.Held}}, pick(4, 11)},
		"a topic":         {outbox.Filter{Topic: "audit"}, pick(1, 3, 4, 5, 8, 10, 11, 12)},
		"a key":           {outbox.Filter{Key: "2 failed"}, pick(10, 11)},
		"a key elsewhere": {outbox.Filter{Key: "2 failed", Topic: "mail"}, pick()},
		"some Seqs":       {outbox.Filter{Seqs: pick(8, 2, 5)}, pick(2, 5, 8)},
		"no Seqs":         {outbox.Filter{Seqs: []int64{}}, pick()},
		"a page":          {outbox.Filter{After: all[3].Seq, Limit: 3}, pick(4, 5, 6)},
		"a topic's page":  {outbox.Filter{Topic: "mail", After: all[2].Seq, Limit: 2}, pick(6, 7)},
		"beyond the end":  {outbox.Filter{After: all[13].Seq}, pick()},
		"all at once":     {outbox.Filter{Status: []outbox.Status{outbox.Published}, Topic: "mail", Key: "2 published", Seqs: pick(2, 3, 9), After: all[2].Seq, Limit: 5}, pick(9)},
	} {
		got, err := s.db.Entries(s.ctx, c.f)
		s.ok(err, "list "+name)
		same(s, name, seqsOf(got), c.want)
		for _, e := range got {
			same(s, "an entry of "+name, plain(e), s.entry(e.Seq))
		}
	}
	notForced := map[string]any{"Force": nil}
	selectsNone(s, "entries listed", notForced, func(f outbox.Filter) int { return len(s.entries(f)) })
	for _, change := range []func(context.Context, outbox.Filter) (int, error){s.db.Requeue, s.db.Skip} {
		selectsNone(s, "entries changed", notForced, func(f outbox.Filter) int {
			n, err := change(s.ctx, f)
			s.ok(err, "requeue or skip")
			return n
		})
	}
	s.enqueue(line(100, "mail", "")...)
	got, err := s.db.Entries(s.ctx, outbox.Filter{})
	s.ok(err, "list without a limit")
	same(s, "entries without a limit", len(got), 100)
}

func streamAndAge(s *stage) {
	s.append("review-1", eventstore.NoStream, drafts(2)...)
	s.append("review-2", eventstore.NoStream, draft())
	s.enqueue(line(1, "review", "review-1")...) // its key looks like a stream, but it has none
	s.advance(2 * time.Hour)
	s.append("review-1", 2, draft())
	s.enqueue(line(1, "mail", "")...)
	all := s.entries(outbox.Filter{})
	young := []int64{all[4].Seq, all[5].Seq}
	for name, c := range map[string]struct {
		f    outbox.Filter
		want []int64
	}{
		"a stream":            {outbox.Filter{Stream: "review-1"}, []int64{all[0].Seq, all[1].Seq, all[4].Seq}},
		"another stream":      {outbox.Filter{Stream: "review-2", Topic: "review"}, []int64{all[2].Seq}},
		"no stream":           {outbox.Filter{Stream: "review-"}, []int64{}},
		"the old":             {outbox.Filter{Older: time.Hour}, seqsOf(all[:4])},
		"the older":           {outbox.Filter{Older: 3 * time.Hour}, []int64{}},
		"the old of a stream": {outbox.Filter{Older: time.Hour, Stream: "review-1", Status: []outbox.Status{outbox.Pending}}, seqsOf(all[:2])},
	} {
		same(s, name, seqsOf(s.entries(c.f)), c.want)
	}
	s.resolve(s.db.Skip, outbox.Filter{Stream: "review-1", Older: time.Hour}, 2)
	s.inStatus(outbox.Skipped, all[:2]...)
	s.resolve(s.db.Skip, outbox.Filter{Older: time.Hour}, 2)
	same(s, "pending entries", seqsOf(s.entries(outbox.Filter{Status: []outbox.Status{outbox.Pending}})), young)
	for _, e := range s.claim(three, 10) {
		s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Abandoned})
	}
	s.resolve(s.db.Requeue, outbox.Filter{Older: time.Hour}, 0)
	s.resolve(s.db.Requeue, outbox.Filter{Stream: "review-1"}, 1)
	s.inStatus(outbox.Pending, all[4])
}

func manyChanged(s *stage) {
	const n = 130
	entries := s.enqueue(line(n, "mail", "")...)
	var marks []outbox.Mark
	for _, e := range s.claim(three, n) {
		marks = append(marks, outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Abandoned})
	}
	s.mark(marks...)
	for _, c := range []struct {
		name    string
		change  func(context.Context, outbox.Filter) (int, error)
		f       outbox.Filter
		changed int
		next    outbox.Status
	}{
		{"requeue seven", s.db.Requeue, outbox.Filter{Status: []outbox.Status{outbox.Abandoned}, Limit: 7}, 7, outbox.Pending},
		{"requeue the next five", s.db.Requeue, outbox.Filter{After: entries[6].Seq, Limit: 5}, 5, outbox.Pending},
		{"requeue the others", s.db.Requeue, outbox.Filter{Status: []outbox.Status{outbox.Abandoned}}, n - 12, outbox.Pending},
		{"skip all", s.db.Skip, outbox.Filter{Topic: "mail"}, n, outbox.Skipped},
	} {
		before := s.counts()
		changed, err := c.change(s.ctx, c.f)
		s.ok(err, c.name)
		same(s, c.name, changed, c.changed)
		same(s, "entries that are now "+string(c.next), s.counts()[c.next], before[c.next]+int64(changed))
		for i, e := range s.entries(outbox.Filter{Status: []outbox.Status{c.next}}) {
			same(s, "Seq of the changed entries, in order", e.Seq, entries[i].Seq)
		}
	}
}

func requeue(s *stage) {
	each := s.oneOfEach("1")
	for range three.Attempts - 1 { // the failed one is at its last attempt, and suspect
		s.advance(lease + time.Hour)
		same(s, "claimed", seqsOf(s.claim(provider.EntryQuery{Topics: []string{"audit"}, Attempts: 9}, 1)), []int64{each[outbox.Claimed].Seq})
		same(s, "claimed", seqsOf(s.claim(provider.EntryQuery{Topics: []string{"audit"}, Attempts: 9}, 1)), []int64{each[outbox.Failed].Seq})
	}
	failed := s.entry(each[outbox.Failed].Seq)
	same(s, "suspect", failed.Suspect, true)
	s.mark(outbox.Mark{Seq: failed.Seq, Token: failed.Token, To: outbox.Failed, After: time.Hour})
	before := s.entries(outbox.Filter{})
	n, err := s.db.Requeue(s.ctx, outbox.Filter{Key: "nobody"})
	s.ok(err, "requeue nothing")
	same(s, "entries of an unknown key requeued", n, 0)
	n, err = s.db.Requeue(s.ctx, outbox.Filter{Status: []outbox.Status{outbox.Failed, outbox.Pending, outbox.Claimed}, Limit: 9})
	s.ok(err, "requeue the failed")
	same(s, "failed entries requeued", n, 1)
	n, err = s.db.Requeue(s.ctx, outbox.Filter{})
	s.ok(err, "requeue")
	same(s, "entries requeued", n, 1)
	for i, e := range s.entries(outbox.Filter{}) {
		was := before[i]
		if was.Status == outbox.Held { // behind the failed entry
			was.Status = outbox.Pending
		}
		if was.Status != outbox.Failed && was.Status != outbox.Abandoned {
			same(s, "entry in another status", e, was)
			continue
		}
		same(s, "status, attempts, suspect", []any{e.Status, e.Attempts, e.Suspect}, []any{outbox.Pending, 0, false})
	}
	for _, status := range []outbox.Status{outbox.Failed, outbox.Abandoned} {
		e := each[status]
		taken := s.claim(provider.EntryQuery{Topics: []string{e.Topic}, Attempts: 1}, 1)
		same(s, "claimed after the requeue", seqsOf(taken), []int64{e.Seq})
		same(s, "attempts, suspect", []any{taken[0].Attempts, taken[0].Suspect}, []any{1, false})
	}
}

func requeueStale(s *stage) {
	fail := func(to outbox.Status) outbox.Entry {
		e := s.claimOne(s.enqueue(line(1, "mail", "")...)[0].Seq)
		s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: to, After: 10_000 * time.Hour})
		return e
	}
	old := s.enqueue(line(1, "mail", "pending")...)[0]
	// never attempted, and not requeued later
	s.resolve(s.db.Skip, outbox.Filter{Seqs: []int64{old.Seq}}, 1)
	abandoned, failed := fail(outbox.Abandoned), fail(outbox.Failed)
	behind := s.enqueue(outbox.Message{Topic: "mail", Key: abandoned.Key})[0]
	s.hold(1)
	s.advance(provider.DefaultRequeueWindow - time.Hour)
	inTime := fail(outbox.Abandoned)
	s.resolve(s.db.Requeue, outbox.Filter{Seqs: []int64{failed.Seq}}, 1)
	taken := s.claimOne(failed.Seq) // attempted just now
	s.mark(outbox.Mark{Seq: taken.Seq, Token: taken.Token, To: outbox.Abandoned})
	s.advance(2 * time.Hour)
	late := fail(outbox.Failed)
	before := s.dump()
	for name, f := range map[string]outbox.Filter{
		"all": {}, "one": {Seqs: []int64{abandoned.Seq}}, "those of its status": {Status: []outbox.Status{outbox.Abandoned}},
		"two entries": {Seqs: []int64{abandoned.Seq, late.Seq}}, "the first": {Limit: 1},
	} {
		n, err := s.db.Requeue(s.ctx, f)
		s.require(errors.Is(err, outbox.ErrStale), "the error %v of requeueing %s is ErrStale", err, name)
		same(s, "entries requeued", n, 0)
		s.unchanged(before, "a requeue of stale entries")
	}
	s.resolve(s.db.Requeue, outbox.Filter{Seqs: []int64{}}, 0)
	s.resolve(s.db.Skip, outbox.Filter{Seqs: []int64{}}, 0)
	s.resolve(s.db.Requeue, outbox.Filter{Seqs: []int64{inTime.Seq}}, 1)
	s.resolve(s.db.Requeue, outbox.Filter{After: inTime.Seq}, 1) // the entry late
	s.resolve(s.db.Requeue, outbox.Filter{Force: true, Seqs: []int64{abandoned.Seq, late.Seq}}, 1)
	s.inStatus(outbox.Pending, abandoned, behind, inTime, late)
	s.resolve(s.db.Requeue, outbox.Filter{}, 1) // attempted again meanwhile
	s.inStatus(outbox.Skipped, old)
}

func requeueWindow(s *stage) {
	e := s.claimOne(s.enqueue(line(1, "mail", "")...)[0].Seq)
	s.mark(outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Abandoned})
	s.advance(2 * time.Hour)
	_, err := s.db.Requeue(s.ctx, outbox.Filter{})
	s.require(errors.Is(err, outbox.ErrStale), "the error %v of requeueing after the window is ErrStale", err)
	s.resolve(s.db.Requeue, outbox.Filter{Force: true}, 1)
}

func skip(s *stage) {
	each := s.oneOfEach("1")
	var followers []outbox.Entry
	for _, status := range []outbox.Status{outbox.Failed, outbox.Abandoned} {
		e := each[status]
		followers = append(followers, s.enqueue(line(1, e.Topic, e.Key)...)...)
	}
	before := s.entries(outbox.Filter{})
	s.claimed("a claim before", each[outbox.Pending])
	s.mark(outbox.Mark{Seq: each[outbox.Pending].Seq, Token: s.entry(each[outbox.Pending].Seq).Token, To: outbox.Pending})
	n, err := s.db.Skip(s.ctx, outbox.Filter{Key: "1 abandoned", Limit: 1})
	s.ok(err, "skip one")
	same(s, "entries of one key skipped", n, 1)
	seqs := []int64{}
	for _, e := range each {
		seqs = append(seqs, e.Seq)
	}
	n, err = s.db.Skip(s.ctx, outbox.Filter{Seqs: seqs})
	s.ok(err, "skip")
	same(s, "entries skipped", n, 3)
	for i, e := range s.entries(outbox.Filter{Seqs: seqs}) {
		switch was := before[i]; was.Status {
		case outbox.Claimed, outbox.Published, outbox.Skipped:
			same(s, "entry in another status", e, was)
		default:
			same(s, "status", e.Status, outbox.Skipped)
		}
	}
	s.claimed("a claim of the entries behind them", followers...)
}
