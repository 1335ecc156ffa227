-- Make every later token greater than a number, and accept this server's history. ARGV: realm, number.

local info = call('INFO', 'replication')
if not find(info, 'role:master', 1, true) then return { 'replica' } end
local known = call('HMGET', META, 'realm', 'token')
if known[1] ~= ARGV[1] then return { 'realm', known[1] or '' } end
local token = max(tonumber(known[2]), tonumber(ARGV[2]))
call('HSET', META, 'token', format('%.0f', token), 'lineage', match(info, 'master_replid:(%x+)'))
return token
