-- Migration 4: a task has the time of its last attempt, and its trail has the attempts that failed.
--
-- Operators: takes a lock on kinora.tasks for a moment, which waits for open transactions, and rewrites nothing.
-- Tasks that are there have no time until their next attempt.
alter table kinora.tasks add column attempted_at "kinora".stored_time;

-- Claims due tasks. The clock is read once and is a bound of each walk. The kinds take turns. A
-- claimed task that is due has vanished: at the limit of attempts it is taken as spent; the second
-- time in a row it becomes suspect, and is not taken.
create or replace function kinora.claim_tasks(kinds text[], alone boolean, most int, attempts_limit int, new_token uuid, holder text, lease bigint)
returns table (id text, kind text, group_id text, group_kind text, input jsonb, state jsonb, result jsonb, undo boolean, why text, doubt boolean,
	version bigint, attempts int, vanished int, suspect boolean, waits text, timed_out boolean, spent boolean, code text, metadata jsonb, next_at timestamptz, created_at timestamptz)
language plpgsql set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
	ck timestamptz := clock_timestamp();
begin
	return query
	with seen as materialized (
		select p.*, row_number() over (partition by p.kind order by p.next_at, p.id) as turn
		from unnest(kinds) k(kind), lateral (
			select o.id, o.kind, o.next_at, o.doubt, o.status = 'claimed' as vanished, o.claimed_by as last_holder,
				o.status = 'claimed' and attempts_limit > 0 and o.attempts >= attempts_limit as spent,
				o.status = 'claimed' and not o.suspect and o.vanished >= 1 as again
			from kinora.tasks o
			where o.open and o.suspect = alone and o.kind = k.kind and o.next_at <= ck
			order by o.next_at, o.id limit most
			for update of o skip locked) p),
	picked as materialized (
		select s.id, s.next_at, s.doubt, s.turn, s.spent, s.again and not s.spent as apart, s.vanished, s.last_holder from seen s order by s.turn, s.next_at, s.id limit most),
	-- Arrays of ids leave the planner only lookups.
	trails as (
		insert into kinora.task_trail (task, what, detail, by)
		select p.id, 'failed', 'vanished', p.last_holder from picked p where p.vanished),
	suspects as (
		update kinora.tasks o set status = 'failed', suspect = true, vanished = least(o.vanished, 999999999) + 1, code = 'vanished', token = null
		where o.id = any(array(select p.id from picked p where p.apart))),
	taken as (
		update kinora.tasks o set
			status     = 'claimed',
			vanished   = case when o.status = 'claimed' then least(o.vanished, 999999999) + 1 else o.vanished end,
			code       = case when o.status = 'claimed' then 'vanished' else o.code end,
			token      = new_token,
			claimed_by = holder,
			doubt      = o.doubt or not o.undo,
			attempts   = case when o.status = 'claimed' and attempts_limit > 0 and o.attempts >= attempts_limit then o.attempts
				else least(o.attempts, 999999999) + 1 end,
			attempted_at = case when o.status = 'claimed' and attempts_limit > 0 and o.attempts >= attempts_limit then o.attempted_at else ck end,
			next_at    = ck + lease * interval '1 microsecond'
		where o.id = any(array(select p.id from picked p where not p.apart))
		returning o.*)
	select o.id, o.kind, o.group_id, o.group_kind, o.input::jsonb, o.state::jsonb, o.result::jsonb, o.undo, o.why, p.doubt,
		o.version, o.attempts, o.vanished, o.suspect, o.waits, coalesce(o.wait_until <= ck, false), p.spent, o.code, o.metadata::jsonb, o.next_at, o.created_at
	from taken o join picked p on p.id = o.id order by p.turn, p.next_at, p.id;
end
$$;

-- Applies changes of claimed tasks, each on its own, in the given order. Returns the ones that were
-- applied, with their numbers from 1.
create or replace function kinora.change_tasks(ids text[], tokens uuid[], statuses text[], afters bigint[], slots jsonb[], opens text[], progresses boolean[],
	give_ups text[], doubts boolean[], results jsonb[], codes text[])
returns table (n int, undo boolean, version bigint, group_id text) language plpgsql set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
	slot jsonb;
	until timestamptz;
	code text;
	worker text;
	applied boolean;
