package main

import (
	"slices"
	"time"

	"github.com/kinora-go/kinora/projector"
	"github.com/kinora-go/kinora/provider"
	"github.com/kinora-go/kinora/providers/postgres"
)

// crashedCode is the code of a message whose process ended.
const crashedCode = "crashed"

// heldAgainst makes the database record each suspect, failure and attempt, including those of
// messages that are applied later. A failure is a message that was parked for its own error. If the
// server ended the transaction of a stopped process, that is not a failure: Kinora cannot
// distinguish it from a handler that waits too long, so it counts one attempt and tries again.
const heldAgainst = `
create table held_against (what text, projector text, message text, code text, attempts int, at timestamptz default clock_timestamp());
create function hold_against() returns trigger language plpgsql as $$
declare
	whats text[] := '{}';
begin
	if new.code = 'crashed' and old.code is distinct from 'crashed' then
		whats := array['suspects'];
	elsif new.class = 'unable' then
		whats := array['unable'];
	elsif new.class not in ('held', 'transient') and new.code <> 'crashed' and (old is null or (old.class, old.code) <> (new.class, new.code)) then
		whats := array[case new.code when '25P03' then 'ended_idle' when 'deadline' then 'late_handlers' else 'failures' end];
	end if;
	if tg_op = 'UPDATE' and new.attempts > old.attempts and new.class = old.class then
		whats := whats || 'attempts'::text;
		if new.code = 'crashed' and new.attempts > 2 then
			whats := whats || 'attempts_killed'::text;
		end if;
	end if;
	insert into held_against select what, new.projector, new.message_id, new.code, new.attempts from unnest(whats) what;
	return new;
end $$;
create trigger hold_against after insert or update on kinora.parked for each row execute function hold_against()`

// heldAgainst counts suspects, failures, messages that a program was unable to apply, handlers that were later than their deadline, attempts at parked messages, or
// attempts at suspects after an attempt that ended with its process.
func (r *run) heldAgainst(what string) int {
	return r.countOf(`select count(*) from held_against where what = $1`, what)
}

// limitAttempts limits the attempts of runners in cells whose faults must not use them up. Their handlers have more time
// than they need. The attempts of relays have no limit: on a slow machine, leases of entries end.
func limitAttempts(n int) func(s *settings) {
	return func(s *settings) {
		if s.Role == running {
			s.Attempts, s.Timeout = n, time.Minute
		}
	}
}

// judgeHeldAgainst fails the cell if a message failed although no handler of the cell fails. A slow or busy machine may
// let a handler miss its deadline: only the full form fails then.
func (r *run) judgeHeldAgainst() {
	for _, what := range []string{"failures", "late_handlers"} {
		n := r.heldAgainst(what)
		if n == 0 || r.cell.fails || what == "late_handlers" && r.suite.short {
			continue
		}
		var first string
		r.must(r.pool.QueryRow(r.suite.ctx, `select format('%s at %s, code %s', message, projector, code) from held_against where what = $1 order by at limit 1`, what).Scan(&first))
		r.fail("%d messages have failed, although no handler fails: %s", n, first)
	}
}

// blameless fails the cell if any failure or attempt was recorded, or a suspect. On a slow or busy machine a process may
// miss its lease or a deadline: the short form fails only for other failures.
func (r *run) blameless() {
	sql := `select count(*) from held_against`
	if r.suite.short {
		sql += ` where what = 'failures'`
	}
	if n := r.countOf(sql); n > 0 {
		r.fail("%d suspects, failures and attempts: an infrastructure fault was counted against messages", n)
	}
}

// forgive replays the messages that a slow or busy machine made stuck: each of their attempts ended with its process or at
// its deadline, and there was no time between the kills. Only the short form does, and waits until they are applied. The
// messages of some streams are poison.
func (r *run) forgive(poison ...string) {
	if !r.suite.short || r.suite.mutant {
		return
	}
	db, err := postgres.New(r.pool, nil)
	r.must(err)
	defer db.Close()
	list, err := db.Parked(r.suite.ctx, projector.ParkedFilter{States: []projector.ParkedState{projector.StateStuck}, Limit: 1_000_000})
	r.must(err)
	var seqs []int64
	for _, p := range list {
		if (p.Code == crashedCode || p.Code == provider.CodeDeadline) && !slices.Contains(poison, p.Key) {
			seqs = append(seqs, p.Seq)
		}
	}
	if len(seqs) == 0 {
		return
	}
	r.inject("forgiven", len(seqs))
	_, err = projector.Replay(r.suite.ctx, db, projector.ParkedFilter{Seqs: seqs}, projector.Decision{By: "suite", Reason: "no time between the kills"})
	r.must(err)
	open := projector.ParkedFilter{Seqs: seqs, States: []projector.ParkedState{projector.StateWaiting, projector.StateStuck}}
	r.await("the forgiven messages", func() bool {
		left, err := db.Parked(r.suite.ctx, open)
		return err == nil && len(left) == 0
	})
}
