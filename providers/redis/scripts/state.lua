-- Changes the mode of the checkpoint KEYS[1] for a new state of its generation, ARGV[1]: to catch_up if
-- it exists, or to ended in any case.
if ARGV[1] == 'ended' then
  redis.call('HSET', KEYS[1], 'mode', 'ended')
elseif redis.call('EXISTS', KEYS[1]) == 1 and redis.call('HGET', KEYS[1], 'mode') ~= 'ended' then
  redis.call('HSET', KEYS[1], 'mode', 'catch_up', 'token', '')
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    if string.match(field, '^segment:%d+:token$') then redis.call('HSET', KEYS[1], field, '') end
  end
end
return {1}
