-- server identifies the process of the server and its history: it changes with a restart, and when a
-- replica becomes the master.
local function server()
  local text = redis.call('INFO', 'server') .. redis.call('INFO', 'replication')
  return (string.match(text, 'run_id:(%x+)') or '') .. '/' .. (string.match(text, 'master_replid:(%x+)') or '')
end

-- checkpoint returns the mode, position and token of the checkpoint KEYS[1], whether this is another server
-- than the one that it was stored on, and whether parked messages must wait. On another server data may
-- be missing, and the projector catches up.
local function checkpoint()
  local is = redis.call('HMGET', KEYS[1], 'mode', 'position', 'token', 'server', 'restoring')
  local mode, other = is[1] or '', false
  if mode ~= '' and is[4] ~= server() then
    other = true
    if mode == 'live' or mode == 'closing' then mode = 'catch_up' end
  end
  return mode, tonumber(is[2] or '0'), is[3] or '', other, is[5] == '1'
end

local at = 0
local function arg()
  at = at + 1
  return ARGV[at]
end

-- segment returns the position and the token of a segment of the checkpoint KEYS[1], if it exists, and whether the
-- current split has it.
local function segment(number)
  local is = redis.call('HMGET', KEYS[1], 'splits', 'segment:' .. number .. ':position', 'segment:' .. number .. ':token')
  local split = is[1] and cjson.decode(is[1])[1]
  if not split or number < split.first or number >= split.first + split.count then return nil, nil, false end
  return is[2] and tonumber(is[2]), is[3] or '', true
end

-- opening returns the word that ends a unit, or nil, the mode and position that the unit finds, and the prefix of the
-- fields that it moves. waits is the word for parked messages that must wait.
local function opening(kind, want, token, from, checkpointed, number, waits)
  local mode, position, is, other, restoring = checkpoint()
  if mode == 'ended' or mode == 'emptied' then return 'ended' end
  if kind == 'replay' and (other or restoring or mode == '' and checkpointed) then return waits end
  if other and kind ~= 'delivery' then return 'fenced' end
  local fields = ''
  if number > 0 then
    fields = 'segment:' .. number .. ':'
    position, is = segment(number)
  end
  if not position or want ~= '' and (mode ~= want or is ~= token) then return 'fenced' end
  if kind == 'advance' and tonumber(from) ~= position then return 'fenced' end
  return nil, mode, position, fields
end
