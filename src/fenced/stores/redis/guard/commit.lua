-- Carry out what judge.lua decided: note what was let through, raise the marks, trust the first authority.

local function commit()
  note()
  for _, index in ipairs(risen) do
    redis.call('SET', KEYS[index], asked.mark)
    redis.call('ZADD', KEYS[names + 2], asked.token, asked.names[index][1])
  end
  if admitted and asked.trusting ~= '' then redis.call('SET', KEYS[names + 1], asked.trusting) end
end
