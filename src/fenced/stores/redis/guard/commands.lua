-- Run the caller's commands up to the first that fails. ARGV: for each, how many words it has, and these words.

if #KEYS > names + (ARGV[3] == '' and 0 or 4) then -- the caller's keys are named in a cluster only
  local moves = moving()
  if moves then return moves end
end

local function run()
  local replies = {}
  while ARGV[at] do
    local words = tonumber(ARGV[at])
    local reply = redis.pcall(unpack(ARGV, at + 1, at + words))
    replies[#replies + 1] = reply
    if type(reply) == 'table' and reply.err then break end
    at = at + 1 + words
  end
  return replies
end

if decided then return run() end
if not full then
  commit()
  return run()
end
-- At maxmemory the caller's commands come first: Redis then refuses those that it would refuse without a guard.
local replies = run()
local last = replies[#replies]
local refused = type(last) == 'table' and last.err and string.find(last.err, 'OOM', 1, true)
if not refused then commit() end -- otherwise nothing was written
return replies
