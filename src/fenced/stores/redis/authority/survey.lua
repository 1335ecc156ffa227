-- Names that are held or have a queue, in order. ARGV: the name to start after, and how many to check; or 0 and the one
-- name to return, even if it is free. Each name: the name, time until it is free, the waiters (about, time left, and so
-- on), and if it is held: about, token, public id, time left, ttl.

-- include prelude.lua
local function view(name)
  local free, waiters, held = 0, {}, nil
  for _, found in ipairs(call('ZRANGEBYLEX', PLACES, '[' .. name .. '\0', '(' .. name .. '\1')) do
    local a = read(sub(found, -32))
    if sub(found, -49, -34) == HOLDER_TICKET then
      free = max(0, a.expires + a.delay - now)
      if a.state == 'g' and a.expires > now then held = a end
    elseif a.expires > now then
      waiters[#waiters + 1] = a.about
      waiters[#waiters + 1] = a.expires - now
    end
  end
  local seen = { name, free, waiters }
  if held then
    for _, part in ipairs({ held.about, held.token, held.public, held.expires - now, held.ttl }) do
      seen[#seen + 1] = part
    end
  end
  return seen, free > 0 or #waiters > 0
end

if ARGV[2] == '0' then return { '', { (view(ARGV[3])) } } end
local after, views, shown = ARGV[1], {}, 0
for _ = 1, tonumber(ARGV[2]) do
  local from = '-'
  if after ~= '' then from = '(' .. after .. '\1' end
  local first = call('ZRANGEBYLEX', PLACES, from, '+', 'LIMIT', 0, 1)[1]
  if not first then return { '', views } end
  after = sub(first, 1, -51)
  local seen, live = view(after)
  if live then views[#views + 1] = seen end
  shown = shown + #seen[3]
  if shown > 40000 then break end -- a page with long queues is shorter: clients bound what one reply may have
end
return { after, views }
