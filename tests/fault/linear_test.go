package main

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/kinora-go/kinora/claim"
	"github.com/kinora-go/kinora/internal/patience"
	"github.com/kinora-go/kinora/outbox"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
	"github.com/kinora-go/kinora/providers/postgres/postgrestest"
	"github.com/stretchr/testify/require"
)

// asked is one request of a relay about one entry.
type asked struct {
	seq   int64
	token claim.Token
	to    outbox.Status // status of a mark; empty for a claim
	at    time.Time     // time of a claim on the store's clock
	until time.Time     // end of the lease; of a renewal: not earlier
}

// owned is one entry in the model: who has it until when.
type owned struct {
	by    claim.Token
	until time.Time
	done  bool
}

// claims models claim, renewal, expiry and mark, independent of the store. Two live claims are
// impossible in it.
var claims = porcupine.Model{
	Partition: func(history []porcupine.Operation) [][]porcupine.Operation {
		of := map[int64][]porcupine.Operation{}
		for _, op := range history {
			seq := op.Input.(asked).seq
			of[seq] = append(of[seq], op)
		}
		var all [][]porcupine.Operation
		for _, ops := range of {
			all = append(all, ops)
		}
		return all
	},
	Init: func() any { return owned{} },
	Step: func(state, input, output any) (bool, any) {
		s, in, ok := state.(owned), input.(asked), output.(bool)
		switch {
		// failed claims are not in the history
		case in.to == "":
			return !s.done && (s.by == claim.Token{} || !in.at.Before(s.until)), owned{by: in.token, until: in.until}
		case !ok:
			return s.done || s.by != in.token, s
		case s.done || s.by != in.token:
			return false, s
		case in.to == outbox.Claimed:
			return true, owned{by: in.token, until: in.until}
		default:
			return true, owned{done: in.to == outbox.Published}
		}
	},
}

// TestNoTwoRelaysHoldAClaim runs relays with short leases. They pause past their leases, renew,
// mark late, and mark entries that they released. The history must be linearizable with a single
// claim at a time.
// Promise: G2.1
func TestNoTwoRelaysHoldAClaim(t *testing.T) {
	t.Parallel()
	db := postgrestest.OpenBusy(t, nil)
	const lease, relays, entries = 20 * time.Millisecond, 8, 400
	_, err := db.Pool().Exec(t.Context(), `
		insert into kinora.outbox (message_id, topic, key, payload, headers, next_attempt_at, created_at)
		select g, 't', 'k' || g % 40, '', '{}', now(), now() from generate_series(1, $1) g`, entries)
	require.NoError(t, err)
	start := time.Now()
	var mu sync.Mutex
	var history []porcupine.Operation
	record := func(relay int, in asked, ok bool, call, back time.Time) {
		mu.Lock()
		defer mu.Unlock()
		history = append(history, porcupine.Operation{ClientId: relay, Input: in, Call: call.Sub(start).Nanoseconds(), Output: ok, Return: back.Sub(start).Nanoseconds()})
	}
	// enough reports whether the history has what the test is there for. A test that hangs ends.
	enough := func() bool {
		mu.Lock()
		defer mu.Unlock()
		taken, late := 0, false
		for _, op := range history {
			if op.Input.(asked).to == "" {
				taken++
			} else if !op.Output.(bool) {
				late = true
			}
		}
		return taken > entries/8 && late || time.Since(start) > patience.Limit()
	}
	var all sync.WaitGroup
	for relay := range relays {
		all.Go(func() {
			for time.Since(start) < 3*time.Second || !enough() {
				if !playClaim(t, db, lease, func(in asked, ok bool, call, back time.Time) { record(relay, in, ok, call, back) }) {
					return
				}
			}
		})
	}
	all.Wait()
	taken, late, over := 0, 0, map[int64]int{}
	for _, op := range history {
		if in := op.Input.(asked); in.to == "" {
			taken++
			over[in.seq]++
		} else if !op.Output.(bool) {
			late++
		}
	}
	t.Logf("%d claims of %d entries, %d marks were late", taken, len(over), late)
	require.Greater(t, taken, entries/8)
	require.Positive(t, late)
	require.True(t, porcupine.CheckOperations(claims, history), "the history has no explanation with a single holder at a time")
}

// playClaim claims some entries, and marks each of them after a random time.
func playClaim(t *testing.T, db *postgres.DB, lease time.Duration, record func(in asked, ok bool, call, back time.Time)) bool {
	terms := claim.Terms{Lease: lease, Limit: 1 + rand.IntN(8), Token: claim.NewToken()}
	call := time.Now()
	got, err := provider.ClaimEntries(t.Context(), db, provider.EntryQuery{Near: rand.IntN(2) == 0, After: rand.Int64N(3)}, terms)
	back := time.Now()
	if err != nil {
		t.Error(err)
		return false
	}
	for _, e := range got {
		record(asked{seq: e.Seq, token: e.Token, at: e.LastAttemptedAt, until: e.NextAttemptAt}, true, call, back)
	}
	for range 3 { // the last marks are of entries that others may have
		time.Sleep(time.Duration(rand.Int64N(int64(lease))))
		marks := make([]outbox.Mark, 0, len(got))
		drop := rand.IntN(12) == 0
		for _, e := range got {
			to := []outbox.Status{outbox.Published, outbox.Failed, outbox.Pending, outbox.Claimed, outbox.Claimed, outbox.Claimed}[rand.IntN(6)]
			m := outbox.Mark{Seq: e.Seq, Token: e.Token, To: to}
			if to == outbox.Claimed {
				m.After = lease
			}
			if to == outbox.Published && rand.IntN(4) > 0 { // otherwise all would be published soon
				m.To = outbox.Failed
			}
			if drop {
				m = outbox.Mark{Seq: e.Seq, Token: e.Token, To: outbox.Published, Drop: true}
			}
			marks = append(marks, m)
		}
		call := time.Now()
		late, err := db.MarkEntries(t.Context(), marks)
		back := time.Now()
		if err != nil {
			t.Error(err)
			return false
		}
		missed := map[int64]bool{}
		for _, seq := range late {
			missed[seq] = true
		}
		for _, m := range marks {
			record(asked{seq: m.Seq, token: m.Token, to: m.To, until: call.Add(m.After)}, !missed[m.Seq], call, back)
		}
	}
	return true
}
