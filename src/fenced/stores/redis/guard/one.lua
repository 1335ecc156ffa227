-- One command on one name, if its mark is this lease's already; otherwise commands.lua decides. KEYS: the mark. ARGV: the
-- mark as the client knows it; the words of the command.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return redis.error_reply('FENCED undecided') end
return redis.pcall(unpack(ARGV, 2))
