-- Append events to the logs of many jobs and publish what was accepted; one call per flush.
--
-- KEYS[i]  log and channel of job i
-- ARGV     seconds to keep a running log, seconds to keep an ended one, then per job:
--          number of events n, then n times: attempt, seq, 1 if terminal else 0, JSON
-- returns  per job 1 = all of its events are in the log, 0 = the log belongs to a higher attempt
--
-- PUBLISH follows an accepted XADD within the script, so nobody sees what the log refused, and a
-- call that is repeated because its answer was lost publishes nothing twice.

-- Where the log stands against an id that it refused: 'ours' = at the same attempt and not before it,
-- 'fenced' = at a higher attempt, nil = before it, so the refusal had another cause (memory).
local function standing(key, attempt, seq)
  local last = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  if not last then
    return nil
  end
  local last_attempt, last_seq = string.match(last[1], '^(%d+)-(%d+)$')
  if tonumber(last_attempt) > attempt then
    return 'fenced'
  end
  return tonumber(last_attempt) == attempt and tonumber(last_seq) >= seq and 'ours' or nil
end

local running, ended = ARGV[1], ARGV[2]
local verdicts = {}
local at = 3
for job, key in ipairs(KEYS) do
  local count = tonumber(ARGV[at])
  local verdict, life = 1, nil
  for first = at + 1, at + 4 * count, 4 do
    local attempt, seq, terminal, json = ARGV[first], ARGV[first + 1], ARGV[first + 2], ARGV[first + 3]
    local answer = redis.pcall('XADD', key, attempt .. '-' .. seq, 'e', json)
    if type(answer) ~= 'table' or not answer.err then
      redis.call('PUBLISH', key, json)
      life = terminal == '1' and ended or running
    else
      local stands = standing(key, tonumber(attempt), tonumber(seq))
      if not stands then
        return answer
      elseif stands == 'fenced' then
        verdict = 0
        break
      end
    end
  end
  if life then
    redis.call('EXPIRE', key, life)
  end
  verdicts[job] = verdict
  at = at + 1 + 4 * count
end
return verdicts
