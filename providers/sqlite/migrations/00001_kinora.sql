-- Times are integers: milliseconds since 1970 on SQLite's clock. Text compares byte by byte.

-- One row a stream. An append checks and raises its version.
create table kinora_streams (
    stream   text primary key,
    category text not null,
    version  integer not null check (version > 0),
    ended    integer not null default 0 check (ended in (0, 1)) -- its last event is kinora.ended: nothing can be appended
) strict, without rowid;

-- The log of events. Positions are assigned after the version check by the only writer, so they
-- grow in the order of commits. With autoincrement no position is used twice, even after the last
-- events were deleted.
create table kinora_events (
    position       integer primary key autoincrement,
    stream         text not null,
    version        integer not null check (version > 0),
    -- a UUID in lower case; no store has a marker for any other text
    id             text not null unique check (length(id) = 36 and id not glob '*[^0-9a-f-]*'),
    type           text not null,
    schema_version integer not null,
    data           text not null, -- json
    metadata       text not null, -- json
    recorded_at    integer not null,
    unique (stream, version)
) strict;

-- States of aggregates, so that a long stream need not be read from its beginning. They are copies:
-- rows can be deleted at any time.
create table kinora_snapshots (
    stream   text not null,
    schema   text not null,
    version  integer not null,
    event_id text not null, -- of the event with this version
    state    blob not null,
    saved_at integer not null,
    primary key (stream, schema)
) strict, without rowid;

-- Outgoing messages. The payload is published byte for byte. The payload and the headers come
-- last, because SQLite reads a row up to the last column that it needs, and claims need neither.
create table kinora_outbox (
    id              integer primary key autoincrement,
    message_id      text not null,
    topic           text not null,
    key             text not null,
    -- claims scan it: neither published, skipped nor held
    open            integer not null default 1 check (open in (0, 1)),
    status          text not null default 'pending'
                    check (status in ('pending', 'claimed', 'published', 'failed', 'held', 'abandoned', 'skipped')),
    attempts        integer not null default 0,
    suspect         integer not null default 0 check (suspect in (0, 1)),
    token           blob,
    claimed_by      text not null default '',
    -- claimed: the end of the lease; skipped: the time of that
    next_attempt_at integer not null,
    last_error      text not null default '', -- the class of the error, never its text
    created_at      integer not null,
    last_attempt_at integer,
    published_at    integer,
    headers         text not null, -- json
    payload         blob not null,
    unique (topic, message_id)
) strict;

-- All three grow with the open backlog, not with the number of published or held entries. A claim
-- changes none of them.
create index kinora_outbox_open on kinora_outbox (id) where open = 1;
-- claims of some topics
create index kinora_outbox_topic on kinora_outbox (topic, id) where open = 1;
create index kinora_outbox_lane on kinora_outbox (topic, key, id) where open = 1;

-- These are empty in normal operation. A stuck entry may block others for long; those may be
-- held.
create index kinora_outbox_stuck on kinora_outbox (topic, key, id) where status in ('failed', 'abandoned');
create index kinora_outbox_held on kinora_outbox (topic, key, id) where status = 'held';
create index kinora_outbox_held_id on kinora_outbox (id) where status = 'held';

-- A marker records that a handler applied a message. It commits with the handler's writes.
create table kinora_markers (
    handler      text not null,
    generation   integer not null,
    message_id   text not null,
    processed_at integer not null,
    position     integer, -- of the event in the log; null if the message is none
    primary key (handler, generation, message_id)
) strict, without rowid;

-- Markers of events are deleted up to the checkpoint. Those without a position are pruned by age,
-- the oldest of a handler first.
create index kinora_markers_position on kinora_markers (handler, position, processed_at);

-- How far each generation of a projector has applied the events of a log.
create table kinora_checkpoints (
    projector   text not null,
    generation  integer not null,
    -- the last settled event up to which all are applied or parked
    position    integer not null,
    event_id    text not null,
    recorded_at integer,       -- in microseconds, because the log may be in another database
    lineage     text not null, -- of the log
    mode        text not null check (mode in ('catch-up', 'closing', 'live', 'ended')),
    token       blob,          -- of the reader; only its units move the position
    handlers    text not null, -- json: where each handler began
    splits      text not null default '[]', -- json: the ranges of its segments, the current one first
    primary key (projector, generation)
) strict, without rowid;

