-- Applies messages, one after another: the markers of each, then its commands. It stops at the first one
-- that is not as the unit has found it.
--
-- KEYS: the checkpoint, the records of parked messages, then the sets of markers, two for each name of
-- a handler: of events, by position, and of other messages, by time.
-- ARGV: kind, and for a reader the mode, token and position that the checkpoint must have; the time in
-- milliseconds; whether there must be a checkpoint; the segment that it moves instead of the checkpoint, or 0;
-- the number of messages; then for each run of messages of one shape: the shape, the number of these
-- messages, and for each: member, position, and the words of its commands; then the place to move to in the
-- end. A shape has whether the message is marked, whether it may have been applied in part, whether the
-- checkpoint moves to it, a word for each of its sets of events ('s' and the index), and the number of words
-- of each command.
-- Returns a word, the index of the message that it is about, and details. The messages before it are
-- applied.
local call, pcall, unpack, tonumber, type, KEYS, ARGV = redis.call, redis.pcall, unpack, tonumber, type, KEYS, ARGV
local kind, want, token, from, now, checkpointed = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6] == '1'
local word, mode, position, fields = opening(kind, want, token, from, checkpointed, tonumber(ARGV[7]), 'changed')
if word then return {word, -1} end
local again = kind == 'replay' or kind == 'restore'

local moved -- the position to which messages have moved the checkpoint
local function stop(...)
  if moved then call('HSET', KEYS[1], fields .. 'position', moved, fields .. 'id', '', fields .. 'recorded', '') end
  return {...}
end

-- Most sets are empty, of events or of other messages. What this script inserts is not asked about: a
-- unit has no id twice.
local empty = {}
local function has(set, member)
  if empty[set] == nil then empty[set] = call('EXISTS', KEYS[set]) == 0 end
  return not empty[set] and call('ZSCORE', KEYS[set], member)
end

local function shape_of(text)
  local is = {mark = string.sub(text, 1, 1) == '1', may_be_partly = string.sub(text, 2, 2) == '1', moves = string.sub(text, 3, 3) == '1', sets = {}, commands = {}}
  for set in string.gmatch(text, 's(%d+)') do is.sets[#is.sets + 1] = tonumber(set) end
  for size in string.gmatch(text, ' (%d+)') do is.commands[#is.commands + 1] = tonumber(size) end
  return is
end

-- insert inserts the markers of a message in sets, and returns how many there were already. The keys of the
-- others are the first ones of inserted.
local inserted, count = {}, 0
local function insert(member, place, text, sets)
  local markers = 0
  count = 0
  for i = 1, #sets do
    local own, other_set, score = sets[i], sets[i] + 1, text
    if place == 0 then own, other_set, score = other_set, own, now end
    if has(other_set, member) or call('ZADD', KEYS[own], 'NX', score, member) == 0 then
      markers = markers + 1
    else
      count = count + 1
      inserted[count] = KEYS[own]
    end
  end
  return markers
end

local function undo(member)
  for i = 1, count do call('ZREM', inserted[i], member) end
end

local at, run, shape, sets, sizes = 8, 0, nil, nil, nil
for message = 0, tonumber(ARGV[at]) - 1 do
  if run == 0 then
    shape, run = shape_of(ARGV[at + 1]), tonumber(ARGV[at + 2])
    sets, sizes = shape.sets, shape.commands
    at = at + 2
  end
  run = run - 1
  local member, text = ARGV[at + 1], ARGV[at + 2]
  local place = tonumber(text)
  at = at + 2

  local covered = place > 0 and place <= position
  if kind == 'delivery' and place > 0 then
    if mode == '' then return stop('missing', message) end
    if mode == 'closing' then return stop('closing', message) end
    if not covered and mode == 'catch_up' then return stop('changed', message) end
  end
  if covered and (kind == 'delivery' or kind == 'reader') then return stop('changed', message) end

  local markers = 0
  count = 0
  if shape.mark then
    markers = insert(member, place, text, sets)
  else
    for _, set in ipairs(sets) do
      if has(set, member) or has(set + 1, member) then markers = markers + 1 end
    end
  end
  local record, skip = false, false
  if markers > 0 or again then record = call('HGET', KEYS[2], member) end
  local changed = false
  if again then
    changed = (markers > 0 or covered) and not record
      or record and string.sub(record, 1, 6) == 'partly' and not shape.may_be_partly
    changed = changed or kind == 'replay' and place > position and mode == 'catch_up'
  elseif markers > 0 then
    changed = kind ~= 'advance' or record or markers < #sets
    skip = not changed
  end
  if changed then
    undo(member)
    return stop('changed', message)
  end
  if record then call('HDEL', KEYS[2], member) end

  for command = 1, #sizes do
    local size = sizes[command]
    local reply = not skip and pcall(unpack(ARGV, at + 1, at + size))
    at = at + size
    if type(reply) == 'table' and reply.err then
      if command == 1 then -- nothing has happened
        undo(member)
        if record then call('HSET', KEYS[2], member, record) end
        return stop('failed', message, command - 1, reply.err)
      end
      if not shape.mark then insert(member, place, text, sets) end
      call('HSET', KEYS[2], member, 'partly ' .. text)
      return stop('partly', message, command - 1, reply.err)
    end
  end
  if shape.moves then moved, position = text, place end
end

local to = ARGV[at + 1]
if to ~= '' then
  call('HSET', KEYS[1], fields .. 'position', to, fields .. 'id', ARGV[at + 2], fields .. 'recorded', ARGV[at + 3])
  return {'applied', -1, to}
end
return stop('applied', -1, moved or from)
