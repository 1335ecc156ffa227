-- Create the namespace if it is missing, and check that it can be used. ARGV: a realm for it, whether to create it,
-- schema. Answers: its realm, last token, schema (the oldest that a client must know), version and release.

-- include prelude.lua
local kinds = { 'hash', 'hash', 'zset', 'zset' }
local present = 0
for index, key in ipairs(KEYS) do
  local kind = call('TYPE', key).ok
  if kind ~= 'none' then
    if kind ~= kinds[index] then return { 'type', key, kind } end
    present = present + 1
  end
end
local info = call('INFO', 'replication')
if not find(info, 'role:master', 1, true) then return { 'replica' } end
local known = call('HMGET', META, 'realm', 'token', 'schema', 'version', 'release')
if not known[1] then
  if present > 0 then return { 'torn' } end
  if ARGV[2] == '0' then return { 'absent' } end
  call('HSET', META, 'realm', ARGV[1], 'schema', ARGV[3], 'token', '0', 'ticket', '0',
    'lineage', match(info, 'master_replid:(%x+)'))
  known = { ARGV[1], '0', ARGV[3] }
end
refusal(known[1], info, call('HMGET', META, 'realm', 'lineage'))
call('PUBLISH', sub(META, 1, -5) .. 'wake:', '') -- no subscriber; a user without the right fails now
return { 'open', known[1], tonumber(known[2]), known[3], known[4] or known[3], known[5] or '' }
