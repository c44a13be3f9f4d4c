-- Applies messages, one after another: the markers of each, then its commands. It stops at the first one
-- that is not as the unit has found it.
--
-- KEYS: the checkpoint, the records of parked messages, then the sets of markers, two for each name of
-- a handler: of events, by position, and of other messages, by time.
-- ARGV: kind, and for a reader the mode, token and position that the checkpoint must have; the time in
-- milliseconds; whether there must be a checkpoint; the segment that it moves instead of the checkpoint, or 0;
-- the number of messages, and for each: member,
-- position, shape, and the words of its commands; then the place to move to in the end. A shape has whether
-- the message is marked, whether it may have been applied in part, whether the checkpoint moves to it, a
-- word for each of its sets of events ('s' and the index), and the number of words of each command.
-- Returns a word, the index of the message that it is about, and details. The messages before it are
-- applied.
local kind, want, token, from, now, checkpointed = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6] == '1'
local mode, position, is, other, restoring = checkpoint()
if mode == 'ended' or mode == 'emptied' then return {'ended', -1} end
if kind == 'replay' and (other or restoring or mode == '' and checkpointed) then return {'changed', -1} end
if other and kind ~= 'delivery' then return {'fenced', -1} end
local number, fields = tonumber(ARGV[7]), ''
if number > 0 then
  fields = 'segment:' .. number .. ':'
  position, is = segment(number)
  if not position then return {'fenced', -1} end
end
if want ~= '' and (mode ~= want or is ~= token) then return {'fenced', -1} end
if kind == 'advance' and tonumber(from) ~= position then return {'fenced', -1} end
local again = kind == 'replay' or kind == 'restore'

local moved -- the position to which messages have moved the checkpoint
local function stop(...)
  if moved then redis.call('HSET', KEYS[1], fields .. 'position', moved, fields .. 'id', '', fields .. 'recorded', '') end
  return {...}
end

-- Most sets are empty, of events or of other messages. What this script inserts is not asked about: a
-- unit has no id twice.
local empty = {}
local function has(set, member)
  if empty[set] == nil then empty[set] = redis.call('EXISTS', KEYS[set]) == 0 end
  return not empty[set] and redis.call('ZSCORE', KEYS[set], member)
end

-- Messages of one type usually have the same shape.
local shapes = {}
local function shape_of(text)
  local is = shapes[text]
  if is then return is end
  is = {mark = string.sub(text, 1, 1) == '1', may_be_partly = string.sub(text, 2, 2) == '1', moves = string.sub(text, 3, 3) == '1', sets = {}, commands = {}}
  for set in string.gmatch(text, 's(%d+)') do is.sets[#is.sets + 1] = tonumber(set) end
  for size in string.gmatch(text, ' (%d+)') do is.commands[#is.commands + 1] = tonumber(size) end
  shapes[text] = is
  return is
end

-- insert inserts the markers of a message in sets. It returns how many there were already, and the keys of
-- the others.
local function insert(member, place, text, sets)
  local markers, inserted = 0, nil
  for _, set in ipairs(sets) do
    local own, other_set, score = set, set + 1, text
    if place == 0 then own, other_set, score = set + 1, set, now end
    if has(other_set, member) then
      markers = markers + 1
    elseif redis.call('ZADD', KEYS[own], 'NX', score, member) == 0 then
      markers = markers + 1
    elseif inserted then
      inserted[#inserted + 1] = KEYS[own]
    else
      inserted = {KEYS[own]}
    end
  end
  return markers, inserted
end

local function undo(inserted, member)
  for _, key in ipairs(inserted or {}) do redis.call('ZREM', key, member) end
end

local at = 8
for message = 0, tonumber(ARGV[at]) - 1 do
  local member, text, shape = ARGV[at + 1], ARGV[at + 2], shape_of(ARGV[at + 3])
  local place, sets = tonumber(text), shape.sets
  at = at + 3

  local covered = place > 0 and place <= position
  if kind == 'delivery' and place > 0 then
    if mode == '' then return stop('missing', message) end
    if mode == 'closing' then return stop('closing', message) end
    if not covered and mode == 'catch_up' then return stop('changed', message) end
  end
  if covered and (kind == 'delivery' or kind == 'reader') then return stop('changed', message) end

  local markers, inserted = 0, nil
  if shape.mark then
    markers, inserted = insert(member, place, text, sets)
  else
    for _, set in ipairs(sets) do
      if has(set, member) or has(set + 1, member) then markers = markers + 1 end
    end
  end
  local record, skip = false, false
  if markers > 0 or again then record = redis.call('HGET', KEYS[2], member) end
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
    undo(inserted, member)
    return stop('changed', message)
  end
  if record then redis.call('HDEL', KEYS[2], member) end

  for command, size in ipairs(shape.commands) do
    local reply = not skip and redis.pcall(unpack(ARGV, at + 1, at + size))
    at = at + size
    if type(reply) == 'table' and reply.err then
      if command == 1 then -- nothing has happened
        undo(inserted, member)
        if record then redis.call('HSET', KEYS[2], member, record) end
        return stop('failed', message, command - 1, reply.err)
      end
      if not shape.mark then insert(member, place, text, sets) end
      redis.call('HSET', KEYS[2], member, 'partly ' .. text)
      return stop('partly', message, command - 1, reply.err)
    end
  end
  if shape.moves then moved, position = text, place end
end

local to = ARGV[at + 1]
if to ~= '' then
  redis.call('HSET', KEYS[1], fields .. 'position', to, fields .. 'id', ARGV[at + 2], fields .. 'recorded', ARGV[at + 3])
  return {'applied', -1, to}
end
return stop('applied', -1, moved or from)
