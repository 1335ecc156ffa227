-- Take a name from the holder that has a token, and mint a token above it. ARGV: realm, name, token.
-- Nil: that grant does not hold the name.

-- include prelude.lua
local a = claim_of(ARGV[2])
if not a or a.state ~= 'g' or a.expires <= now or a.token ~= tonumber(ARGV[3]) then return false end
local refused = refusal(ARGV[1], call('INFO', 'replication'), call('HMGET', META, 'realm', 'lineage'))
if refused then return refused end
local minted = mint()
if not minted then return { 'used up' } end
finish(a, 'v')
free_names(a, true)
return minted
