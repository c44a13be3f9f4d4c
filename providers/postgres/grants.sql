-- The rights of each role in Kinora's schema. Run it as the owner, after Migrate. It can be run
-- again. Nobody may choose the numbers that sequences give: behind an event with a high position, readers
-- would pass all events that come later.
revoke all on all tables in schema kinora from kinora_appender, kinora_relay, kinora_projector, kinora_worker, kinora_operator, kinora_archiver, kinora_reader;

grant select, insert, update on kinora.streams to kinora_appender;
grant select, insert (stream, version, id, type, schema_version, data, metadata, recorded_at) on kinora.events to kinora_appender;
grant select, insert, update, delete on kinora.snapshots to kinora_appender;
grant select (topic, message_id), insert (message_id, topic, key, payload, headers, next_attempt_at, created_at) on kinora.outbox to kinora_appender;
grant select on kinora.incarnation to kinora_appender;

grant select, update, delete on kinora.outbox to kinora_relay;
-- to delete old entries in one relay at a time
grant select, insert, update, delete on kinora.leases to kinora_relay;

grant select on kinora.events, kinora.incarnation to kinora_projector;
grant select, insert, update on kinora.generations to kinora_projector;
-- to prune markers older than its window
grant select, insert, delete on kinora.markers to kinora_projector;
grant select, insert, update on kinora.low_water_marks to kinora_projector;
grant select, insert, update on kinora.checkpoints to kinora_projector;
grant select, insert, update, delete on kinora.segments to kinora_projector;
grant select, update, delete, insert (projector, generation, handler, handlers, message_id, marker_id, topic, key, lane, type, payload, headers, class, code, error,
	needs, attempts, version, state, parked_at, resolved_at, resolved_by, reason) on kinora.parked to kinora_projector;
grant select, insert, update, delete on kinora.holds, kinora.runners, kinora.in_flight, kinora.leases to kinora_projector;
grant select (topic, message_id), insert (message_id, topic, key, payload, headers, next_attempt_at, created_at) on kinora.outbox to kinora_projector;

-- to start, answer, postpone and cancel tasks
grant select, insert, update on kinora.tasks to kinora_appender, kinora_projector;
grant select, insert on kinora.task_groups to kinora_appender, kinora_projector;
grant insert (task, what, detail, by, reason, at) on kinora.task_trail to kinora_appender, kinora_projector;
grant select, insert, update, delete on kinora.tasks, kinora.task_groups, kinora.leases to kinora_worker;
grant select, insert (task, what, detail, by, reason, at), delete on kinora.task_trail to kinora_worker;
grant select (topic, message_id), insert (message_id, topic, key, payload, headers, next_attempt_at, created_at) on kinora.outbox to kinora_worker;

-- to archive ended streams
grant select on kinora.streams, kinora.checkpoints, kinora.incarnation to kinora_archiver;
grant select, delete on kinora.events, kinora.snapshots to kinora_archiver;

-- to report that they are alive, to see what is paused, and to take requests up
grant select, insert, update, delete on kinora.services to kinora_relay, kinora_projector, kinora_worker;
grant select on kinora.pauses to kinora_relay, kinora_projector, kinora_worker;
grant select, update on kinora.acts to kinora_projector;

-- what a person may do with the command kinora
grant select on all tables in schema kinora to kinora_operator;
grant select, insert, update, delete on kinora.pauses to kinora_operator;
grant select, update, delete, insert (verb, kind, name, decided_by, reason, detail, state, holder, applied, total, outcome, at, expires_at, ended_at) on kinora.acts to kinora_operator;
grant update on kinora.outbox, kinora.parked, kinora.tasks to kinora_operator;
grant insert, update, delete on kinora.holds to kinora_operator;
grant insert, update on kinora.generations, kinora.checkpoints to kinora_operator;
grant update on kinora.segments to kinora_operator;
grant insert (task, what, detail, by, reason, at) on kinora.task_trail to kinora_operator;

grant select on kinora.migrations to kinora_appender, kinora_relay, kinora_projector, kinora_worker, kinora_archiver;
grant select on all tables in schema kinora to kinora_reader;
-- where execute was revoked from public
grant execute on function kinora.may_hold(text, int), kinora.held(text, int, bytea[]), kinora.unheld(text, int, bytea[], bigint), kinora.checkpoint(text, int, text),
	kinora.segment(text, int, int), kinora.segments_of(text, int),
	kinora.advance_segment(text, int, int, bigint, text, uuid, bigint, text, timestamptz),
	kinora.advance(text, int, bigint, text, uuid, bigint, text, timestamptz), kinora.marked(int, bigint, text[], text[], text[]),
	kinora.unmarked(int, bigint, text[], text[], text[]), kinora.refuse_write() to kinora_projector;
grant execute on function kinora.enqueue_tasks(text[], text[], jsonb[], bigint[], timestamptz[], jsonb),
	kinora.enqueue_task_group(text, text, jsonb, text[], text[], jsonb[], bigint[], timestamptz[], jsonb),
	kinora.answer_task(text, text, text, jsonb), kinora.postpone_task(text, timestamptz)
	to kinora_appender, kinora_projector, kinora_worker;
grant execute on function kinora.claim_tasks(text[], boolean, int, int, uuid, text, bigint),
	kinora.change_tasks(text[], uuid[], text[], bigint[], jsonb[], text[], boolean[], text[], boolean[], jsonb[], text[]) to kinora_worker;
grant execute on function kinora.checkpoint(text, int, text) to kinora_operator;
