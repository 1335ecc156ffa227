-- The versions. Every role may call these functions.

-- The oldest version that a client must know. Clients of 0.1 call only this function.
CREATE OR REPLACE FUNCTION fenced_guard.version() RETURNS integer
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT readable_by FROM fenced_guard.schema
$$;

CREATE OR REPLACE FUNCTION fenced_guard.installed(OUT version integer, OUT readable_by integer, OUT release text, OUT functions text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT version, readable_by, release, functions FROM fenced_guard.schema
$$;
