-- Records that messages are parked, and moves the checkpoint.
--
-- KEYS: as in unit.lua. ARGV: kind to the segment as in unit.lua; the number of messages, and for each: member, position and the indices of its sets; then the place to move to.
local kind, want, token, from, now, checkpointed = arg(), arg(), arg(), arg(), arg(), arg() == '1'
local mode, position, is, other, restoring = checkpoint()
if mode == 'ended' or mode == 'emptied' then return {'ended', -1} end
-- Its row is found again: by the reader, which then records it, or by another attempt.
if kind == 'replay' and (other or restoring or mode == '' and checkpointed) then return {'applied', -1} end
if other and kind ~= 'delivery' then return {'fenced', -1} end
local number, fields = tonumber(arg()), ''
if number > 0 then
  fields = 'segment:' .. number .. ':'
  position, is = segment(number)
  if not position then return {'fenced', -1} end
end
if want ~= '' and (mode ~= want or is ~= token) then return {'fenced', -1} end
if kind == 'advance' and tonumber(from) ~= position then return {'fenced', -1} end
for _ = 1, tonumber(arg()) do
  local member, text = arg(), arg()
  local place = tonumber(text)
  local inserted = 0
  local covered = kind ~= 'advance' and place > 0 and place <= position
  if (kind == 'delivery' or kind == 'replay') and (mode == 'catch_up' or mode == '') and place > position then covered = true end
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
