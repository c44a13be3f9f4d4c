-- Deletes at most ARGV[1] markers up to the checkpoint KEYS[1] from the sets KEYS[2] and on.
local _, position = checkpoint()
local left = tonumber(ARGV[1])
for set = 2, #KEYS do
  if left > 0 then
    local members = redis.call('ZRANGEBYSCORE', KEYS[set], '-inf', position, 'LIMIT', 0, math.min(left, 5000))
    if #members > 0 then
      redis.call('ZREM', KEYS[set], unpack(members))
      left = left - #members
    end
  end
end
return {tonumber(ARGV[1]) - left}
