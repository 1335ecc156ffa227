-- End an attempt at its owner's request and notify the next waiters. ARGV: public id, the letter of the new state, and
-- for how long from now nobody is granted its names.

local public, ending, keep = ARGV[1], ARGV[2], tonumber(ARGV[3])
local raw = call('HGET', ATTEMPTS, public)

-- The usual case: it holds one name, and either nobody waits for it or the first waiter is alive.
if raw and keep == 0 then
  local expires, _, state, ttl = struct.unpack('>I8I8c1I8', raw)
  local name = match(raw, '^([^%z\1]+)\1', HEAD_BYTES + 1)
  if state == 'g' and expires > now and name then
    local from, to = '[' .. name .. '\0' .. FIRST_TICKET, '(' .. name .. '\1'
    local first = call('ZRANGEBYLEX', PLACES, from, to, 'LIMIT', '0', '1')[1]
    local head = first and call('HGET', ATTEMPTS, sub(first, -32))
    if not first or head and struct.unpack('>I8', head) > now then
      local forget = now + max(REMEMBER_MIN, 4 * ttl)
      call('HSET', ATTEMPTS, public, struct.pack('>I8I8c1', expires, forget, ending) .. sub(raw, 18))
      call('ZREM', PLACES, name .. '\0' .. HOLDER_TICKET .. '\0' .. public)
      if first then
        local channel = match(head, '\1([^\1]*)\1', HEAD_BYTES + 1)
        call('PUBLISH', sub(META, 1, -5) .. 'wake:' .. channel, sub(first, -32))
      end
      return 1
    end
  end
end

-- include prelude.lua
if not raw then
  if ending == 'r' then return '-' end
  local a = { public = public, expires = 0, forget = now + remember(0), state = ending, ttl = 0, delay = 0 }
  a.ticket, a.token, a.about = 0, 0, NOBODY
  write(a)
  remind(public, 0)
  sweep(4)
  return 1
end
local a = parse(public, raw)
local was = a.state
if was == 'r' or was == 'd' then return 1 end
if was ~= 'g' and was ~= 'w' then return was end
if a.expires <= now then
  finish(a, 'e')
  return 'e'
end
if was == 'g' and keep > 0 then
  a.expires = now + keep - a.delay
  finish(a, ending)
  a.forget = now + keep + remember(a.ttl)
  write(a)
  free_names(a, false) -- its places stay and block the names; the waiters ask again, and learn for how long
  return 1
end
finish(a, ending)
free_names(a, was == 'g')
return 1
