-- Records that messages are parked, and moves the checkpoint.
--
-- KEYS: as in unit.lua. ARGV: kind to the segment as in unit.lua; the number of messages, and for each: member, position, whether it has handlers, and the indices of its sets; then the place to move to.
local kind, want, token, from, now, checkpointed = arg(), arg(), arg(), arg(), arg(), arg() == '1'
-- The row of a message that must wait is found again: by the reader, which then records it, or by another attempt.
local word, mode, position, fields = opening(kind, want, token, from, checkpointed, tonumber(arg()), 'applied')
if word then return {word, -1} end
for _ = 1, tonumber(arg()) do
  local member, text = arg(), arg()
  local place, taken = tonumber(text), arg() == '1'
  local inserted = 0
  local covered = kind ~= 'advance' and place > 0 and place <= position
  -- The reader of the log does not read the event of an unknown type.
  if taken and (kind == 'delivery' or kind == 'replay') and (mode == 'catch_up' or mode == '') and place > position then covered = true end
  for _ = 1, tonumber(arg()) do
    local set = tonumber(arg())
    if covered then
      -- nothing
    elseif place > 0 then
      inserted = inserted + redis.call('ZADD', KEYS[set], 'NX', place, member)
    else
      inserted = inserted + redis.call('ZADD', KEYS[set + 1], 'NX', now, member)
    end
  end
  -- Without a new marker, or at or before the checkpoint, another unit has applied the message.
  if inserted > 0 then redis.call('HSETNX', KEYS[2], member, text) end
end
local to, id, recorded = arg(), arg(), arg()
if to ~= '' then redis.call('HSET', KEYS[1], fields .. 'position', to, fields .. 'id', id, fields .. 'recorded', recorded) end
return {'applied', -1}
