-- Migration 1: everything that Kinora keeps. "kinora." is replaced by the configured schema.
--
-- Operators: creates tables, indexes, two functions and a trigger in one schema; touches nothing else.
-- It runs in one transaction and takes no lock on any table that was there before.

-- One row a stream: the version check is an update of this row, so that a conflict is zero rows and not an
-- error, draws no position, and leaves the caller's transaction usable.
create table kinora.streams (
	stream   text collate "C" not null,
	category text collate "C" not null,
	version  bigint not null check (version > 0),
	constraint streams_pkey primary key (stream)
) with (fillfactor = 50);

-- Not partitioned: unique (stream, version) and unique (id) forbid partitioning by position.
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

-- Every writer of events holds this lock in shared mode from before a position is drawn until its
-- transaction ends, so that a reader of the log can wait for exactly those that may still fill a gap. A
-- statement trigger takes it, so that no writer can forget it: psql, COPY and CTEs included.
create function kinora.hold_gap() returns trigger language plpgsql as $$
begin
	perform pg_advisory_xact_lock_shared(1802661487, tg_relid::int);
	return null;
end
$$;

create trigger hold_gap before insert on kinora.events
	for each statement execute function kinora.hold_gap();

-- payload is bytea: the same bytes on every publication, which jsonb would rewrite. next_attempt_at is the end of
-- the lease of a claimed entry, when a skipped one was skipped, and the end of the backoff of any other.
-- The partial indexes are on booleans that a claim does not change, never on status, so that it is a HOT update:
--   open   what a claim has to look at: pending, claimed, failed
--   held   what is set aside, and yet stands before the later ones of its topic and key: held, abandoned
--   stuck  what has failed or been abandoned, until it is published, skipped or requeued: behind these others wait
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

-- Ids are above 0, and topics not empty. A statement that says so, as the index does, can be planned with this index
-- and not with its neighbour: a walk in order of id never with a sort, the lookup of a key never with a walk. The
-- planner cannot tell them apart by costs, since its statistics are from when little was open, or held.
create index outbox_open_idx on kinora.outbox (id) where open and id > 0;
create index outbox_lane_idx on kinora.outbox (topic, key, id) where open and topic <> '';
create index outbox_topic_idx on kinora.outbox (topic, id) where open and topic >= ''; -- claims of some topics
create index outbox_held_idx on kinora.outbox (id) where held and id > 0;
create index outbox_held_lane_idx on kinora.outbox (topic, key, id) where held and topic <> '';
create index outbox_stuck_idx on kinora.outbox (topic, key, id) where stuck;

create table kinora.generations (
	projector text collate "C" not null,
	live      int not null,
	constraint generations_pkey primary key (projector)
);

-- message_id is text: ids from elsewhere are not uuids.
create table kinora.markers (
	handler      text collate "C" not null,
	generation   int not null,
	message_id   text collate "C" not null,
	processed_at timestamptz not null default clock_timestamp(),
	constraint markers_pkey primary key (handler, generation, message_id)
);

create index markers_age_idx on kinora.markers (handler, processed_at); -- pruning takes a handler's oldest first

-- The time of which, and before which, markers of a handler may be pruned.
create table kinora.floors (
	handler       text collate "C" not null,
	pruned_before timestamptz not null,
	constraint floors_pkey primary key (handler)
);

