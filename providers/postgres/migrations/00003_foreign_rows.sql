-- Migration 3: what another hand writes is checked where it is written. A number such as 1e131000 takes some
-- bytes in a row and 131,000 as text: no statement could return a row whose text is longer than 1 GB, nor the
-- rows that it would return with it. Nor could a program read times that are infinite, or far.
--
-- Operators: takes a lock on these tables for a moment, which waits for open transactions, and rewrites none.
-- Rows that are there are not checked, except those of kinora.parked.
create domain kinora.stored_json as jsonb;
create domain kinora.stored_bytes as bytea;
create domain kinora.stored_time as timestamptz;

-- A type without a check is changed without reading the table.
alter table kinora.events alter data type "kinora".stored_json, alter metadata type "kinora".stored_json;
alter table kinora.outbox alter headers type "kinora".stored_json, alter payload type "kinora".stored_bytes;
alter table kinora.tasks alter input type "kinora".stored_json, alter state type "kinora".stored_json,
	alter result type "kinora".stored_json, alter metadata type "kinora".stored_json;
alter table kinora.task_groups alter data type "kinora".stored_json;
alter table kinora.snapshots alter state type "kinora".stored_bytes;
alter table kinora.checkpoints alter recorded_at type "kinora".stored_time, alter handlers type "kinora".stored_json,
	alter splits type "kinora".stored_json;
alter table kinora.segments alter recorded_at type "kinora".stored_time;
alter table kinora.generations alter data type "kinora".stored_json, alter created_at type "kinora".stored_time,
	alter changed_at type "kinora".stored_time;
alter table kinora.parked alter headers type "kinora".stored_json, alter parked_at type "kinora".stored_time,
	alter resolved_at type "kinora".stored_time;
alter table kinora.leases alter expires_at type "kinora".stored_time;
alter table kinora.services alter data type "kinora".stored_json, alter started_at type "kinora".stored_time,
	alter seen_at type "kinora".stored_time, alter expires_at type "kinora".stored_time;
alter table kinora.pauses alter paused_at type "kinora".stored_time;
alter table kinora.acts alter detail type "kinora".stored_json, alter outcome type "kinora".stored_json,
	alter at type "kinora".stored_time, alter expires_at type "kinora".stored_time, alter ended_at type "kinora".stored_time;

alter domain kinora.stored_json add constraint stored_json_short check (octet_length(value::text) <= 67108864) not valid;
alter domain kinora.stored_bytes add constraint stored_bytes_short check (octet_length(value) <= 67108864) not valid;
alter domain kinora.stored_time add constraint stored_time_near
	check (value between '0001-01-01 00:00Z' and '9999-12-30 00:00Z') not valid;

-- These return the types of before. So does kinora.claim_tasks, in migration 4.
create or replace function kinora.checkpoint(of_projector text, of_generation int, locked text)
returns table (projector text, generation int, "position" bigint, event_id text, recorded_at timestamptz, lineage text, mode "kinora".checkpoint_mode, token uuid, handlers jsonb, splits jsonb)
language plpgsql set enable_seqscan = off as $$
begin
	if locked = 'move' then
		return query select c.projector, c.generation, c.position, c.event_id, c.recorded_at::timestamptz, c.lineage, c.mode, c.token, c.handlers::jsonb, c.splits::jsonb from kinora.checkpoints c
			where c.projector = of_projector and c.generation = of_generation for no key update;
	elsif locked = 'stay' then
		return query select c.projector, c.generation, c.position, c.event_id, c.recorded_at::timestamptz, c.lineage, c.mode, c.token, c.handlers::jsonb, c.splits::jsonb from kinora.checkpoints c
			where c.projector = of_projector and c.generation = of_generation for share;
	else
		return query select c.projector, c.generation, c.position, c.event_id, c.recorded_at::timestamptz, c.lineage, c.mode, c.token, c.handlers::jsonb, c.splits::jsonb from kinora.checkpoints c
			where c.projector = of_projector and c.generation = of_generation;
	end if;
end
$$;

create or replace function kinora.segment(of_projector text, of_generation int, of_segment int)
returns table (segment int, "position" bigint, event_id text, recorded_at timestamptz, token uuid)
language plpgsql set enable_seqscan = off as $$
begin
	return query select s.segment, s.position, s.event_id, s.recorded_at::timestamptz, s.token from kinora.segments s
		where s.projector = of_projector and s.generation = of_generation and s.segment = of_segment for no key update;
end
$$;
