package providertest

import (
	"cmp"
	"encoding/json"
	"fmt"
	"time"

	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
)

// Foreign is an entry as other software could write it.
type Foreign struct {
	ID, Topic, Key string
	Headers        string // JSON or any other text
	Status         outbox.Status

	Due, Created, Attempted, Published Instant
}

// Instant is a time of a Foreign entry.
type Instant int

// Times outside the years 1 to 9999 cannot be read.
const (
	NoTime        Instant = iota // null
	Now                          // the store's time
	BeforeAllTime                // minus infinity, or the least value of the column
	AfterAllTime
	TooEarly // before year 1
	TooLate  // after year 9999
)

const foreignRule = "An entry from other software whose headers are not an object of strings, or whose times cannot be read, " +
	"is Malformed. It blocks only its own key, and a person can skip it"

var foreignClaimCases = []testCase{
	{name: "headers that others wrote", rule: foreignRule, play: foreignHeaders},
	{name: "times that others wrote", rule: foreignRule, play: foreignTimes},
}

var foreignCases = []testCase{
	{
		name: "a requeue next to unreadable times", play: foreignRequeued,
		rule: "A Malformed entry whose LastAttemptedAt cannot be read is not requeued without Filter.Force",
	},
	{
		name: "deletion past unreadable times", play: foreignDeleted,
		rule: "Entries whose times cannot be read do not end the deletion of old ones behind them",
	},
}

func foreignHeaders(s *stage) {
	for _, headers := range []string{
		`[]`, `["kinora_stream", "b"]`, `null`, `1`, `"x"`, `{"a": "b", "kinora_version": 1}`, `{"a": null}`, `{"kinora_stream": {"b": "c"}}`,
		``, `oops`, `{"kinora_stream": "b"`,
	} {
		s.spoiled(Foreign{Headers: headers}, true, outbox.Abandoned)
	}
	s.spoiled(Foreign{Headers: `{"kinora_stream": "b"}`}, false, outbox.Published)
	s.spoiled(Foreign{Headers: `{}`}, false, outbox.Published)
}

func foreignTimes(s *stage) {
	for _, at := range []Instant{BeforeAllTime, AfterAllTime, TooEarly, TooLate} {
		s.spoiled(Foreign{Headers: `{}`, Created: at}, true, outbox.Abandoned)
		s.spoiled(Foreign{Headers: `{}`, Attempted: at}, true, outbox.Published)
		s.spoiled(Foreign{Headers: `{}`, Published: at}, true, outbox.Published)
	}
	s.spoiled(Foreign{Headers: `{}`, Due: BeforeAllTime}, true, outbox.Published)
	s.spoiled(Foreign{Headers: `{}`, Due: AfterAllTime}, true, outbox.Pending)
	s.spoiled(Foreign{Headers: `{}`, Due: AfterAllTime, Status: outbox.Claimed}, true, outbox.Claimed)
}

// foreign inserts entries. A zero status means pending, a zero time now. It returns false if the
// store refuses an entry.
func (s *stage) foreign(entries ...Foreign) bool {
	s.Helper()
	isJSON := true
	for i := range entries {
		f := &entries[i]
		f.Status, f.Due, f.Created = cmp.Or(f.Status, outbox.Pending), cmp.Or(f.Due, Now), cmp.Or(f.Created, Now)
		isJSON = isJSON && json.Valid([]byte(f.Headers))
	}
	if s.insert == nil {
		s.Log("this store has no other writers")
		return false
	}
	err := s.insert(entries...)
	if err != nil && !isJSON {
		s.Logf("the store refuses the entry: %v", err)
		return false
	}
	s.ok(err, "insert entries")
	return true
}

// spoiled fails the case unless bad is malformed or not as expected, ends in this status, and
// blocks only its own key.
func (s *stage) spoiled(bad Foreign, malformed bool, end outbox.Status) {
	s.Helper()
	topic, what := newID(), fmt.Sprintf("%+v", bad)
	all := []Foreign{{ID: "a-1", Key: "a", Headers: `{}`}, bad, {ID: "bad-2", Key: "bad", Headers: `{}`}, {ID: "b-1", Key: "b", Headers: `{}`}}
	all[1].ID, all[1].Key = "bad-1", "bad"
	for i := range all {
		all[i].Topic = topic
	}
	if !s.foreign(all...) {
		return
	}
	list := s.entries(outbox.Filter{Topic: topic})
	same(s, "entries listed with "+what, len(list), len(all))
	for i, e := range list {
		same(s, "id, payload, malformed with "+what, []any{e.ID, string(e.Payload), e.Malformed}, []any{all[i].ID, "x", i == 1 && malformed})
	}
	published := []string{"a-1", "b-1"}
	if end == outbox.Published {
		published = []string{"a-1", "bad-1", "bad-2", "b-1"}
	}
	same(s, "published with "+what, s.relayed(), published)
	got := s.entry(list[1].Seq)
	if same(s, "end of "+what, got.Status, end); end == outbox.Published {
		return
	}
	same(s, "malformed at the end, "+what, got.Malformed, true)
	behind := 0
	if end == outbox.Abandoned {
		same(s, "error of "+what, got.LastError, provider.LastErrorMalformed)
		behind = 1
	}
	s.hold(behind)
	same(s, "of its stream, "+what, len(s.entries(outbox.Filter{Topic: topic, Stream: "b"})), 0)
	s.resolve(s.db.Skip, outbox.Filter{Key: "bad", Seqs: []int64{got.Seq}}, 1)
	same(s, "published once the malformed one is skipped, "+what, s.relayed(), []string{"bad-2"})
	s.inStatus(outbox.Skipped, got)
}

// relayed claims as a relay does until no entry is left. It publishes entries, abandons malformed
// ones, and releases those behind them. It returns the ids of the published entries.
func (s *stage) relayed() (published []string) {
	s.Helper()
	for taken := s.claim(three, 300); len(taken) > 0; taken = s.claim(three, 300) {
		stopped := map[string]bool{}
		for _, e := range taken {
			m := outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published}
			switch {
			case stopped[e.Key]:
				m.To = outbox.Pending
			case e.Malformed:
				m.To, m.Error, stopped[e.Key] = outbox.Abandoned, provider.LastErrorMalformed, true
			default:
				published = append(published, e.ID)
			}
			s.mark(m)
		}
	}
	return published
}

func foreignRequeued(s *stage) {
	var all []Foreign
	for id, at := range map[string]Instant{"good": Now, "early": BeforeAllTime, "late": AfterAllTime} {
		all = append(all, Foreign{ID: id, Topic: "mail", Key: id, Headers: `{}`, Status: outbox.Abandoned, Attempted: at})
	}
	if !s.foreign(all...) {
		return
	}
	s.resolve(s.db.Requeue, outbox.Filter{}, 1)
	for _, e := range s.entries(outbox.Filter{Status: []outbox.Status{outbox.Pending}}) {
		same(s, "requeued entry", e.ID, "good")
	}
	s.resolve(s.db.Requeue, outbox.Filter{Force: true}, 2)
}

func foreignDeleted(s *stage) {
	var all []Foreign
	// more than a provider scans in one call
	for i := range 2510 {
		f := Foreign{ID: fmt.Sprint("m-", i), Topic: "mail", Key: "ann", Headers: `{}`, Status: outbox.Published, Published: Now}
		if i < 2500 {
			f.Created, f.Published = AfterAllTime, AfterAllTime
		}
		all = append(all, f)
	}
	if s.foreign(all...) {
		s.advance(24 * time.Hour)
		s.prune(time.Hour, 0, 10)
	}
}
