-- Every script of the guard begins with this. It decides as decision.judge does, and changes no mark.
--
-- KEYS: the mark of each name; and, if there are details, the configuration, the tokens, the records and the counts.
-- ARGV: the mark with which nothing needs to be decided; how many names; the details as JSON, or nothing if the client
--       expects that nothing needs to be decided.
--
-- A mark is "token:grant:seq", under rule retry "token:grant:-". Tokens are stored as texts, because tostring loses
-- digits, and compared as numbers, which are exact up to 2^53. `tokens` is a sorted set of all names by token: a name
-- whose mark was deleted is still known there. A change of the trusted realm puts "~" behind every mark (swap.lua), so
-- that everything is decided again.

local names = tonumber(ARGV[2])
local decided = ARGV[1] ~= '' -- an empty mark is nobody's: it is broken
for index = 1, names do
  if redis.call('GET', KEYS[index]) ~= ARGV[1] then decided = false end
end
local asked, admitted, risen, note, full
if not decided then
  if ARGV[3] == '' then return redis.error_reply('FENCED undecided') end
  asked, risen = cjson.decode(ARGV[3]), {}
  if redis.call('GET', KEYS[names + 1]) ~= asked.config then return redis.error_reply('FENCED configuration') end
  local notes, refusal = {}, nil
  local mine, number = tonumber(asked.token), tonumber(asked.seq)
  for index = 1, names do
    local name, verdict, ruling, mode = unpack(asked.names[index])
    local raw, token, grant, seq = redis.call('GET', KEYS[index]), nil, '', '0'
    local last, owner = nil, asked.grant
    if raw then
      token, grant, seq = string.match(raw, '^([1-9]%d*):(%x+):([%d-]+)~?$')
      if not token then return redis.error_reply('FENCED broken ' .. index) end
      last, owner = tonumber(seq) or 0, grant
    else
      token = redis.call('ZSCORE', KEYS[names + 2], name) or nil
      last = math.huge -- the mark was deleted: nobody knows how many operations there were
    end
    local seen, rises = tonumber(token), false
    if verdict == '' then -- nothing is wrong with the stamp itself
      if seen and mine < seen then
        verdict = 'stale'
      elseif seen == mine and owner ~= asked.grant then
        verdict = 'reused'
      elseif asked.rule ~= 'retry' and not asked.announce and number == 0 then
        verdict = 'invalid'
      elseif not seen or mine > seen then
        verdict, rises = 'admit', true
      elseif asked.announce or asked.rule == 'retry' then
        verdict, rises = 'admit', asked.rule == 'retry' and raw ~= asked.mark
      elseif asked.rule == 'once' then
        verdict, rises = 'duplicate', false
        if last == 0 then verdict, rises = 'admit', true end
      elseif number > last then
        verdict, rises = 'admit', true
      elseif number == last then
        verdict = 'applied'
      else
        verdict = 'out_of_order'
      end
    end
    local mark = token and token .. ':' .. grant .. ':' .. seq or '-'
    if verdict == 'admit' then
      admitted = true
      if rises then risen[#risen + 1] = index end
    else
      if verdict ~= 'applied' and (ruling == 'refuse' or not asked.quiet) then
        notes[#notes + 1] = { name, mark, verdict, ruling, mode }
      end
      if verdict == 'applied' or ruling == 'refuse' then
        refusal = 'FENCED ' .. verdict .. ' ' .. index .. ' ' .. mark
        break
      end
    end
  end

  -- At maxmemory Redis refuses the first write of a script if it needs memory, and lets a script go on that has written.
  -- Try with a write that changes nothing: no name is empty.
  local begun = redis.pcall('ZADD', KEYS[names + 2], 'XX', 0, '')
  if type(begun) == 'table' and begun.err then
    if not string.find(begun.err, 'OOM', 1, true) then return begun end
    full = true
  end

  -- Count what was not simply admitted, and record it if its mode asks for that. If a replica is to confirm the marks,
  -- write something in any case: WAIT waits for the last write of its connection, and a mark may have been raised, and not
  -- confirmed, on another one.
  note = function()
    if full then redis.call('ZREM', KEYS[names + 2], '') end -- needs no memory; the few bytes of a mark may follow
    if asked.confirm then redis.call('SET', KEYS[names + 1], asked.config) end
    for _, each in ipairs(notes) do
      local kind = each[3] .. ' ' .. each[4] .. ' ' .. each[5]
      redis.call('HINCRBY', KEYS[names + 4], kind, 1)
      redis.call('HSET', KEYS[names + 4], '@' .. kind, redis.call('TIME')[1])
      if each[4] ~= 'count' then
        redis.call('XADD', KEYS[names + 3], 'MAXLEN', '~', asked.records, '*', 'name', each[1], 'stamp', asked.stamp,
          'mark', each[2], 'verdict', each[3], 'ruling', each[4], 'mode', each[5])
      end
    end
  end
  if refusal then
    note()
    return redis.error_reply(refusal)
  end
end
