-- Change the configuration, if it is still the one that the client knows ("": none). KEYS: it; the tokens. ARGV: the known
-- one; the new one; what stands before a name in the key of its mark, if the trusted realm changes.

if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
if ARGV[3] ~= '' then
  local moves = moving()
  if moves then return moves end
end
redis.call('SET', KEYS[1], ARGV[2])
if ARGV[3] ~= '' then
  for _, name in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local mark = redis.call('GET', ARGV[3] .. name)
    if mark and string.sub(mark, -1) ~= '~' then redis.call('SET', ARGV[3] .. name, mark .. '~') end
  end
end
return 1
