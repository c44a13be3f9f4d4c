-- Migration 6: a parked message says what a program needs to apply it.
--
-- Operators: takes a lock on kinora.parked for a moment, which waits for open transactions, and builds an index of no
-- rows, for which it reads the table. Roles that may insert the other columns get the right to insert the new one.
-- Messages that are stuck because their type was not registered stay so: replay them once.
-- Oldest program: 5
alter table kinora.parked add column needs text collate "C" not null default '';

create index parked_needs_idx on kinora.parked (projector, generation, needs, id) where state = 'waiting' and needs <> '';

do $$
declare
	grantee text;
begin
	for grantee in
		select case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end
		from pg_attribute c, aclexplode(c.attacl) a
		where c.attrelid = 'kinora.parked'::regclass and c.attname = 'class' and a.privilege_type = 'INSERT'
	loop
		execute 'grant insert (needs) on kinora.parked to ' || grantee;
	end loop;
end $$;
