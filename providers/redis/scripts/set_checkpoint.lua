-- Replaces the checkpoint KEYS[1] if its mode, position and token are those of ARGV[1] to ARGV[3], if
-- this is another server than the one that it was stored on as ARGV[4] says, and if its splits are ARGV[5].
-- It deletes the segments with numbers below ARGV[6]. The handlers become ARGV[8], unless ARGV[7] is 1. ARGV[9] and on: the
-- other fields.
local mode, position, is, other = checkpoint()
local emptied = mode == 'emptied'
local splits = redis.call('HGET', KEYS[1], 'splits') or '[]'
if emptied then mode, position, is, other, splits = '', 0, '', false, '[]' end
if mode ~= ARGV[1] or position ~= tonumber(ARGV[2]) or is ~= ARGV[3] or other ~= (ARGV[4] == '1') or mode == 'ended' or splits ~= ARGV[5] then return {0} end
if emptied then redis.call('UNLINK', KEYS[1]) end
redis.call('HSET', KEYS[1], 'server', server(), unpack(ARGV, 9))
if ARGV[7] ~= '1' then redis.call('HSET', KEYS[1], 'handlers', ARGV[8]) end
if splits ~= '[]' then
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    local number = string.match(field, '^segment:(%d+):')
    if number and tonumber(number) < tonumber(ARGV[6]) then redis.call('HDEL', KEYS[1], field) end
  end
end
return {1}
