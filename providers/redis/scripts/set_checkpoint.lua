-- Replaces the checkpoint KEYS[1] if its mode, position and token are those of ARGV[1] to ARGV[3]. If the
-- read model was emptied, that also deletes the records and markers, KEYS[2] and on. ARGV[4] and on: the
-- fields.
local mode, position, is = checkpoint()
local emptied = mode == 'emptied'
if emptied then mode, position, is = '', 0, '' end
if mode ~= ARGV[1] or position ~= tonumber(ARGV[2]) or is ~= ARGV[3] or mode == 'ended' then return {0} end
if emptied then redis.call('UNLINK', unpack(KEYS)) end
redis.call('HSET', KEYS[1], 'server', server(), unpack(ARGV, 4))
return {1}
