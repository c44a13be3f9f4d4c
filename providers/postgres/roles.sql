-- Roles for Kinora's schema, to be granted to a service's login roles. "kinora." is replaced by
-- the configured schema; the roles keep their names, because they belong to the whole cluster.
-- Run it as a superuser, before Migrate. It can be run again.
--
--   kinora_owner      owns schema and tables; no one logs in as it
--   kinora_migrator   becomes the owner to migrate:
--                     alter role deploy in database shop set role kinora_owner
--   kinora_appender   appends events with entries, reads streams and the log, starts and answers
--                     tasks; changes no event, claims nothing
--   kinora_relay      claims, marks, holds, requeues, skips and deletes entries; takes leases; sees no
--                     event
--   kinora_projector  marks, parks, replays, skips, prunes markers, switches generations, emits,
--                     reads streams and the log, moves checkpoints, leases their readers, starts
--                     and answers tasks; claims nothing. Grant it the read model's tables
--                     yourself. A rebuild empties them, or creates, renames and drops tables,
--                     and creates views: grant it truncate, or let it own them.
--   kinora_worker     claims, changes, starts, answers and deletes tasks, decides about them, and
--                     emits. If its handlers append events, grant it kinora_appender too.
--   kinora_archiver   reads ended streams, and deletes their events before the last one
--   kinora_operator   reads everything, and decides: requeues, skips, replays, pauses, requests
--                     rebuilds and verifications. For people, with the command kinora
--   kinora_reader     reads everything, changes nothing
do $$
declare
	name text;
begin
	foreach name in array array['owner', 'migrator', 'appender', 'relay', 'projector', 'worker', 'operator', 'archiver', 'reader'] loop
		begin
			execute format('create role kinora_%s nologin', name);
		exception when duplicate_object or unique_violation then null;
		end;
	end loop;
end
$$;

grant kinora_owner to kinora_migrator;
create schema if not exists kinora authorization kinora_owner;
alter schema kinora owner to kinora_owner;
grant usage on schema kinora to kinora_appender, kinora_relay, kinora_projector, kinora_worker, kinora_operator, kinora_archiver, kinora_reader;
