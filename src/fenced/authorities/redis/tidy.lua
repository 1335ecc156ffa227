-- Forget attempts that are long over, some at a time. ARGV: how many to look at. Answers: how many were over, and how
-- many were looked at.

-- include prelude.lua
return { sweep(tonumber(ARGV[1])) }
