-- +goose Up

-- Times are integers: milliseconds since 1970 on SQLite's own clock. Text compares byte by byte.

-- One row a stream. The row is what an append checks and raises.
create table kinora_streams (
    stream   text primary key,
    category text not null,
    version  integer not null check (version > 0)
) strict, without rowid;

-- The log. Positions are drawn after the version check, by the one writer that SQLite admits, so they grow in
-- the order of commits; autoincrement never gives a position twice, also after the last events were deleted.
create table kinora_events (
    position       integer primary key autoincrement,
    stream         text not null,
    version        integer not null,
    id             text not null unique,
    type           text not null,
    schema_version integer not null,
    data           text not null, -- json
    metadata       text not null, -- json
    recorded_at    integer not null,
    unique (stream, version)
) strict;

-- Messages beside the events. The payload is published byte for byte; it and the headers come last, as what
-- claims look at would else be read through them.
create table kinora_outbox (
    id              integer primary key autoincrement,
    message_id      text not null,
    topic           text not null,
    key             text not null,
    open            integer not null default 1 check (open in (0, 1)), -- claims look at it: neither done with nor held
    status          text not null default 'pending'
                    check (status in ('pending', 'claimed', 'published', 'failed', 'held', 'abandoned', 'skipped')),
    attempts        integer not null default 0,
    suspect         integer not null default 0 check (suspect in (0, 1)),
    token           blob,
    claimed_by      text not null default '',
    next_attempt_at integer not null, -- while claimed, the end of the lease; skipped, when that was
    last_error      text not null default '', -- the class of the error, never its text
    created_at      integer not null,
    last_attempt_at integer,
    published_at    integer,
    headers         text not null, -- json
    payload         blob not null,
    unique (topic, message_id)
) strict;

-- All three stay as small as the backlog that is not held, however many published entries are kept. A claim changes
-- none of them.
create index kinora_outbox_open on kinora_outbox (id) where open = 1;
create index kinora_outbox_topic on kinora_outbox (topic, id) where open = 1; -- claims of some topics
create index kinora_outbox_lane on kinora_outbox (topic, key, id) where open = 1;

-- These are empty while all goes well. What is stuck may hold others back for long; those may be held.
create index kinora_outbox_stuck on kinora_outbox (topic, key, id) where status in ('failed', 'abandoned');
create index kinora_outbox_held on kinora_outbox (topic, key, id) where status = 'held';
create index kinora_outbox_held_id on kinora_outbox (id) where status = 'held';

-- A marker says that a handler applied a message. It commits with the handler's writes.
create table kinora_markers (
    handler      text not null,
    generation   integer not null,
    message_id   text not null,
    processed_at integer not null,
    primary key (handler, generation, message_id)
) strict, without rowid;

-- Markers are pruned by their age, a handler's oldest first.
create index kinora_markers_age on kinora_markers (handler, processed_at);

-- Until when markers of a handler may be missing, since they were pruned.
create table kinora_floors (
    handler       text primary key,
    pruned_before integer not null -- that very time included
) strict, without rowid;

-- Which build of a projector's read model is live. No row: the first.
create table kinora_generations (
    projector text primary key,
    live      integer not null
) strict, without rowid;

-- Messages set aside, in order, with all that came with them. The payload comes last, as what looks for what is in the
-- way would else be read through it.
create table kinora_parked (
    id          integer primary key autoincrement,
    projector   text not null,
    handler     text not null, -- '' where the message did not get as far as a handler
    message_id  text not null,
    topic       text not null,
    key         text not null,
    type        text not null,
    holds       integer not null check (holds in (0, 1)), -- in the way of later ones of its key, while it is parked
    state       text not null default 'parked' check (state in ('parked', 'replayed', 'skipped')),
    due         integer not null default 0 check (due in (0, 1)), -- it waited for one that was replayed or skipped
    class       text not null,
    code        text not null,
    attempts    integer not null,
    version     text not null,
    parked_at   integer not null,
    resolved_at integer, -- replayed or skipped
    resolved_by text not null default '',
    reason      text not null default '',
    headers     text not null, -- json
    payload     blob not null
) strict;

-- A message is set aside once for a projector and handler, and anew once it was replayed. One without an id cannot
-- be told from others.
create unique index kinora_parked_message on kinora_parked (message_id, projector, handler)
    where state <> 'replayed' and message_id <> '';

-- All of these are empty while all goes well. What is in the way is found by handler or by type, however many of one
-- key wait.
create index kinora_parked_live on kinora_parked (projector) where state = 'parked';
create index kinora_parked_handler on kinora_parked (projector, key, handler) where state = 'parked' and holds = 1;
create index kinora_parked_type on kinora_parked (projector, key, type) where state = 'parked' and holds = 1;
create index kinora_parked_waiting on kinora_parked (projector, key, handler) where state = 'parked' and class = 'held';
create index kinora_parked_due on kinora_parked (projector) where due = 1;
create index kinora_parked_unregistered on kinora_parked (projector, type) where state = 'parked' and code = 'unregistered';
create index kinora_parked_resolved on kinora_parked (projector, resolved_at) where state <> 'parked';

-- How often a message was tried at a handler, in whatever process. A row only where it failed.
create table kinora_attempts (
    handler    text not null,
    message_id text not null,
    attempts   integer not null,
    last_at    integer not null,
    vanished   integer not null, -- 1: one of them at least was a runner's that died
    primary key (handler, message_id)
) strict, without rowid;

-- By projector, which is what a handler's name begins with.
create index kinora_attempts_age on kinora_attempts (substr(handler, 1, instr(handler, '/') - 1), last_at);

-- What is under way, with whom: few rows. Its commits may be lost with the power, as the power ends runners, too.
create table kinora_inflight (
    handler    text not null,
    message_id text not null,
    runner     text not null,
    named_at   integer not null,
    primary key (handler, message_id, runner)
) strict, without rowid;

-- Until when each runner lives.
create table kinora_runners (
    runner     text primary key,
    expires_at integer not null
) strict, without rowid;