-- What is parked may be anything: ids, keys and types that are longer than an index takes, or no text. The hashes are
-- SHA-256 of id and key as they came, empty for none; those that are no text stand beside what can be shown of them.
create table kinora.parked (
	id           bigint generated always as identity (cache 1),
	projector    text collate "C" not null,
	handler      text collate "C" not null,
	message_id   text collate "C" not null,
	message_raw  bytea,
	message_hash bytea not null,
	topic        text collate "C" not null,
	key          text collate "C" not null,
	key_raw      bytea,
	key_hash     bytea not null,
	type         text collate "C" not null,
	holds        boolean not null,
	payload      bytea not null,
	headers      bytea not null, -- JSON as it came: what is parked may be what jsonb refuses
	class        text collate "C" not null,
	code         text collate "C" not null,
	attempts     int not null,
	version      text collate "C" not null,
	due          boolean not null default false, -- it waits, and what was before it was replayed or skipped
	state        text collate "C" not null default 'parked' check (state in ('parked', 'replayed', 'skipped')),
	parked_at    timestamptz not null default clock_timestamp(),
	resolved_at  timestamptz,
	resolved_by  text collate "C" not null default '',
	reason       text collate "C" not null default '',
	constraint parked_pkey primary key (id),
	constraint parked_due_check check (state = 'parked' or not due)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

-- A lane is what holds of one projector and key. It is walked from handler to handler and type to type, so that a look costs
-- the same however long it is. Conditions that are always true (handler >= '') are what the outbox's indexes have them for.
create index parked_live_idx on kinora.parked (projector, id) where state = 'parked' and handler >= '';
create index parked_lane_idx on kinora.parked (projector, key_hash, handler, left(type, 256), id)
	where state = 'parked' and holds and key_hash <> '';
create index parked_waits_idx on kinora.parked (projector, key_hash, handler, id) where state = 'parked' and class = 'held' and key_hash <> '';
create index parked_due_idx on kinora.parked (projector, id) where due;
create index parked_unregistered_idx on kinora.parked (projector, left(type, 256), id) where state = 'parked' and code = 'unregistered';
create index parked_resolved_idx on kinora.parked (projector, resolved_at) where state <> 'parked';
create unique index parked_message_key on kinora.parked (message_hash, handler, projector) where state <> 'replayed' and message_hash <> '';

-- Which history this is: it changes when a copy of the database starts a history of its own.
create table kinora.incarnation (
	only_row boolean not null default true check (only_row),
	id       uuid not null default gen_random_uuid(),
	constraint incarnation_pkey primary key (only_row)
);
insert into kinora.incarnation default values;

-- How far a projector's segment of the log is; its token fences the one who held the segment before.
create table kinora.checkpoints (
	projector  text collate "C" not null,
	generation int not null,
	segment    int not null,
	position   bigint not null,
	token      uuid,
	constraint checkpoints_pkey primary key (projector, generation, segment)
) with (fillfactor = 50);

-- Attempts that outlive a process, counted once a message has failed or taken its process along.
create table kinora.attempts (
	handler      text collate "C" not null,
	message_hash bytea not null,
	attempts     int not null,
	vanished     boolean not null default false, -- one of them at least was a runner's that died
	last_at      timestamptz not null,
	constraint attempts_pkey primary key (handler, message_hash)
) with (fillfactor = 50);

-- By projector, which is what a handler's name begins with.
create index attempts_age_idx on kinora.attempts (split_part(handler, '/', 1), last_at);

-- What each runner is about to do, and until when it is alive. Unlogged: after a crash of the server no process was
-- killed by a message. One row an attempt, which nothing updates: a look costs the same beside dead rows that somebody's open
-- transaction keeps.
create unlogged table kinora.inflight (
	handler      text collate "C" not null,
	message_hash bytea not null,
	runner       text collate "C" not null,
	call         bigint not null, -- of the runner's process
	named_at     timestamptz not null default clock_timestamp(),
	constraint inflight_pkey primary key (handler, message_hash, runner, call)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

create unlogged table kinora.runners (
	runner     text collate "C" not null,
	expires_at timestamptz not null,
	constraint runners_pkey primary key (runner)
) with (fillfactor = 50);

create table kinora.leases (
	name       text collate "C" not null,
	token      uuid not null,
	holder     text collate "C" not null,
	expires_at timestamptz not null,
	constraint leases_pkey primary key (name)
) with (fillfactor = 50);