-- How far each segment of a generation has applied the events of its streams.
create table kinora_segments (
    projector   text not null,
    generation  integer not null,
    segment     integer not null,
    position    integer not null,
    event_id    text not null,
    recorded_at integer, -- in microseconds
    token       blob,    -- of the reader; only its units move the position
    primary key (projector, generation, segment)
) strict, without rowid;

-- Leases on names, such as those of the readers of the log. A loss of power may lose commits to
-- this table.
create table kinora_leases (
    name       text primary key,
    token      blob not null,
    holder     text not null, -- only people read it
    expires_at integer not null
) strict, without rowid;

-- Markers of a handler up to this time may be missing, because they were pruned.
create table kinora_low_water_marks (
    handler       text primary key,
    pruned_before integer not null -- inclusive
) strict, without rowid;

-- The generations of a projector's read model. No live one: generation 1 is live.
create table kinora_generations (
    projector  text not null,
    generation integer not null check (generation > 0),
    revision   integer not null check (revision > 0), -- the number of changes of the row
    state      text not null check (state in ('requested', 'building', 'live', 'standby', 'retired')),
    data       text not null check (json_valid(data)), -- json
    created_at integer not null,
    changed_at integer not null, -- when the state changed
    primary key (projector, generation)
) strict, without rowid;

create unique index kinora_generations_live on kinora_generations (projector) where state = 'live';
create unique index kinora_generations_next on kinora_generations (projector) where state in ('requested', 'building');

-- Parked messages, in the order of their ids. Those of a lane are a queue. While one is open,
-- neither replayed nor skipped, the lane is held: later messages are parked behind it. The
-- payload comes last, so that the other columns are read without it.
create table kinora_parked (
    id          integer primary key autoincrement,
    projector   text not null,
    generation  integer not null check (generation > 0),
    lane        blob not null,
    state       text not null check (state in ('waiting', 'stuck', 'replayed', 'skipped')),
    -- when the first open message of a lane is tried; null for the others
    due_at      integer check (due_at is null or state = 'waiting'),
    -- waiting or stuck
    open        integer not null default 1 check (open = (state in ('waiting', 'stuck'))),
    resolved_at integer check (open = (resolved_at is null)), -- when it was replayed or skipped
    resolved_by text not null default '',
    reason      text not null default '',
    class       text not null,
    code        text not null,
    error       text not null default '',
    attempts    integer not null,
    handler     text not null, -- the handler that failed; '' if none did
    handlers    text not null check (json_valid(handlers)), -- handlers that are to run it: an array
    message_id  text not null,
    topic       text not null,
    key         text not null,
    type        text not null,
    version     text not null,
    parked_at   integer not null,
    headers     text not null, -- a=1&b=2, escaped as in a URL
    payload     blob not null
) strict;

-- A message is parked once for a generation, and again after it was replayed. Messages without an
-- id are all different.
create unique index kinora_parked_message on kinora_parked (projector, generation, message_id)
    where state <> 'replayed' and message_id <> '';

-- All but the last are empty in normal operation.
create index kinora_parked_lane on kinora_parked (projector, generation, lane) where open = 1;
create index kinora_parked_due on kinora_parked (projector, generation, due_at) where due_at is not null;
create index kinora_parked_open on kinora_parked (projector) where open = 1;
create index kinora_parked_stuck on kinora_parked (projector, generation, id) where state = 'stuck';
create index kinora_parked_resolved on kinora_parked (projector, resolved_at) where open = 0;

-- The end of each runner's lease. A loss of power, which ends the runners too, may lose commits
-- to this table and to the next.
create table kinora_runners (
    runner     text primary key,
    expires_at integer not null
) strict, without rowid;

-- Messages that careful workers are about to run: few rows.
create table kinora_in_flight (
    message_id text not null,
    build      text not null, -- the projector, and "@2" for generation 2
    runner     text not null,
    worker     integer not null,
    primary key (message_id, build, runner, worker)
) strict, without rowid;

create index kinora_in_flight_worker on kinora_in_flight (runner, worker);

-- Identifies the log. A copy of the file has the same id.
create table kinora_incarnation (
    only_row integer primary key check (only_row = 1),
    id       text not null
) strict;
insert into kinora_incarnation (only_row, id) values (1, lower(hex(randomblob(16))));

