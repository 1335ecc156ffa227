-- Every script begins with this: the keys, the clock, and the format of an attempt's record.
--
-- meta      hash: realm, schema, token, ticket, lineage. Never deleted.
-- attempts  hash: public id -> record: expires, forget, state, ttl, delay, ticket and token as HEAD packs them, and
--           then "name\0name\1channel\1holder". States: waiting, granted, released, d (withdrawn), expired, v (revoked).
-- places    sorted set, all scores 0, so it is in byte order: "name\0ticket\0public id".
--           Ticket 0 is the attempt that holds the name, or held it last and expired, or was released and keeps it
--           taken; the others wait.
-- forget    sorted set: public id by the first second in which the attempt could be deleted.
--
-- Times are microseconds. Numbers are whole and below 2^53. Use format to make text of them: tostring loses digits.

local META, ATTEMPTS, PLACES, FORGET = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local call, format, sub, find, match = redis.call, string.format, string.sub, string.find, string.match
local max, min = math.max, math.min
local HEAD, HEAD_BYTES, NOBODY = '>I8I8c1I8I8I8I8', 49, '\1\1'
local HOLDER_TICKET, FIRST_TICKET = '0000000000000000', '0000000000000001'
local clock = call('TIME')
local now = clock[1] * 1000000 + clock[2]
