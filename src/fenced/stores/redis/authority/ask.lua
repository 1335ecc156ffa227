-- Grant, queue or refuse; the same attempt gets the same grant. ARGV: realm, ttl, delay, wait, about, public id.

local realm, ttl, delay, about, public = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[5], ARGV[6]

-- The usual cases, with the fewest commands: one name, the server's history is unchanged, and either nobody holds or
-- awaits the name, or this attempt is first in its queue. If the attempt exists already, or the tokens are used up, the
-- token is taken back (no other script can have seen it), and the code below decides.
local name = match(about, '^([^%z\1]+)\1')
local first = name and call('ZRANGEBYLEX', PLACES, '[' .. name .. '\0', '(' .. name .. '\1', 'LIMIT', '0', '1')[1]
local head = first and sub(first, -32) == public and sub(first, -49, -34) ~= HOLDER_TICKET
local mine = head and call('HGET', ATTEMPTS, public)
local ticket = 0
local due = name and not first
if mine then
  local expires, _, _, mine_ttl, _, mine_ticket = struct.unpack(HEAD, mine)
  ticket = mine_ticket
  due = expires > now and mine_ttl == ttl and sub(mine, HEAD_BYTES + 1, HEAD_BYTES + #name + 1) == name .. '\1'
end
if due then
  local info, known = call('INFO', 'replication'), call('HMGET', META, 'realm', 'lineage')
  if
    known[1] == realm
    and find(info, 'role:master\r\nconnected_slaves:0\r', 1, true)
    and find(info, 'master_replid:' .. known[2], 1, true)
  then
    local token, expires = call('HINCRBY', META, 'token', '1'), now + ttl
    local kept = max(REMEMBER_MIN, 4 * ttl)
    local record = struct.pack(HEAD, expires, expires + delay + kept, 'g', ttl, delay, ticket, token) .. about
    if token <= TOKEN_MAX and (mine or call('HSETNX', ATTEMPTS, public, record) == 1) then
      if mine then
        call('HSET', ATTEMPTS, public, record)
        call('ZREM', PLACES, first)
      else
        call('ZADD', FORGET, clock[1] + math.floor(kept / 1000000), public)
      end
      call('ZADD', PLACES, '0', name .. '\0' .. HOLDER_TICKET .. '\0' .. public)
      if token % SWEEP_EVERY == 0 then
        -- include prelude.lua
        sweep(3 * SWEEP_EVERY)
      end
      return token
    end
    call('HINCRBY', META, 'token', '-1')
  end
end

-- include prelude.lua
local names = names_of(about)
local a = read(public)
if a then
  local before = match(a.about, '^[^\1]*')
  if before ~= '' and (before ~= match(about, '^[^\1]*') or a.ttl ~= ttl) then return { 'other' } end
  if (a.state == 'g' or a.state == 'w') and a.expires <= now then finish(a, 'e') end
  if a.state == 'g' then
    local replicas = replicas_of(call('INFO', 'replication'))
    if replicas > 0 then write(a) end -- WAIT covers only writes that this connection has made
    return { 'granted', a.token, a.expires - now, replicas }
  end
  if a.state ~= 'w' then return { 'ended', a.state } end
  a.about = about
else
  a = { public = public, state = 'n', ttl = ttl, delay = delay, ticket = 0, token = 0, about = about }
end

local free, claims = look(names, a.ticket)
local info, known = call('INFO', 'replication'), call('HMGET', META, 'realm', 'lineage')
if free <= now then
  local refused = refusal(realm, info, known)
  if refused then return refused end
  a.token = mint()
  if not a.token then return { 'used up' } end
  leave_queues(a)
  for _, before in ipairs(claims) do
    if before.state ~= 'r' then finish(before, 'e') end
    call('ZREM', PLACES, place(before.at, 0, before.public))
  end
  for _, each in ipairs(names) do
    call('ZADD', PLACES, '0', place(each, 0, public))
  end
  a.state, a.expires = 'g', now + ttl
  a.forget = a.expires + a.delay + remember(ttl)
  write(a)
  if a.ticket == 0 then remind(public, ttl) end
  if a.token % SWEEP_EVERY == 0 then sweep(3 * SWEEP_EVERY) end
  return { 'granted', a.token, ttl, replicas_of(info) }
end

if known[1] ~= realm then return { 'realm', known[1] or '' } end
local ahead = 0
for _, each in ipairs(names) do
  ahead = max(ahead, call('ZLEXCOUNT', PLACES, '[' .. each .. '\0' .. FIRST_TICKET, behind(each, a.ticket)))
end
if a.ticket == 0 then
  if ARGV[4] == '0' or ahead >= QUEUE_MAX then return with_holder({ 'busy', ahead }, claims) end
  a.state, a.ticket = 'w', call('HINCRBY', META, 'ticket', '1')
  for _, each in ipairs(names) do
    call('ZADD', PLACES, '0', place(each, a.ticket, public))
  end
  remind(public, ttl)
  if a.ticket % SWEEP_EVERY == 0 then sweep(3 * SWEEP_EVERY) end
end
a.expires = now + min(ttl, WAITER_TTL_MAX)
a.forget = a.expires + remember(ttl)
write(a)
return with_holder({ 'waiting', free - now, ahead }, claims)