-- Tasks. A row is the queue entry, the state and the outcome of a task. The long columns come last,
-- because SQLite reads a row up to the last column that it needs.
create table kinora_tasks (
    id         text not null primary key,
    kind       text not null,
    group_id   text not null default '', -- '' if it has no group
    group_kind text not null default '',
    status     text not null default 'pending'
               check (status in ('pending', 'claimed', 'failed', 'waiting', 'done', 'undone', 'abandoned')),
    -- claims look at it
    open       integer not null default 1 check (open = (status in ('pending', 'claimed', 'failed', 'waiting'))),
    suspect    integer not null default 0 check (suspect in (0, 1)), -- it is claimed alone
    undo       integer not null default 0 check (undo in (0, 1)),    -- its steps are being undone
    why        text not null default '',                             -- it is being undone
    doubt      integer not null default 0 check (doubt in (0, 1)),   -- a step may have begun that is not recorded
    version    integer not null default 1 check (version between 1 and 9007199254740992),
    attempts   integer not null default 0 check (attempts between 0 and 1000000000),
    vanished   integer not null default 0 check (vanished between 0 and 1000000000),
    waits      text not null default '', -- the slot of its last wait
    wait_until integer,                  -- the end of that wait; null if it has none
    token      blob check ((token is null) = (status <> 'claimed')),
    claimed_by text not null default '',
    code       text not null default '', -- of the last failure, never its text
    -- claimed: the end of the lease; null: a wait without end
    next_at    integer check (next_at is not null or status = 'waiting'),
    created_at integer not null,
    ended_at   integer check ((ended_at is null) = open),
    metadata   text not null default '{}', -- json: what its handlers' events and messages inherit
    input      text not null,              -- json
    state      text not null default '{}', -- json: the slots by name
    result     text                        -- json
) strict;

-- Claims walk one of the first two, each kind separately. They grow with the open tasks.
create index kinora_tasks_due on kinora_tasks (kind, next_at, id) where open = 1 and suspect = 0;
create index kinora_tasks_suspect on kinora_tasks (kind, next_at, id) where open = 1 and suspect = 1;
create index kinora_tasks_stuck on kinora_tasks (id) where status in ('failed', 'abandoned');
create index kinora_tasks_group on kinora_tasks (group_id, id) where group_id <> '';
create index kinora_tasks_ended on kinora_tasks (status, ended_at) where status in ('done', 'undone');

-- Groups of tasks. The transaction that makes a task done counts its group down.
create table kinora_task_groups (
    id           text not null primary key,
    kind         text not null,
    total        integer not null,
    open         integer not null check (open between 0 and total), -- tasks that are not done
    tasks        text not null, -- a digest of the tasks that were added with it
    completed_at integer check ((completed_at is null) = (open > 0)),
    data         text not null -- json
) strict;

create index kinora_task_groups_completed on kinora_task_groups (completed_at) where completed_at is not null;

-- What happened to a task, in the order of ids.
create table kinora_task_trail (
    id      integer primary key autoincrement,
    task    text not null,
    what    text not null,
    detail  text not null,
    by_whom text not null, -- an operator, a worker, or an answer
    reason  text not null,
    at      integer not null
) strict;

create index kinora_task_trail_task on kinora_task_trail (task);

-- What services report about themselves, for operators. A loss of power may lose commits to this table.
create table kinora_services (
    id         text primary key,
    kind       text not null,
    holder     text not null, -- its name in claims and leases
    data       text not null, -- json
    skew       integer not null, -- how far its clock was ahead, in milliseconds
    started_at integer not null,
    seen_at    integer not null,
    expires_at integer not null
) strict, without rowid;

-- The projectors and topics that operators have paused.
create table kinora_pauses (
    kind      text not null check (kind in ('projector', 'topic')),
    name      text not null,
    paused_by text not null,
    reason    text not null,
    paused_at integer not null,
    primary key (kind, name)
) strict, without rowid;

-- What operators did, and requests that services take up. Decisions about parked messages, tasks and
-- generations are in their own tables.
create table kinora_acts (
    id         integer primary key autoincrement,
    verb       text not null,
    kind       text not null, -- of the target
    name       text not null,
    decided_by text not null,
    reason     text not null,
    detail     text, -- json
    state      text not null check (state in ('requested', 'running', 'done', 'failed', 'canceled')),
    holder     text not null default '', -- the service that has taken it up
    applied    integer not null default 0,
    total      integer not null default 0,
    outcome    text, -- json
    at         integer not null,
    expires_at integer, -- the end of the lease of a running one
    ended_at   integer
) strict;

create index kinora_acts_open on kinora_acts (id) where state in ('requested', 'running');
create index kinora_acts_ended on kinora_acts (ended_at) where ended_at is not null;
