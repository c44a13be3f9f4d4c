-- Migration 1: all of Kinora's tables. "kinora." is replaced by the configured schema. The names of
-- types are in quotes: see the function in of postgres.go.
--
-- Operators: creates tables, indexes, four domains, seventeen functions and a trigger in one schema, and
-- changes nothing else. It runs in one transaction and takes no lock on any existing table.

-- Checks of columns that statements write often. The server parses a check of a table again in each
-- statement, which takes a tenth of an append's time. It keeps that of a domain.
create domain kinora.stream_version as bigint check (value > 0);
-- A reader could not read another time, and not the events behind it.
create domain kinora.event_time as timestamptz check (value between '0001-01-02 00:00Z' and '9999-12-30 00:00Z');
create domain kinora.entry_status as text collate "C"
	check (value in ('pending', 'claimed', 'published', 'failed', 'abandoned', 'held', 'skipped'));
create domain kinora.checkpoint_mode as text collate "C" check (value in ('catch-up', 'closing', 'live', 'ended'));

-- One row a stream. The version check is an update of this row, so that a conflict is zero rows
-- and not an error, uses no position, and leaves the caller's transaction usable.
create table kinora.streams (
	stream   text collate "C" not null,
	category text collate "C" not null,
	version  "kinora".stream_version not null,
	ended    boolean not null default false, -- its last event is kinora.ended: nothing can be appended
	constraint streams_pkey primary key (stream)
) with (fillfactor = 50);

-- Not partitioned: unique (stream, version) and unique (id) prevent partitioning by position.
create table kinora.events (
	position       bigint generated always as identity (cache 1 increment 1 no cycle),
	stream         text collate "C" not null,
	version        "kinora".stream_version not null,
	id             uuid not null,
	type           text collate "C" not null,
	schema_version int not null,
	data           jsonb not null,
	metadata       jsonb not null,
	recorded_at    "kinora".event_time not null,
	constraint events_pkey primary key (position),
	constraint events_stream_version_key unique (stream, version),
	constraint events_id_key unique (id)
);

-- Every writer of events holds this lock in shared mode from before it gets a position until its
-- transaction ends, so that a reader of the log can wait for exactly the writers that may still
-- fill a gap. A statement trigger takes the lock, so that no writer can omit it: psql, COPY and
-- CTEs included. Its condition takes the lock, and is always false: a call of a function in PL/pgSQL
-- takes twice as long.
create function kinora.hold_gap() returns trigger language plpgsql as $$
begin
	raise exception 'the lock of the log is not held';
end
$$;

create trigger hold_gap before insert on kinora.events for each statement
	when (pg_advisory_xact_lock_shared(1802661487, 'kinora.events'::regclass::oid::int) is null)
	execute function kinora.hold_gap();

-- States of aggregates, so that a long stream need not be read from its beginning. They are copies:
-- rows can be deleted at any time.
create table kinora.snapshots (
	stream   text collate "C" not null,
	schema   text collate "C" not null,
	version  bigint not null,
	event_id text collate "C" not null, -- of the event with this version
	state    bytea not null,
	saved_at timestamptz not null,
	constraint snapshots_pkey primary key (stream, schema)
);