begin
	for i in 1 .. cardinality(ids) loop
		if statuses[i] = 'claimed' and give_ups[i] = '' then
			update kinora.tasks o set
				state      = case when slots[i] is null then o.state else o.state || slots[i] end,
				result     = coalesce(results[i], o.result),
				version    = o.version + 1,
				attempts   = case when progresses[i] then 1 else o.attempts end,
				vanished   = 0,
				suspect    = o.suspect and not progresses[i],
				waits      = case when progresses[i] then '' else o.waits end,
				wait_until = case when progresses[i] then null else o.wait_until end,
				next_at    = clock_timestamp() + afters[i] * interval '1 microsecond'
			where o.id = ids[i] and o.token = tokens[i] and o.status = 'claimed'
				and (opens[i] = '' or not coalesce(o.state -> opens[i] ? 'out' or o.state -> opens[i] ->> 'timeout' = 'true', false))
			returning o.undo, o.version, o.group_id into undo, version, group_id;
			applied := found;
		elsif statuses[i] = 'done' then
			update kinora.tasks o set
				status     = 'done',
				open       = false,
				state      = case when slots[i] is null then o.state else o.state || slots[i] end,
				result     = coalesce(results[i], o.result),
				version    = o.version + 1,
				attempts   = 0,
				vanished   = 0,
				suspect    = false,
				waits      = '',
				wait_until = null,
				token      = null,
				code       = '',
				ended_at   = clock_timestamp()
			where o.id = ids[i] and o.token = tokens[i] and o.status = 'claimed' and not o.undo
				and (opens[i] = '' or not coalesce(o.state -> opens[i] ? 'out' or o.state -> opens[i] ->> 'timeout' = 'true', false))
			returning o.undo, o.version, o.group_id into undo, version, group_id;
			applied := found;
		elsif statuses[i] = 'waiting' then
			select o.state -> opens[i] into slot from kinora.tasks o
			where o.id = ids[i] and o.token = tokens[i] and o.status = 'claimed' and not o.undo
				and not coalesce(o.state -> opens[i] ? 'out' or o.state -> opens[i] ->> 'timeout' = 'true', false)
			for update;
			applied := found;
			if applied then
				until := null;
				if slot ? 'until' then
					begin
						until := slot ->> 'until';
					exception when data_exception then
						until := null; -- another program wrote it
					end;
				end if;
				if until is null or until < '0001-01-01 00:00Z' or until >= '10000-01-01 00:00Z' then
					until := case when afters[i] > 0 then clock_timestamp() + afters[i] * interval '1 microsecond' end;
				end if;
				update kinora.tasks o set
					status     = 'waiting',
					state      = o.state || coalesce(slots[i], '{}') || case when until is null then '{}' else jsonb_build_object(opens[i],
						case when jsonb_typeof(coalesce(slots[i] -> opens[i], slot)) = 'object' then coalesce(slots[i] -> opens[i], slot) else '{}' end
						|| jsonb_build_object('until', to_char(until at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))) end,
					version    = o.version + 1,
					doubt      = false,
					attempts   = 0,
					vanished   = 0,
					suspect    = false,
					waits      = opens[i],
					wait_until = until,
					token      = null,
					next_at    = coalesce(until, 'infinity')
				where o.id = ids[i]
				returning o.undo, o.version, o.group_id into undo, version, group_id;
			end if;
		else
			update kinora.tasks o set
				status     = statuses[i],
				open       = statuses[i] not in ('undone', 'abandoned'),
				state      = case when slots[i] is null then o.state else o.state || slots[i] end,
				result     = case when o.undo then o.result else coalesce(results[i], o.result) end,
				undo       = o.undo or give_ups[i] <> '',
				why        = case when give_ups[i] <> '' then give_ups[i] else o.why end,
				doubt      = case when statuses[i] = 'undone' and give_ups[i] = '' then o.doubt else doubts[i] end,
				version    = o.version + 1,
				attempts   = case statuses[i]
					when 'undone' then 0
					when 'pending' then case when progresses[i] then 0 else greatest(o.attempts - 1, 0) end
					else case when progresses[i] then 1 else o.attempts end end,
				vanished   = 0,
				suspect    = o.suspect and not progresses[i] and statuses[i] not in ('undone', 'abandoned'),
				waits      = case when progresses[i] or statuses[i] in ('undone', 'abandoned') then '' else o.waits end,
				wait_until = case when progresses[i] or statuses[i] in ('undone', 'abandoned') then null else o.wait_until end,
				token      = case when statuses[i] = 'claimed' then o.token end,
				code       = case when codes[i] <> '' and statuses[i] in ('pending', 'failed', 'abandoned') then codes[i] else o.code end,
				ended_at   = case when statuses[i] in ('undone', 'abandoned') then clock_timestamp() end,
				next_at    = case when statuses[i] in ('undone', 'abandoned') then o.next_at else clock_timestamp() + afters[i] * interval '1 microsecond' end
			where o.id = ids[i] and o.token = tokens[i] and o.status = 'claimed'
				and (opens[i] = '' or not coalesce(o.state -> opens[i] ? 'out' or o.state -> opens[i] ->> 'timeout' = 'true', false))
			returning o.undo, o.version, o.group_id, o.code, o.claimed_by into undo, version, group_id, code, worker;
			applied := found;
			if applied and give_ups[i] <> '' then
				insert into kinora.task_trail (task, what, detail, by) values (ids[i], 'gave_up', give_ups[i], worker);
			end if;
			if applied and statuses[i] in ('failed', 'abandoned') then
				insert into kinora.task_trail (task, what, detail, by) values (ids[i], statuses[i], code, worker);
			end if;
		end if;
		if applied then
			n := i;
			return next;
		end if;
	end loop;
end
$$;
