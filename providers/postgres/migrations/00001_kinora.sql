-- Migration 1: all of Kinora's tables. "kinora." is replaced by the configured schema.
--
-- Operators: creates tables, indexes, seven functions and a trigger in one schema, and changes
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

-- How far a projector has applied the events of a log. The token fences earlier readers of the
-- log. The mode says who applies the events behind the position: only the reader (catch-up), the
-- reader while deliveries wait (closing), or both (live).
create table kinora.checkpoints (
	projector   text collate "C" not null,
	generation  int not null,
	position    bigint not null,
	event_id    text collate "C" not null,
	recorded_at timestamptz,
	lineage     text collate "C" not null,
	mode        text collate "C" not null check (mode in ('catch-up', 'closing', 'live')),
	token       uuid not null,
	handlers    jsonb not null,
	constraint checkpoints_pkey primary key (projector, generation)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- The functions of checkpoints. Each statement of a volatile function has a new snapshot. Scans
-- are off as in kinora.held.

-- Returns the checkpoint of the live generation. locked locks it until the transaction ends.
create function kinora.checkpoint(of_projector text, locked text)
returns table (projector text, generation int, "position" bigint, event_id text, recorded_at timestamptz, lineage text, mode text, token uuid, handlers jsonb)
language plpgsql set enable_seqscan = off as $$
begin
	if locked = 'move' then
		return query select * from kinora.checkpoints c
			where c.projector = of_projector and c.generation = coalesce((select g.live from kinora.generations g where g.projector = of_projector), 1) for no key update;
	elsif locked = 'stay' then
		return query select * from kinora.checkpoints c
			where c.projector = of_projector and c.generation = coalesce((select g.live from kinora.generations g where g.projector = of_projector), 1) for share;
	else
		return query select * from kinora.checkpoints c
			where c.projector = of_projector and c.generation = coalesce((select g.live from kinora.generations g where g.projector = of_projector), 1);
	end if;
end
$$;

-- Raises KN001 if any of these lanes is held. Raises KN002 if the projector has a checkpoint, and
-- lowest, the lowest position of the messages, is not behind it, or only the reader of the log
-- applies them. It also raises KN002 in a transaction that is not READ COMMITTED: the statements
-- would not see what the fence has waited for.
create function kinora.unheld(of_projector text, lanes bytea[], lowest bigint) returns void language plpgsql set enable_seqscan = off as $$
begin
	if exists (select from unnest(lanes) l(lane), lateral (
		select from kinora.holds where holds.projector = of_projector and holds.lane = l.lane limit 1) h) then
		raise exception 'a lane is held' using errcode = 'KN001';
	end if;
	if lowest is not null then
		if exists (select from kinora.checkpoints c
			where c.projector = of_projector and c.generation = coalesce((select g.live from kinora.generations g where g.projector = of_projector), 1)
				and (c.position >= lowest or c.mode <> 'live')) then
			raise exception 'the checkpoint decides' using errcode = 'KN002';
		end if;
	end if;
	if current_setting('transaction_isolation') <> 'read committed' then
		raise exception 'the transaction is not READ COMMITTED' using errcode = 'KN002';
	end if;
end
$$;

-- Returns those of the markers that exist, in the live generation. names are their handlers, each
-- once. It first checks whether these have any marker that is behind a position or has none.
create function kinora.marked(of_projector text, behind bigint, names text[], handlers text[], ids text[])
returns table (handler text, message_id text) language plpgsql set enable_seqscan = off as $$
begin
	if exists (select from unnest(names) n(name), lateral (
			select from kinora.markers m where m.handler = n.name and m.position > behind limit 1) x)
		or exists (select from unnest(names) n(name), lateral (
			select from kinora.markers m where m.handler = n.name and m.position is null limit 1) x) then
		return query select x.handler, x.message_id from unnest(handlers, ids) n(handler, id), lateral (
			select m.handler, m.message_id from kinora.markers m where m.handler = n.handler and m.generation = coalesce((select g.live from kinora.generations g where g.projector = of_projector), 1) and m.message_id = n.id limit 1) x;
	end if;
end
$$;

-- Raises KN002 if any of these markers exists.
create function kinora.unmarked(of_projector text, behind bigint, names text[], handlers text[], ids text[]) returns void language plpgsql as $$
begin
	if exists (select from kinora.marked(of_projector, behind, names, handlers, ids)) then
		raise exception 'a marker exists' using errcode = 'KN002';
	end if;
end
$$;

-- Moves the checkpoint. Raises KN003 if it does not have this position, mode and token, and KN002
-- as kinora.unheld does.
create function kinora.advance(of_projector text, was bigint, of_mode text, of_token uuid, moved bigint, event text, recorded timestamptz)
returns void language plpgsql set enable_seqscan = off as $$
begin
	update kinora.checkpoints c set position = moved, event_id = event, recorded_at = recorded
	where c.projector = of_projector and c.generation = coalesce((select g.live from kinora.generations g where g.projector = of_projector), 1)
		and c.position = was and c.mode = of_mode and c.token = of_token;
	if not found then
		raise exception 'another reader changed the checkpoint' using errcode = 'KN003';
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
