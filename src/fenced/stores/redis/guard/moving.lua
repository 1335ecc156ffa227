-- Whether the slot of these keys moves to another node of a cluster: then an error, with which a script ends before it has
-- written. Keys of which only some have arrived, or one that is deleted and written again, would make it fail in the middle.
-- Two keys that no node has are refused by both nodes meanwhile. (Names have no line breaks.)

local function moving()
  local reply = redis.pcall('MGET', KEYS[1] .. '\n', KEYS[1] .. '\n\n')
  if not reply.err then return nil end
  if string.find(reply.err, 'non local key', 1, true) or string.find(reply.err, 'TRYAGAIN', 1, true) then
    return redis.error_reply('TRYAGAIN the slot of these keys moves to another node')
  end
  return reply
end
