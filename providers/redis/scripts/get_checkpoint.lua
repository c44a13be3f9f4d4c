-- Returns all fields of the checkpoint KEYS[1], with the mode that it has on this server, and whether
-- that is another server than the one that it was stored on.
local mode, _, _, other = checkpoint()
return {mode, other and 1 or 0, redis.call('HGETALL', KEYS[1])}
