-- Migration 1: all of Kinora's tables. "kinora." is replaced by the configured schema.
--
-- Operators: creates tables, indexes, three functions and a trigger in one schema, and changes
-- nothing else. It runs in one transaction and takes no lock on any existing table.

-- One row a stream. The version check is an update of this row, so that a conflict is zero rows
-- and not an error, uses no position, and leaves the caller's transaction usable.
create table kinora.streams (
	stream   text collate "C" not null,
	category text collate "C" not null,
	version  bigint not null check (version > 0),
	constraint streams_pkey primary key (stream)
) with (fillfactor = 50);

-- Not partitioned: unique (stream, version) and unique (id) prevent partitioning by position.
create table kinora.events (
	position       bigint generated always as identity (cache 1 increment 1 no cycle),
	stream         text collate "C" not null,
	version        bigint not null,
	id             uuid not null,
	type           text collate "C" not null,
	schema_version int not null,
	data           jsonb not null,
	metadata       jsonb not null,
	recorded_at    timestamptz not null,
	constraint events_pkey primary key (position),
	constraint events_stream_version_key unique (stream, version),
	constraint events_id_key unique (id)
);

-- Every writer of events holds this lock in shared mode from before it gets a position until its
-- transaction ends, so that a reader of the log can wait for exactly the writers that may still
-- fill a gap. A statement trigger takes the lock, so that no writer can omit it: psql, COPY and
-- CTEs included.
create function kinora.hold_gap() returns trigger language plpgsql as $$
begin
	perform pg_advisory_xact_lock_shared(1802661487, tg_relid::int);
	return null;
end
$$;

create trigger hold_gap before insert on kinora.events
	for each statement execute function kinora.hold_gap();

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
	status          text collate "C" not null default 'pending'
		check (status in ('pending', 'claimed', 'published', 'failed', 'abandoned', 'held', 'skipped')),
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

create table kinora.generations (
	projector text collate "C" not null,
	live      int not null,
	constraint generations_pkey primary key (projector)
);

-- message_id is text, because ids of other sources are not uuids. An id that PostgreSQL cannot
-- store, or that is too long for an index, is stored as "sha256:" and its hash.
create table kinora.markers (
	handler      text collate "C" not null,
	generation   int not null,
	message_id   text collate "C" not null,
	processed_at timestamptz not null default clock_timestamp(),
	constraint markers_pkey primary key (handler, generation, message_id)
);

-- pruning deletes a handler's oldest first
create index markers_age_idx on kinora.markers (handler, processed_at);

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
create index parked_lane_idx on kinora.parked (projector, lane, id) where state in ('waiting', 'stuck') and lane <> '';
create index parked_open_idx on kinora.parked (projector, id) where state in ('waiting', 'stuck') and id > 0;
create index parked_resolved_idx on kinora.parked (projector, resolved_at) where state in ('replayed', 'skipped');
create unique index parked_message_key on kinora.parked (marker_id, projector) where state <> 'replayed' and marker_id <> '';

-- A lane with waiting or stuck messages is held. due_at is when its first message is tried;
-- infinity if that one is stuck.
create table kinora.holds (
	projector text collate "C" not null,
	lane      bytea not null,
	due_at    timestamptz not null,
	constraint holds_pkey primary key (projector, lane)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

create index holds_due_idx on kinora.holds (projector, due_at) where due_at > '-infinity';

-- Raises KN001 if any of these lanes is held. enable_seqscan is off because the table is usually
-- empty, and a plan that scans it would be kept while it grows.
create function kinora.unheld(of_projector text, lanes bytea[]) returns void language plpgsql set enable_seqscan = off as $$
begin
	if exists (select from unnest(lanes) l(lane), lateral (
		select from kinora.holds where holds.projector = of_projector and holds.lane = l.lane limit 1) h) then
		raise exception 'a lane is held' using errcode = 'KN001';
	end if;
end
$$;

-- Returns the held ones of these lanes. They stay held until the transaction ends. It first
-- checks whether any is held: preparing the locks costs three times as much.
create function kinora.held(of_projector text, lanes bytea[]) returns setof bytea language plpgsql set enable_seqscan = off as $$
begin
	if exists (select from unnest(lanes) l(lane), lateral (
		select from kinora.holds where holds.projector = of_projector and holds.lane = l.lane limit 1) h) then
		return query select h.lane from unnest(lanes) l(lane), lateral (
			select holds.lane from kinora.holds where holds.projector = of_projector and holds.lane = l.lane limit 1 for share) h;
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

-- The position of each segment of a projector. The token fences the previous holder of the
-- segment.
create table kinora.checkpoints (
	projector  text collate "C" not null,
	generation int not null,
	segment    int not null,
	position   bigint not null,
	token      uuid,
	constraint checkpoints_pkey primary key (projector, generation, segment)
) with (fillfactor = 50);

-- The leases of runners, and the messages that careful workers are about to run. Unlogged: if the
-- server crashed, no message ended a process.
create unlogged table kinora.runners (
	runner     text collate "C" not null,
	expires_at timestamptz not null,
	constraint runners_pkey primary key (runner)
) with (fillfactor = 50);

create unlogged table kinora.in_flight (
	message_id text collate "C" not null, -- as in kinora.markers
	projector  text collate "C" not null,
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
