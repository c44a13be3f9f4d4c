-- Migration 4: a parked message says what a program needs to apply it. Messages that are stuck because their type was not
-- registered stay so: replay them once.
-- Oldest program: 3
alter table kinora_parked add column needs text not null default '';

create index kinora_parked_needs on kinora_parked (projector, generation, needs, id) where open = 1 and needs <> '';
