-- Run the caller's commands up to the first that fails. ARGV: for each, how many words it has, and these words.

local replies = {}
while ARGV[at] do
  local words = tonumber(ARGV[at])
  local reply = redis.pcall(unpack(ARGV, at + 1, at + words))
  replies[#replies + 1] = reply
  if type(reply) == 'table' and reply.err then break end
  at = at + 1 + words
end
return replies
