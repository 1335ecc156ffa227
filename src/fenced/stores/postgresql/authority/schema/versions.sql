-- The versions, for every role.

-- The oldest version that a client must know. Clients of 0.1 ask only for this.
CREATE OR REPLACE FUNCTION fenced.version() RETURNS integer
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT readable_by FROM fenced.schema
$$;

CREATE OR REPLACE FUNCTION fenced.installed(OUT version integer, OUT readable_by integer, OUT release text, OUT functions text)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT version, readable_by, release, functions FROM fenced.schema
$$;
