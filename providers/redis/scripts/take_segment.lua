-- Makes ARGV[2] the token of the segment ARGV[1] of the checkpoint KEYS[1], and returns its place. It creates the
-- segment at the place of the checkpoint.
local mode, _, _, other = checkpoint()
local number = tonumber(ARGV[1])
local position, _, known = segment(number)
if mode ~= 'catch_up' or other or not known then return {0} end
local own = 'segment:' .. number .. ':'
if not position then
  local is = redis.call('HMGET', KEYS[1], 'position', 'id', 'recorded')
  redis.call('HSET', KEYS[1], own .. 'position', is[1] or '0', own .. 'id', is[2] or '', own .. 'recorded', is[3] or '')
end
redis.call('HSET', KEYS[1], own .. 'token', ARGV[2])
local is = redis.call('HMGET', KEYS[1], own .. 'position', own .. 'id', own .. 'recorded')
return {1, is[1], is[2], is[3]}
