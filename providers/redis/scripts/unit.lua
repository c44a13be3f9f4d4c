-- Applies messages, one after another: the markers of each, then its commands.
--
-- KEYS: the checkpoint, the records of parked messages, then the sets of markers, two for each name of
-- a handler: of events, by position, and of other messages, by time.
-- ARGV: kind, and for a reader the mode, token and position that the checkpoint must have; the time in
-- milliseconds; whether there must be a checkpoint; the number of messages, and for each: member,
-- position, the indices of its sets of events, whether it is marked, whether it may have been applied in
-- part, the place to move the checkpoint to, and its commands; then the last place.
-- Returns a word, the index of the message that it is about, and details. The messages before it are
-- applied.
local kind, want, token, from, now, checkpointed = arg(), arg(), arg(), arg(), arg(), arg() == '1'
local mode, position, is, other = checkpoint()
if mode == 'ended' or mode == 'emptied' then return {'ended', -1} end
if other and kind == 'replay' then return {'behind', -1} end
if mode == '' and checkpointed then return {'missing', -1} end
if other and kind ~= 'delivery' then return {'fenced', -1} end
if want ~= '' and (mode ~= want or is ~= token) then return {'fenced', -1} end
if kind == 'advance' and tonumber(from) ~= position then return {'fenced', -1} end

local function move()
  local to, id, recorded = arg(), arg(), arg()
  if to ~= '' then
    redis.call('HSET', KEYS[1], 'position', to, 'id', id, 'recorded', recorded)
    position = tonumber(to)
  end
end

for message = 0, tonumber(arg()) - 1 do
  local member, text = arg(), arg()
  local place = tonumber(text)
  local sets = {}
  for set = 1, tonumber(arg()) do sets[set] = tonumber(arg()) end
  local mark, may_be_partly = arg() == '1', arg() == '1'
  local covered = place > 0 and place <= position
  if kind == 'delivery' and place > 0 then
    if mode == '' then return {'missing', message} end
    if mode == 'closing' then return {'closing', message} end
    if not covered and mode == 'catch_up' then return {'changed', message} end
  end
  if covered and (kind == 'delivery' or kind == 'reader') then return {'changed', message} end

  local markers = 0
  for _, set in ipairs(sets) do
    if redis.call('ZSCORE', KEYS[set], member) or redis.call('ZSCORE', KEYS[set + 1], member) then
      markers = markers + 1
    end
  end
  local marked = markers > 0
  local record = false
  local again = kind == 'replay' or kind == 'restore'
  if marked or again then record = redis.call('HGET', KEYS[2], member) end
  local skip = false
  if again then
    if (marked or covered) and not record then return {'changed', message} end
    if record and string.sub(record, 1, 6) == 'partly' and not may_be_partly then return {'changed', message} end
    if kind == 'replay' and not record and place > position and mode == 'catch_up' then return {'behind', message} end
  elseif marked then
    if kind ~= 'advance' or record or markers < #sets then return {'changed', message} end
    skip = true
  end

  local inserted = {}
  local function insert()
    for _, set in ipairs(sets) do
      local key, score = KEYS[set], place
      if place == 0 then key, score = KEYS[set + 1], now end
      if redis.call('ZADD', key, 'NX', score, member) == 1 then inserted[#inserted + 1] = key end
    end
  end
  if mark and not skip then insert() end
  if record then redis.call('HDEL', KEYS[2], member) end

  local moved = at
  at = at + 3
  for command = 1, tonumber(arg()) do
    local size = tonumber(arg())
    local reply = not skip and redis.pcall(unpack(ARGV, at + 1, at + size))
    at = at + size
    if type(reply) == 'table' and reply.err then
      if command == 1 then -- nothing has happened
        for _, key in ipairs(inserted) do redis.call('ZREM', key, member) end
        if record then redis.call('HSET', KEYS[2], member, record) end
        return {'failed', message, command - 1, reply.err, position}
      end
      if not mark then insert() end
      redis.call('HSET', KEYS[2], member, 'partly ' .. text)
      return {'partly', message, command - 1, reply.err, position}
    end
  end
  local after = at
  at = moved
  move()
  at = after
end
move()
return {'applied', -1, position}
