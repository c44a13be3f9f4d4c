package main

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
	elsif new.class not in ('held', 'transient') and new.code <> 'crashed' and (old is null or (old.class, old.code) <> (new.class, new.code)) then
		whats := array[case when new.code = '25P03' then 'ended_idle' else 'failures' end];
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

// heldAgainst counts suspects, failures, attempts at parked messages, and attempts at suspects
// after an attempt that ended with its process.
func (r *run) heldAgainst() map[string]int {
	counted := map[string]int{}
	for _, what := range []string{"suspects", "failures", "ended_idle", "attempts", "attempts_killed"} {
		counted[what] = r.countOf(`select count(*) from held_against where what = '` + what + `'`)
	}
	return counted
}

// judgeHeldAgainst fails the cell if a message failed although no handler of the cell fails.
func (r *run) judgeHeldAgainst() {
	counted := r.heldAgainst()
	for what, n := range counted {
		if n > 0 {
			r.inject(what, n)
		}
	}
	if counted["failures"] == 0 || r.cell.fails {
		return
	}
	var first string
	r.must(r.pool.QueryRow(r.suite.ctx, `select format('%s at %s, code %s', message, projector, code) from held_against where what = 'failures' order by at limit 1`).Scan(&first))
	r.fail("%d messages have failed, although no handler fails: %s", counted["failures"], first)
}

// blameless fails the cell if any suspect, failure or attempt was recorded.
func (r *run) blameless() {
	if n := r.countOf(`select count(*) from held_against`); n > 0 {
		r.fail("%d suspects, failures and attempts: an infrastructure fault was counted against messages", n)
	}
}
