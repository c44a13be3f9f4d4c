-- Migration 6: a parked message says what a program needs to apply it.
--
-- Operators: takes a lock on kinora.parked for a moment, which waits for open transactions, and builds an index of no rows.
-- Messages that are stuck because their type was not registered stay so: replay them once.
-- Oldest program: 5
alter table kinora.parked add column needs text collate "C" not null default '';

create index parked_needs_idx on kinora.parked (projector, generation, needs, id) where state = 'waiting' and needs <> '';
