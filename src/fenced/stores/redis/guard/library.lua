-- In front of a library of the caller's (FUNCTION LOAD): every function that it registers runs behind the check, under a
-- name that begins with PREFIX. CHECK is judge.lua and commit.lua.
--
-- While a library is loaded, the server offers a part of its interface, and neither pairs nor pcall. The rest is copied
-- at the first call.

local guarded = (function()
  local offered = {
    log = redis.log,
    LOG_DEBUG = redis.LOG_DEBUG,
    LOG_VERBOSE = redis.LOG_VERBOSE,
    LOG_NOTICE = redis.LOG_NOTICE,
    LOG_WARNING = redis.LOG_WARNING,
    REDIS_VERSION = redis.REDIS_VERSION,
    REDIS_VERSION_NUM = redis.REDIS_VERSION_NUM,
  }
  local register, complete = redis.register_function, false

  local function check(KEYS, ARGV)
    CHECK
    if not decided then commit() end
  end

  local function behind(callback)
    return function(keys, arguments)
      if not complete then
        for name, value in pairs(redis) do
          if offered[name] == nil then offered[name] = value end
        end
        complete = true
      end
      local refusal = check(keys, arguments)
      if refusal then return refusal end
      local own, words, skipped = {}, {}, tonumber(arguments[2]) + (arguments[3] == '' and 0 or 4)
      for index = skipped + 1, #keys do own[index - skipped] = keys[index] end
      for index = 4, #arguments do words[index - 3] = arguments[index] end
      return callback(own, words)
    end
  end

  offered.register_function = function(first, callback)
    if callback then return register('PREFIX' .. first, behind(callback)) end
    first.function_name = 'PREFIX' .. first.function_name
    first.callback = behind(first.callback)
    return register(first)
  end
  return offered
end)()
local redis, server = guarded, guarded -- Valkey has both names
