-- Migration 2: the trigger that takes the lock of the log also runs in sessions with
-- session_replication_role = replica. Without it, readers of the log could skip their events.
--
-- Operators: takes a lock on kinora.events for a moment, which waits for open appends, and changes no row.
alter table kinora.events enable always trigger hold_gap;
