-- Take a name from its holder and mint a token above it. ARGV: realm, name. Nil when nobody held it.

-- include prelude.lua
local a = claim_of(ARGV[2])
if not a or a.state ~= 'g' or a.expires <= now then return false end
local refused = refusal(ARGV[1], call('INFO', 'replication'), call('HMGET', META, 'realm', 'lineage'))
if refused then return refused end
local token = mint()
if not token then return { 'used up' } end
finish(a, 'v')
free_names(a, true)
return token
