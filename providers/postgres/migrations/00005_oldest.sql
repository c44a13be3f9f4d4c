-- Migration 5: a migration says which programs run on the schema after it.
--
-- Operators: takes a lock on kinora.migrations for a moment.
-- Programs that record a version by other means than Migrate or MigrationSQL, and do not set the column, keep older programs out.
-- Oldest program: 5
alter table kinora.migrations add column oldest bigint not null default 9223372036854775807;
