-- Migration 3: a migration says which programs run on the file after it.
-- Oldest program: 3
alter table kinora_migrations add column oldest integer not null default 9223372036854775807;
