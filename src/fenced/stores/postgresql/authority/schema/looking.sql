-- Looking at names.

-- One name with its holder and its queue, as JSON, for people.
CREATE OR REPLACE FUNCTION fenced.look(p_namespace integer, p_name text) RETURNS text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  WITH at AS MATERIALIZED (SELECT clock_timestamp() AS now)
  SELECT json_build_object(
    'name', p_name,
    'claim', (
      SELECT json_build_array(a.state = 'granted' AND a.expires > at.now, a.holder, a.token,
        replace(a.id::text, '-', ''), extract(epoch FROM a.expires - at.now), a.names,
        extract(epoch FROM a.ttl), extract(epoch FROM a.expires + a.lock_delay - at.now))
      FROM fenced.name n JOIN fenced.attempt a ON a.id = n.attempt
      WHERE n.namespace = p_namespace AND n.name = p_name AND n.held AND a.state IN ('granted', 'expired', 'released')
        AND a.expires + a.lock_delay > at.now),
    'waiters', (
      SELECT json_agg(json_build_array(a.holder, a.names, extract(epoch FROM a.expires - at.now)) ORDER BY q.ticket)
      FROM fenced.queue q JOIN fenced.attempt a ON a.id = q.attempt
      WHERE q.namespace = p_namespace AND q.name = p_name AND a.state = 'waiting' AND a.expires > at.now)
  )::text FROM at
$$;

-- Names that are held, delayed or have a queue, in order.
CREATE OR REPLACE FUNCTION fenced.survey(p_namespace integer, p_after text, p_limit integer) RETURNS SETOF text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT fenced.look(p_namespace, found.name) FROM (
    SELECT n.name FROM fenced.name n
    WHERE n.namespace = p_namespace AND n.name > p_after COLLATE "C" AND (
      n.held AND EXISTS (
        SELECT FROM fenced.attempt a WHERE a.id = n.attempt AND a.state IN ('granted', 'expired', 'released')
          AND a.expires + a.lock_delay > clock_timestamp())
      OR n.contended AND EXISTS (
        SELECT FROM fenced.queue q JOIN fenced.attempt a ON a.id = q.attempt
        WHERE q.namespace = p_namespace AND q.name = n.name
          AND a.state = 'waiting' AND a.expires > clock_timestamp()))
    ORDER BY n.name LIMIT p_limit) AS found
$$;

-- Attempts at a name that are not forgotten, as JSON: who, token, state, and when. An end by the holder or an operator is known
-- by when the row may be forgotten; a release that keeps the name has overwritten both times.
CREATE OR REPLACE FUNCTION fenced.past(p_namespace integer, p_name text, p_place interval, p_remember interval) RETURNS text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT json_agg(json_build_array(a.names, a.holder, replace(a.id::text, '-', ''), a.token, a.state, extract(epoch FROM a.ttl),
    CASE WHEN NOT kept THEN extract(epoch FROM a.expires - CASE WHEN a.token > 0 THEN a.ttl ELSE least(a.ttl, p_place) END) END,
    CASE WHEN NOT kept THEN extract(epoch FROM CASE WHEN a.state IN ('granted', 'waiting', 'expired') THEN a.expires ELSE ended END) END
  ) ORDER BY a.token, a.ticket)::text
  FROM fenced.attempt a
  CROSS JOIN LATERAL (SELECT a.forget - greatest(p_remember, 4 * a.ttl)) AS e (ended)
  CROSS JOIN LATERAL (SELECT a.state = 'released' AND e.ended = a.expires + a.lock_delay) AS k (kept)
  WHERE a.namespace = p_namespace AND p_name = ANY (a.names)
$$;
