-- Migration 2: a task has the time of its last attempt. Tasks that are there have none until their next one.
alter table kinora_tasks add column attempted_at integer;