-- payload is bytea, which returns the same bytes on every publication; jsonb would rewrite them.
-- next_attempt_at is the end of the lease of a claimed entry, the time of the skip of a skipped
-- one, and the end of the backoff of any other. The partial indexes use booleans that a claim
-- does not change, never status, so that a claim is a HOT update:
--   open   claims scan it: pending, claimed, failed
--   held   not scanned, but blocks the later entries of its topic and key: held, abandoned
--   stuck  has failed or been abandoned, until published, skipped or requeued: others wait behind it
create table kinora.outbox (
	id              bigint generated always as identity (cache 1),
	message_id      text collate "C" not null,
	topic           text collate "C" not null,
	key             text collate "C" not null,
	payload         bytea not null,
	headers         jsonb not null,
	open            boolean not null default true,
	held            boolean not null default false,
	stuck           boolean not null default false,
	status          "kinora".entry_status not null default 'pending',
	attempts        int not null default 0,
	suspect         boolean not null default false,
	token           uuid,
	claimed_by      text collate "C" not null default '',
	next_attempt_at timestamptz not null,
	last_error      text collate "C" not null default '',
	created_at      timestamptz not null,
	last_attempt_at timestamptz,
	published_at    timestamptz,
	constraint outbox_pkey primary key (id),
	constraint outbox_topic_message_id_key unique (topic, message_id)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- Ids are above 0, and topics are not empty. If a statement has the same condition as an index,
-- the planner can use this index and not its neighbour: a walk in order of id needs no sort, and
-- the lookup of a key no walk. The planner cannot distinguish the indexes by cost, because its
-- statistics are from when few entries were open or held.
create index outbox_open_idx on kinora.outbox (id) where open and id > 0;
create index outbox_lane_idx on kinora.outbox (topic, key, id) where open and topic <> '';
-- claims of some topics
create index outbox_topic_idx on kinora.outbox (topic, id) where open and topic >= '';
create index outbox_held_idx on kinora.outbox (id) where held and id > 0;
create index outbox_held_lane_idx on kinora.outbox (topic, key, id) where held and topic <> '';
create index outbox_stuck_idx on kinora.outbox (topic, key, id) where stuck;

-- The generations of read models. A projector without rows has one: 1, which is live. revision is
-- the number of changes of the row.
create table kinora.generations (
	projector  text collate "C" not null,
	generation int not null,
	revision   bigint not null,
	state      text collate "C" not null check (state in ('requested', 'building', 'live', 'standby', 'retired')),
	data       jsonb not null,
	created_at timestamptz not null,
	changed_at timestamptz not null,
	constraint generations_pkey primary key (projector, generation)
) with (fillfactor = 50);

create unique index generations_live_key on kinora.generations (projector) where state = 'live';
create unique index generations_built_key on kinora.generations (projector) where state in ('requested', 'building');

-- The trigger of views that show the live generation of a read model. Without it, a handler that does
-- not name the table of its generation would write the live one.
create function kinora.refuse_write() returns trigger language plpgsql as $$
begin
	raise exception 'the view % shows the live read model: a handler must write the table that projector.Table returns for this name', tg_table_name
		using errcode = '55000';
end
$$;

-- message_id is text, because ids of other sources are not uuids. An id that PostgreSQL cannot
-- store, or that is too long for an index, is stored as "sha256:" and its hash. position is that
-- of an event in the log of the projector's checkpoint, null for other messages.
create table kinora.markers (
	handler      text collate "C" not null,
	generation   int not null,
	message_id   text collate "C" not null,
	processed_at timestamptz not null default clock_timestamp(),
	position     bigint,
	constraint markers_pkey primary key (handler, generation, message_id)
);

-- Pruning deletes those that the checkpoint has passed, and the oldest without a position.
create index markers_prune_idx on kinora.markers (handler, position, processed_at);

-- Markers of a handler up to this time may be pruned.
create table kinora.low_water_marks (
	handler       text collate "C" not null,
	pruned_before timestamptz not null,
	constraint low_water_marks_pkey primary key (handler)
);

-- Parked messages. Ids, keys and types may be too long for an index: marker_id is the id as in
-- kinora.markers, empty if the message has none. A text that is invalid UTF-8 or has a NUL is
-- stored as U+FFFD and base64. The messages of a lane are in order of id.
create table kinora.parked (
	id           bigint generated always as identity (cache 1),
	projector    text collate "C" not null,
	generation   int not null,
	handler      text collate "C" not null,           -- the handler that failed
	-- handlers that are to run it; none: all that take it
	handlers     text[] collate "C" not null,
	message_id   text collate "C" not null,
	marker_id    text collate "C" not null,
	topic        text collate "C" not null,
	key          text collate "C" not null,
	lane         bytea not null,
	type         text collate "C" not null,
	payload      bytea not null,
	headers      jsonb not null,                      -- an object of texts
	class        text collate "C" not null,
	code         text collate "C" not null,
	error        text collate "C" not null default '',
	attempts     int not null,
	version      text collate "C" not null,
	state        text collate "C" not null default 'waiting' check (state in ('waiting', 'stuck', 'replayed', 'skipped')),
	parked_at    timestamptz not null default clock_timestamp(),
	resolved_at  timestamptz,
	resolved_by  text collate "C" not null default '',
	reason       text collate "C" not null default '',
	constraint parked_pkey primary key (id),
	-- Values that a list of messages could not show, whoever writes them.
	constraint parked_shown check (
		isfinite(parked_at) and coalesce(isfinite(resolved_at), true)
		and array_position(handlers, null) is null and coalesce(array_ndims(handlers), 1) = 1
		and jsonb_typeof(headers) = 'object' and not jsonb_path_exists(headers, '$.* ? (@.type() != "string")'))
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- Conditions that are always true (lane <> '', id > 0) select an index, as for the outbox.
create index parked_lane_idx on kinora.parked (projector, generation, lane, id) where state in ('waiting', 'stuck') and lane <> '';
create index parked_open_idx on kinora.parked (projector, generation, id) where state in ('waiting', 'stuck') and id > 0;
create index parked_resolved_idx on kinora.parked (projector, generation, resolved_at) where state in ('replayed', 'skipped');
create unique index parked_message_key on kinora.parked (marker_id, projector, generation) where state <> 'replayed' and marker_id <> '';

-- A lane with waiting or stuck messages is held. due_at is when its first message is tried;
-- infinity if that one is stuck.
create table kinora.holds (
	projector  text collate "C" not null,
	generation int not null,
	lane       bytea not null,
	due_at     timestamptz not null,
	constraint holds_pkey primary key (projector, generation, lane)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

create index holds_due_idx on kinora.holds (projector, generation, due_at) where due_at > '-infinity';

-- Reports whether the projector may have held lanes. It looks only while the table is small, as it almost
-- always is: then the dead entries of the index are few too.
create function kinora.may_hold(of_projector text, of_generation int) returns boolean language plpgsql set enable_seqscan = off as $$
begin
	return pg_relation_size('kinora.holds') > 65536 or exists (
		select from kinora.holds where holds.projector = of_projector and holds.generation = of_generation);
end
$$;

-- Returns the held ones of these lanes. They stay held until the transaction ends. It first
-- checks whether any is held: preparing the locks costs three times as much.
create function kinora.held(of_projector text, of_generation int, lanes bytea[]) returns setof bytea language plpgsql set enable_seqscan = off as $$
begin
	if exists (select from unnest(lanes) l(lane), lateral (
		select from kinora.holds where holds.projector = of_projector and holds.generation = of_generation and holds.lane = l.lane limit 1) h) then
		return query select h.lane from unnest(lanes) l(lane), lateral (
			select holds.lane from kinora.holds where holds.projector = of_projector and holds.generation = of_generation and holds.lane = l.lane limit 1 for share) h;
	end if;
end
$$;

-- Identifies the history of this database: the id changes when a copy begins a separate history.
create table kinora.incarnation (
	only_row boolean not null default true check (only_row),
	id       uuid not null default gen_random_uuid(),
	constraint incarnation_pkey primary key (only_row)
);
insert into kinora.incarnation default values;

-- How far a projector has applied the events of a log. The token fences earlier readers of the
-- log. The mode says who applies the events behind the position: only the reader (catch-up), the
-- reader while deliveries wait (closing), or both (live). ended: the generation is retired.
create table kinora.checkpoints (
	projector   text collate "C" not null,
	generation  int not null,
	position    bigint not null,
	event_id    text collate "C" not null,
	recorded_at timestamptz,
	lineage     text collate "C" not null,
	mode        "kinora".checkpoint_mode not null,
	token       uuid not null,
	handlers    jsonb not null,
	splits      jsonb not null default '[]', -- the ranges of its segments, the current one first
	constraint checkpoints_pkey primary key (projector, generation)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- How far each segment of a generation, a share of the streams, has applied the events of the log. The
-- token fences earlier readers of the segment.
create table kinora.segments (
	projector   text collate "C" not null,
	generation  int not null,
	segment     int not null,
	position    bigint not null,
	event_id    text collate "C" not null,
	recorded_at timestamptz,
	token       uuid not null,
	constraint segments_pkey primary key (projector, generation, segment)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- The functions of checkpoints. Each statement of a volatile function has a new snapshot. Scans
-- are off as in kinora.held.

-- Returns a checkpoint. locked locks it until the transaction ends.
create function kinora.checkpoint(of_projector text, of_generation int, locked text)
returns table (projector text, generation int, "position" bigint, event_id text, recorded_at timestamptz, lineage text, mode "kinora".checkpoint_mode, token uuid, handlers jsonb, splits jsonb)
language plpgsql set enable_seqscan = off as $$
begin
	if locked = 'move' then
		return query select * from kinora.checkpoints c
			where c.projector = of_projector and c.generation = of_generation for no key update;
	elsif locked = 'stay' then
		return query select * from kinora.checkpoints c
			where c.projector = of_projector and c.generation = of_generation for share;
	else
		return query select * from kinora.checkpoints c
			where c.projector = of_projector and c.generation = of_generation;
	end if;
end
$$;

-- Returns a segment, locked until the transaction ends.
create function kinora.segment(of_projector text, of_generation int, of_segment int)
returns table (segment int, "position" bigint, event_id text, recorded_at timestamptz, token uuid)
language plpgsql set enable_seqscan = off as $$
begin
	return query select s.segment, s.position, s.event_id, s.recorded_at, s.token from kinora.segments s
		where s.projector = of_projector and s.generation = of_generation and s.segment = of_segment for no key update;
end
$$;

-- Returns the segments of a generation as a JSON array, in order.
create function kinora.segments_of(of_projector text, of_generation int) returns jsonb
language plpgsql stable set enable_seqscan = off as $$
begin
	return (select coalesce(jsonb_agg(jsonb_build_object('segment', s.segment, 'position', s.position, 'event_id', s.event_id,
		'recorded_at', s.recorded_at, 'token', s.token) order by s.segment), '[]')
		from kinora.segments s where s.projector = of_projector and s.generation = of_generation);
end
$$;

-- Raises KN001 if any of these lanes is held. Raises KN002 if the generation is retired. If it has
-- a checkpoint, raises KN002 if lowest, the lowest position of the messages, is not behind it, or
-- if only the reader of the log applies them. It also raises KN002 in a transaction that is not READ
-- COMMITTED: the statements would not see what the fence has waited for.
create function kinora.unheld(of_projector text, of_generation int, lanes bytea[], lowest bigint) returns void language plpgsql set enable_seqscan = off as $$
begin
	if kinora.may_hold(of_projector, of_generation) and exists (select from unnest(lanes) l(lane), lateral (
		select from kinora.holds where holds.projector = of_projector and holds.generation = of_generation and holds.lane = l.lane limit 1) h) then
		raise exception 'a lane is held' using errcode = 'KN001';
	end if;
	if exists (select from kinora.checkpoints c
		where c.projector = of_projector and c.generation = of_generation
			and (c.mode = 'ended' or lowest is not null and (c.position >= lowest or c.mode <> 'live'))) then
		raise exception 'the checkpoint decides' using errcode = 'KN002';
	end if;
	if current_setting('transaction_isolation') <> 'read committed' then
		raise exception 'the transaction is not READ COMMITTED' using errcode = 'KN002';
	end if;
end
$$;

-- Returns those of the markers that exist. names are their handlers, each once. It first checks
-- whether these have any marker that is behind a position or has none.
create function kinora.marked(of_generation int, behind bigint, names text[], handlers text[], ids text[])
returns table (handler text, message_id text) language plpgsql set enable_seqscan = off as $$
begin
	if exists (select from unnest(names) n(name), lateral (
			select from kinora.markers m where m.handler = n.name and m.position > behind limit 1) x)
		or exists (select from unnest(names) n(name), lateral (
			select from kinora.markers m where m.handler = n.name and m.position is null limit 1) x) then
		return query select x.handler, x.message_id from unnest(handlers, ids) n(handler, id), lateral (
			select m.handler, m.message_id from kinora.markers m where m.handler = n.handler and m.generation = of_generation and m.message_id = n.id limit 1) x;
	end if;
end
$$;

-- Raises KN002 if any of these markers exists.
create function kinora.unmarked(of_generation int, behind bigint, names text[], handlers text[], ids text[]) returns void language plpgsql as $$
begin
	if exists (select from kinora.marked(of_generation, behind, names, handlers, ids)) then
		raise exception 'a marker exists' using errcode = 'KN002';
	end if;
end
$$;

-- Moves the checkpoint. Raises KN003 if it does not have this position, mode and token, and KN002
-- as kinora.unheld does.
create function kinora.advance(of_projector text, of_generation int, was bigint, of_mode text, of_token uuid, moved bigint, event text, recorded timestamptz)
returns void language plpgsql set enable_seqscan = off as $$
begin
	update kinora.checkpoints c set position = moved, event_id = event, recorded_at = recorded
	where c.projector = of_projector and c.generation = of_generation
		and c.position = was and c.mode = of_mode and c.token = of_token and c.mode <> 'ended';
	if not found then
		if exists (select from kinora.checkpoints c where c.projector = of_projector and c.generation = of_generation and c.mode = 'ended') then
			raise exception 'the generation is retired' using errcode = 'KN002';
		end if;
		raise exception 'another reader changed the checkpoint' using errcode = 'KN003';
	end if;
	if current_setting('transaction_isolation') <> 'read committed' then
		raise exception 'the transaction is not READ COMMITTED' using errcode = 'KN002';
	end if;
end
$$;

-- Moves a segment. Raises KN003 also if the checkpoint does not have this mode, or if its current range
-- of segments does not have the segment.
create function kinora.advance_segment(of_projector text, of_generation int, of_segment int, was bigint, of_mode text, of_token uuid, moved bigint, event text, recorded timestamptz)
returns void language plpgsql set enable_seqscan = off as $$
begin
	if exists (select from kinora.checkpoints c where c.projector = of_projector and c.generation = of_generation and c.mode = 'ended') then
		raise exception 'the generation is retired' using errcode = 'KN002';
	end if;
	update kinora.segments s set position = moved, event_id = event, recorded_at = recorded
	where s.projector = of_projector and s.generation = of_generation and s.segment = of_segment
		and s.position = was and s.token = of_token
		and exists (select from kinora.checkpoints c
			where c.projector = of_projector and c.generation = of_generation and c.mode = of_mode
				and of_segment - (c.splits -> 0 ->> 'first')::int between 0 and (c.splits -> 0 ->> 'count')::int - 1);
	if not found then
		raise exception 'another reader changed the segment' using errcode = 'KN003';
	end if;
	if current_setting('transaction_isolation') <> 'read committed' then
		raise exception 'the transaction is not READ COMMITTED' using errcode = 'KN002';
	end if;
end
$$;

-- The leases of runners, and the messages that careful workers are about to run. Unlogged: if the
-- server crashed, no message ended a process.
create unlogged table kinora.runners (
	runner     text collate "C" not null,
	expires_at timestamptz not null,
	constraint runners_pkey primary key (runner)
) with (fillfactor = 50);

create unlogged table kinora.in_flight (
	message_id text collate "C" not null, -- as in kinora.markers
	projector  text collate "C" not null, -- with the number of a later generation: ratings@2
	runner     text collate "C" not null,
	worker     int not null,
	constraint in_flight_pkey primary key (message_id, projector, runner, worker)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

create index in_flight_worker_idx on kinora.in_flight (runner, worker);

create table kinora.leases (
	name       text collate "C" not null,
	token      uuid not null,
	holder     text collate "C" not null,
	expires_at timestamptz not null,
	constraint leases_pkey primary key (name)
) with (fillfactor = 50);

-- What services report about themselves, for operators. skew is how far the clock of the service was
-- ahead, in microseconds. Unlogged: after a crash of the server, services report again within seconds.
create unlogged table kinora.services (
	id         text collate "C" not null,
	kind       text collate "C" not null,
	holder     text collate "C" not null, -- its name in claims and leases
	data       jsonb not null,
	skew       bigint not null,
	started_at timestamptz not null,
	seen_at    timestamptz not null,
	expires_at timestamptz not null,
	constraint services_pkey primary key (id)
) with (fillfactor = 50);

-- The projectors and topics that operators have paused.
create table kinora.pauses (
	kind      text collate "C" not null check (kind in ('projector', 'topic')),
	name      text collate "C" not null,
	paused_by text collate "C" not null,
	reason    text collate "C" not null,
	paused_at timestamptz not null,
	constraint pauses_pkey primary key (kind, name)
);

-- What operators did, and requests that services take up. Decisions about parked messages, tasks and
-- generations are in their own tables.
create table kinora.acts (
	id         bigint generated always as identity (cache 1),
	verb       text collate "C" not null,
	kind       text collate "C" not null, -- of the target
	name       text collate "C" not null,
	decided_by text collate "C" not null,
	reason     text collate "C" not null,
	detail     jsonb,
	state      text collate "C" not null check (state in ('requested', 'running', 'done', 'failed', 'canceled')),
	holder     text collate "C" not null default '', -- the service that has taken it up
	applied    bigint not null default 0,
	total      bigint not null default 0,
	outcome    jsonb,
	at         timestamptz not null,
	expires_at timestamptz, -- the end of the lease of a running one
	ended_at   timestamptz,
	constraint acts_pkey primary key (id)
) with (fillfactor = 70);

create index acts_open_idx on kinora.acts (id) where state in ('requested', 'running');
create index acts_ended_idx on kinora.acts (ended_at) where ended_at is not null;

-- Durable tasks, one row each: the queue, the state and the outcome. state has the slots by name.
-- next_at is when the task is due: the end of its lease, of its backoff or of its wait; infinity if
-- the wait has no end. The table has no checks, because the server would parse them again in each
-- statement, which makes a change twice as slow. Rows that another program wrote must harm only
-- themselves, so functions and readers of this table accept any value.
create table kinora.tasks (
	id         text collate "C" not null,
	kind       text collate "C" not null,
	group_id   text collate "C" not null default '',
	group_kind text collate "C" not null default '',
	input      jsonb not null,
	state      jsonb not null default '{}',
	result     jsonb,
	status     text collate "C" not null default 'pending',
	open       boolean not null default true,        -- pending, claimed, failed or waiting: claims look at it
	suspect    boolean not null default false,       -- it is claimed alone
	undo       boolean not null default false,       -- its direction
	why        text collate "C" not null default '', -- it is being undone
	doubt      boolean not null default false,       -- a step that is not recorded may have begun
	version    bigint not null default 1,
	attempts   int not null default 0,
	vanished   int not null default 0,
	waits      text collate "C" not null default '',
	wait_until timestamptz,
	token      uuid,
	claimed_by text collate "C" not null default '',
	code       text collate "C" not null default '',
	metadata   jsonb not null default '{}', -- what its handlers' events and messages inherit
	next_at    timestamptz not null,
	created_at timestamptz not null default clock_timestamp(),
	ended_at   timestamptz,
	constraint tasks_pkey primary key (id)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- claims walk each kind
create index tasks_open_idx on kinora.tasks (suspect, kind, next_at, id) where open;
create index tasks_group_idx on kinora.tasks (group_id, id) where group_id <> '';
create index tasks_stuck_idx on kinora.tasks (kind, id) where status in ('failed', 'abandoned');
create index tasks_ended_idx on kinora.tasks (status, ended_at) where status in ('done', 'undone');

-- A task that is done counts its group down. open includes undone and abandoned tasks.
create table kinora.task_groups (
	id           text collate "C" not null,
	kind         text collate "C" not null,
	data         jsonb not null,
	total        int not null,
	open         int not null check (open between 0 and total),
	created_at   timestamptz not null default clock_timestamp(),
	completed_at timestamptz,
	constraint task_groups_pkey primary key (id)
) with (fillfactor = 50);

create index task_groups_completed_idx on kinora.task_groups (completed_at) where completed_at is not null;

-- Answers, outcomes and decisions. The record of a done or undone task is the row of the task:
-- these never change again.
create table kinora.task_trail (
	seq    bigint generated always as identity (cache 1),
	task   text collate "C" not null,
	what   text collate "C" not null,
	detail text collate "C" not null default '',
	by     text collate "C" not null default '',
	reason text collate "C" not null default '',
	at     timestamptz not null default clock_timestamp()
		check (at >= '0001-01-01 00:00Z' and at < '10000-01-01 00:00Z'),
	constraint task_trail_pkey primary key (task, seq)
);

-- The functions of tasks. Scans are off as in kinora.held. All conditions of a change are on the
-- task's own row, so that they are checked again after a wait for its lock.

-- Adds tasks, in order of id. Returns false, and adds nothing, if one exists with another kind,
-- input or group. Raises 40001 if another transaction added such a one at the same time.
create function kinora.enqueue_tasks(ids text[], kinds text[], inputs jsonb[], afters bigint[], ats timestamptz[], of_metadata jsonb)
returns boolean language plpgsql set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
	added int;
begin
	for pass in 1 .. 2 loop
		if exists (
			select from unnest(ids, kinds, inputs) d(id, kind, input), lateral (
				select t.kind, t.input, t.group_id from kinora.tasks t where t.id = d.id limit 1) t
			where t.kind <> d.kind or t.input <> d.input or t.group_id <> '') then
			if pass = 1 then
				return false;
			end if;
			raise exception 'another transaction added a task with one of these ids' using errcode = 'serialization_failure';
		end if;
		exit when pass = 2;
		insert into kinora.tasks (id, kind, input, metadata, next_at, created_at)
		select d.id, d.kind, d.input, of_metadata, greatest(ck.t + d.after * interval '1 microsecond', d.at), ck.t
		from (select clock_timestamp() t) ck, unnest(ids, kinds, inputs, afters, ats) d(id, kind, input, after, at)
		order by d.id collate "C"
		on conflict on constraint tasks_pkey do nothing;
		get diagnostics added = row_count;
		exit when added = cardinality(ids);
	end loop;
	return true;
end
$$;

-- Adds a group with its tasks. Returns false, and adds nothing, if it exists with another kind,
-- other data or other tasks, or if a task exists outside it. Raises 40001 as enqueue_tasks does.
create function kinora.enqueue_task_group(of_id text, of_kind text, of_data jsonb, ids text[], kinds text[], inputs jsonb[], afters bigint[], ats timestamptz[], of_metadata jsonb)
returns boolean language plpgsql set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
	added int;
begin
	if exists (
		select from unnest(ids) d(id), lateral (
			select t.group_id from kinora.tasks t where t.id = d.id limit 1) t where t.group_id <> of_id) then
		return false;
	end if;
	insert into kinora.task_groups (id, kind, data, total, open) values (of_id, of_kind, of_data, cardinality(ids), cardinality(ids))
	on conflict on constraint task_groups_pkey do nothing;
	if not found then
		-- tasks that were done long ago may be deleted
		return exists (
				select from kinora.task_groups g
				where g.id = of_id and g.kind = of_kind and g.data = of_data and g.total = cardinality(ids))
			and not exists (
				select from kinora.tasks t where t.group_id = of_id and t.group_id <> '' and not exists (
					select from unnest(ids, kinds, inputs) d(id, kind, input)
					where d.id = t.id and d.kind = t.kind and d.input = t.input));
	end if;
	insert into kinora.tasks (id, kind, group_id, group_kind, input, metadata, next_at, created_at)
	select d.id, d.kind, of_id, of_kind, d.input, of_metadata, greatest(ck.t + d.after * interval '1 microsecond', d.at), ck.t
	from (select clock_timestamp() t) ck, unnest(ids, kinds, inputs, afters, ats) d(id, kind, input, after, at)
	order by d.id collate "C"
	on conflict on constraint tasks_pkey do nothing;
	get diagnostics added = row_count;
	if added < cardinality(ids) then
		raise exception 'another transaction added a task with one of these ids' using errcode = 'serialization_failure';
	end if;
	return true;
end
$$;

-- Fills a slot with an answer, and returns the outcome.
create function kinora.answer_task(of_id text, of_name text, answer_id text, answer jsonb)
returns text language plpgsql set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
	answered text;
begin
	update kinora.tasks t set
		state      = t.state || jsonb_build_object(of_name, case when jsonb_typeof(t.state -> of_name) = 'object' then t.state -> of_name else '{}' end
			|| jsonb_build_object('out', answer, 'by', answer_id, 'at', to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))),
		version    = t.version + 1,
		status     = case when t.status = 'waiting' and t.waits = of_name then 'pending' else t.status end,
		next_at    = case when t.status = 'waiting' and t.waits = of_name then clock_timestamp() else t.next_at end
	where t.id = of_id and t.status not in ('done', 'undone')
		and not coalesce(t.state -> of_name ? 'out' or t.state -> of_name ->> 'timeout' = 'true', false);
	if found then
		insert into kinora.task_trail (task, what, detail, by) values (of_id, 'answered', of_name, answer_id);
		return 'taken';
	end if;
	select t.state -> of_name ->> 'by' into answered from kinora.tasks t where t.id = of_id;
	return case when not found then 'not_found' when answered = answer_id then 'again' else 'late' end;
end
$$;

-- Makes a task without slots and result due at another time. Returns false if it cannot be postponed.
create function kinora.postpone_task(of_id text, until timestamptz)
returns boolean language plpgsql set enable_seqscan = off set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
begin
	update kinora.tasks t set status = 'pending', token = null, next_at = until, attempts = 0, vanished = 0, suspect = false, version = t.version + 1
	where t.id = of_id and t.status in ('pending', 'failed', 'claimed') and not t.undo and t.state = '{}' and t.result is null;
	if found then
		insert into kinora.task_trail (task, what) values (of_id, 'postponed');
	end if;
	return found;
end
$$;

-- Claims due tasks. The clock is read once and is a bound of each walk. The kinds take turns. A
-- claimed task that is due has vanished: at the limit of attempts it is taken as spent; the second
-- time in a row it becomes suspect, and is not taken.
create function kinora.claim_tasks(kinds text[], alone boolean, most int, attempts_limit int, new_token uuid, holder text, lease bigint)
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
			select o.id, o.kind, o.next_at, o.doubt,
				o.status = 'claimed' and attempts_limit > 0 and o.attempts >= attempts_limit as spent,
				o.status = 'claimed' and not o.suspect and o.vanished >= 1 as again
			from kinora.tasks o
			where o.open and o.suspect = alone and o.kind = k.kind and o.next_at <= ck
			order by o.next_at, o.id limit most
			for update of o skip locked) p),
	picked as materialized (
		select s.id, s.next_at, s.doubt, s.turn, s.spent, s.again and not s.spent as apart from seen s order by s.turn, s.next_at, s.id limit most),
	-- Arrays of ids leave the planner only lookups.
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
			next_at    = ck + lease * interval '1 microsecond'
		where o.id = any(array(select p.id from picked p where not p.apart))
		returning o.*)
	select o.id, o.kind, o.group_id, o.group_kind, o.input, o.state, o.result, o.undo, o.why, p.doubt,
		o.version, o.attempts, o.vanished, o.suspect, o.waits, coalesce(o.wait_until <= ck, false), p.spent, o.code, o.metadata, o.next_at, o.created_at
	from taken o join picked p on p.id = o.id order by p.turn, p.next_at, p.id;
end
$$;

-- Applies changes of claimed tasks, each on its own, in the given order. Returns the ones that were
-- applied, with their numbers from 1.
create function kinora.change_tasks(ids text[], tokens uuid[], statuses text[], afters bigint[], slots jsonb[], opens text[], progresses boolean[],
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
			if applied and statuses[i] = 'abandoned' then
				insert into kinora.task_trail (task, what, detail, by) values (ids[i], 'abandoned', code, worker);
			end if;
		end if;
		if applied then
			n := i;
			return next;
		end if;
	end loop;
end
$$;
