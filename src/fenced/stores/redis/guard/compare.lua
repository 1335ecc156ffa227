-- The values that the caller expects. ARGV from 4: how many; then for each: "=" and the value, or "-" and nothing if
-- there must be none; how many words the command has that reads it; these words.

local at = 5
for number = 1, tonumber(ARGV[4]) do
  local words = tonumber(ARGV[at + 2])
  local value = redis.call(unpack(ARGV, at + 3, at + 2 + words))
  if (ARGV[at] == '=' and value ~= ARGV[at + 1]) or (ARGV[at] == '-' and value) then
    return redis.error_reply('FENCED conflict ' .. number)
  end
  at = at + 3 + words
end
