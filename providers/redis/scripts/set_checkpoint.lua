-- Replaces the checkpoint KEYS[1] if its mode, position and token are those of ARGV[1] to ARGV[3], and if
-- this is another server than the one that it was stored on as ARGV[4] says. ARGV[5] and on: the fields.
local mode, position, is, other = checkpoint()
local emptied = mode == 'emptied'
if emptied then mode, position, is, other = '', 0, '', false end
if mode ~= ARGV[1] or position ~= tonumber(ARGV[2]) or is ~= ARGV[3] or other ~= (ARGV[4] == '1') or mode == 'ended' then return {0} end
if emptied then redis.call('UNLINK', KEYS[1]) end
redis.call('HSET', KEYS[1], 'server', server(), unpack(ARGV, 5))
return {1}
