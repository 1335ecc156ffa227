-- Delete old attempts, some at a time. ARGV: how many to check. Returns how many were deleted, and how many were checked.

-- include prelude.lua
return { sweep(tonumber(ARGV[1])) }
