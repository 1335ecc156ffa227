-- Give a slot the guard's configuration, unless it has this version or a later one. KEYS: the slot's; the tokens. ARGV: the
-- configuration, "version, newline, JSON"; what stands before a name in the key of its mark. If the trusted realm changes, every
-- mark of the slot is touched, as in swap.lua.

local function parts(blob)
  local version, config = string.match(blob, '^(%d+)\n(.*)$')
  return tonumber(version), cjson.decode(config)[3]
end

local version, realm = parts(ARGV[1])
local known = redis.call('GET', KEYS[1])
if known then
  local before, trusted = parts(known)
  if before >= version then return 0 end
  if trusted ~= realm then
    local moves = moving()
    if moves then return moves end
    for _, name in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
      local mark = redis.call('GET', ARGV[2] .. name)
      if mark and string.sub(mark, -1) ~= '~' then redis.call('SET', ARGV[2] .. name, mark .. '~') end
    end
  end
end
redis.call('SET', KEYS[1], ARGV[1])
return 1
