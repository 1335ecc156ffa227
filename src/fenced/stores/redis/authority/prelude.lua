-- Functions that the scripts share. Included only where needed: creating them takes longer than a usual grant.

local function remember(ttl)
  return max(REMEMBER_MIN, 4 * ttl)
end

local function parse(public, raw)
  local a = { public = public, about = sub(raw, HEAD_BYTES + 1) }
  a.expires, a.forget, a.state, a.ttl, a.delay, a.ticket, a.token = struct.unpack(HEAD, raw)
  return a
end

local function read(public)
  local raw = call('HGET', ATTEMPTS, public)
  return raw and parse(public, raw)
end

local function write(a)
  local head = struct.pack(HEAD, a.expires, a.forget, a.state, a.ttl, a.delay, a.ticket, a.token)
  call('HSET', ATTEMPTS, a.public, head .. a.about)
end

local function names_of(about)
  local names = {}
  for name in string.gmatch(match(about, '^[^\1]*'), '[^%z]+') do
    names[#names + 1] = name
  end
  return names
end

local function place(name, ticket, public)
  return name .. '\0' .. format('%016.0f', ticket) .. '\0' .. public
end

-- Remove an attempt that was granted or has ended from its queues.
local function leave_queues(a)
  if a.state == 'w' then
    for _, name in ipairs(names_of(a.about)) do
      call('ZREM', PLACES, place(name, a.ticket, a.public))
    end
  end
end

-- End an attempt. Its record keeps the names and drops the holder. An expired one is kept at least until its delay ends.
local function finish(a, state)
  leave_queues(a)
  a.about = match(a.about, '^[^\1]*') .. NOBODY
  local from = now
  if state == 'e' then from = max(now, a.expires + a.delay) end
  a.state, a.forget = state, from + remember(a.ttl)
  write(a)
end

-- The attempt that holds the name, or held it last and expired.
local function claim_of(name)
  local found = call('ZRANGEBYLEX', PLACES, '[' .. name .. '\0', '(' .. name .. '\0' .. FIRST_TICKET, 'LIMIT', 0, 1)
  return found[1] and read(sub(found[1], -32))
end

-- The end of the range of entries ahead of a ticket (0: of all entries).
local function behind(name, ticket)
  if ticket == 0 then return '(' .. name .. '\1' end
  return '(' .. name .. '\0' .. format('%016.0f', ticket)
end

-- When an attempt with this ticket (0: not queued yet) could be granted if no other request arrives, and the claims on
-- its names. Only the nearest live entry ahead is read; expired entries in between are ended.
local function look(names, ticket)
  local free, claims = now, {}
  for _, name in ipairs(names) do
    local from, to = '[' .. name .. '\0', behind(name, ticket)
    while true do
      local last = call('ZREVRANGEBYLEX', PLACES, to, from, 'LIMIT', 0, 1)[1]
      if not last then break end -- neither held nor waited for
      local other = read(sub(last, -32))
      if not other then -- somebody deleted its record
        call('ZREM', PLACES, last)
      elseif sub(last, -49, -34) == HOLDER_TICKET then
        other.at = name
        claims[#claims + 1] = other
        free = max(free, other.expires + other.delay)
        break
      elseif other.expires > now then
        free = max(free, other.expires)
        local claim = claim_of(name)
        if claim then
          claim.at = name
          claims[#claims + 1] = claim
          free = max(free, claim.expires + claim.delay)
        end
        break
      else
        finish(other, 'e')
        call('ZREM', PLACES, last)
      end
    end
  end
  return free, claims
end

-- Free the names of an ended attempt, and notify the first live waiter of each.
local function free_names(a, held)
  local notified = {}
  for _, name in ipairs(names_of(a.about)) do
    if held then call('ZREM', PLACES, place(name, 0, a.public)) end
    local from, to = '[' .. name .. '\0' .. FIRST_TICKET, '(' .. name .. '\1'
    while true do
      local first = call('ZRANGEBYLEX', PLACES, from, to, 'LIMIT', 0, 1)[1]
      if not first then break end
      local head = read(sub(first, -32))
      if head and head.expires > now then
        if not notified[head.public] then
          notified[head.public] = true
          local channel = match(head.about, '\1([^\1]*)\1')
          call('PUBLISH', sub(META, 1, -5) .. 'wake:' .. channel, head.public)
        end
        break
      end
      if head then finish(head, 'e') end
      call('ZREM', PLACES, first)
    end
  end
end

-- Schedule a check of whether an attempt can be deleted, at the earliest time that this is possible.
local function remind(public, ttl)
  call('ZADD', FORGET, clock[1] + math.floor(remember(ttl) / 1000000), public)
end

-- Check the first few attempts that are due, and delete those that may be. Returns how many were deleted and checked.
local function sweep(limit)
  local due = call('ZRANGEBYSCORE', FORGET, '-inf', clock[1], 'LIMIT', 0, limit)
  local forgotten = 0
  for _, public in ipairs(due) do
    local a = read(public)
    if a and a.forget > now then
      if (a.state == 'g' or a.state == 'w') and a.expires > now then
        remind(public, a.ttl)
      else
        call('ZADD', FORGET, math.floor(a.forget / 1000000), public)
      end
    else
      if a then
        leave_queues(a)
        for _, name in ipairs(names_of(a.about)) do
          call('ZREM', PLACES, place(name, 0, public))
        end
        call('HDEL', ATTEMPTS, public)
        forgotten = forgotten + 1
      end
      call('ZREM', FORGET, public)
    end
  end
  return forgotten, #due
end

-- Why this server may not mint tokens of this realm: nil, or the answer to return. Judged by INFO replication, and by
-- the realm and lineage in meta. A new replication id without a former one is the same history: the server restarted,
-- or its first replica connected. A former id means that a replica was promoted. Then the lineage gets a mark that only
-- an operator removes, because the server forgets its former id after a while.
local function refusal(realm, info, known)
  if not find(info, 'role:master', 1, true) then return { 'replica' } end
  if known[1] ~= realm then return { 'realm', known[1] or '' } end
  local lineage = known[2]
  if find(info, 'master_replid:' .. lineage, 1, true) then return end
  local id, former = match(info, 'master_replid:(%x+)%s+master_replid2:(%x+)')
  local marked = sub(lineage, 1, 1) == '!'
  if not marked and not find(former, '[^0]') then
    call('HSET', META, 'lineage', id)
    return
  end
  if not marked then call('HSET', META, 'lineage', '!' .. lineage) end
  return { 'lineage', marked and sub(lineage, 2) or lineage, id }
end

-- The next token; nil if the tokens are used up.
local function mint()
  local token = call('HINCRBY', META, 'token', '1')
  if token <= TOKEN_MAX then return token end
  call('HINCRBY', META, 'token', '-1')
end

local function replicas_of(info)
  return tonumber(match(info, 'connected_slaves:(%d+)'))
end

-- Append the holder of a name to an answer.
local function with_holder(answer, claims)
  for _, claim in ipairs(claims) do
    if claim.state == 'g' and claim.expires > now then
      for _, part in ipairs({ claim.about, claim.token, claim.public, claim.expires - now }) do
        answer[#answer + 1] = part
      end
      break
    end
  end
  return answer
end
