-- Extend leases and queue entries. ARGV: realm, public ids. One answer each: the time left if held; -1 minus the time
-- until it should ask again if it waits; else the letter of its state; '-' if it is unknown.

-- include prelude.lua
-- Renewals work under any history, but the earlier a promotion is detected, the better.
refusal(ARGV[1], call('INFO', 'replication'), call('HMGET', META, 'realm', 'lineage'))
local answers = {}
for start = 2, #ARGV, 1000 do
  local stop = min(start + 999, #ARGV)
  local changed = {}
  for index, raw in ipairs(call('HMGET', ATTEMPTS, unpack(ARGV, start, stop))) do
    local answer = '-'
    if raw then
      local a = parse(ARGV[start + index - 1], raw)
      local live = a.state == 'g' or a.state == 'w'
      if live and a.expires <= now then
        finish(a, 'e')
        live = false
      end
      answer = a.state
      if live then
        local delay = a.delay
        local ttl = a.ttl
        if a.state == 'w' then ttl, delay = min(ttl, WAITER_TTL_MAX), 0 end
        local expires = now + ttl
        changed[#changed + 1] = a.public
        changed[#changed + 1] = struct.pack('>I8I8', expires, expires + delay + remember(a.ttl)) .. sub(raw, 17)
        answer = ttl
        if a.state == 'w' then answer = -1 - (look(names_of(a.about), a.ticket) - now) end
      end
    end
    answers[start + index - 2] = answer
  end
  if #changed > 0 then call('HSET', ATTEMPTS, unpack(changed)) end
end
return answers
