-- Returns the mode and position of the checkpoint, whether it has the token, whether
-- parked messages must wait, its lineage, and for each message the
-- record of it as a parked one, and for each of its handlers whether it has a marker.
--
-- KEYS: as in unit.lua. ARGV: the token; the segment whose position and token these are, or 0; the number of messages, and for each: member, the number of
-- handlers, and for each the number of its names and the indices of their sets.
local token = arg()
local mode, position, is, other, restoring = checkpoint()
local number = tonumber(arg())
if number > 0 and mode ~= 'ended' then
  position, is = segment(number)
  if not position then mode, position = '', 0 end
end
local found = {mode, position, is == token and 1 or 0, (other or restoring) and 1 or 0, redis.call('HGET', KEYS[1], 'lineage') or ''}
for _ = 1, tonumber(arg()) do
  local member = arg()
  local marked = {}
  for handler = 1, tonumber(arg()) do
    marked[handler] = '0'
    for _ = 1, tonumber(arg()) do
      local set = tonumber(arg())
      if redis.call('ZSCORE', KEYS[set], member) or redis.call('ZSCORE', KEYS[set + 1], member) then
        marked[handler] = '1'
      end
    end
  end
  found[#found + 1] = redis.call('HGET', KEYS[2], member) or ''
  found[#found + 1] = table.concat(marked)
end
return found
