-- Note that a slot of the cluster is in use, and return the configuration that it gets: in one step, so that an operator who
-- changes the configuration finds the slot, or the slot gets the new one. KEYS: the configuration; the slots. ARGV: the slot;
-- "1" if a replica is to confirm it.

redis.call('SADD', KEYS[2], ARGV[1])
local config = redis.call('GET', KEYS[1])
if config and ARGV[2] == '1' then redis.call('SET', KEYS[1], config) end -- WAIT waits for a write of its own connection
return config
