-- Makes ARGV[2] the token of the segment ARGV[1] of the checkpoint KEYS[1], and returns its place. It creates the
-- segment at the place of the checkpoint.
local mode, position, _, other = checkpoint()
local number = tonumber(ARGV[1])
local all = redis.call('HGET', KEYS[1], 'splits')
local split = all and cjson.decode(all)[1]
if mode ~= 'catch_up' or other or not split or number < split.first or number >= split.first + split.count then return {0} end
local own = 'segment:' .. number .. ':'
if redis.call('HEXISTS', KEYS[1], own .. 'position') == 0 then
  local is = redis.call('HMGET', KEYS[1], 'position', 'id', 'recorded')
  redis.call('HSET', KEYS[1], own .. 'position', is[1] or '0', own .. 'id', is[2] or '', own .. 'recorded', is[3] or '')
end
redis.call('HSET', KEYS[1], own .. 'token', ARGV[2])
local is = redis.call('HMGET', KEYS[1], own .. 'position', own .. 'id', own .. 'recorded')
return {1, is[1], is[2], is[3]}
