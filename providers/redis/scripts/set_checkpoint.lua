-- Replaces the checkpoint KEYS[1] if its mode, position and token are those of ARGV[1] to ARGV[3]. ARGV[4]
-- and on: the fields.
local mode, position, is = checkpoint()
local emptied = mode == 'emptied'
if emptied then mode, position, is = '', 0, '' end
if mode ~= ARGV[1] or position ~= tonumber(ARGV[2]) or is ~= ARGV[3] or mode == 'ended' then return {0} end
if emptied then redis.call('UNLINK', KEYS[1]) end
redis.call('HSET', KEYS[1], 'server', server(), unpack(ARGV, 4))
return {1}
