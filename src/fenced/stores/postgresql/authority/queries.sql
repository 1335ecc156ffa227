-- settings: The process that replies, and the settings that a lease's guarantee depends on. If it is the process that we
-- connected to ($1), there is no pooler: have it check that we are still connected, so that it ends abandoned statements.
SELECT pg_backend_pid(), current_setting('server_encoding'), current_setting('default_transaction_isolation'),
  current_setting('client_min_messages'), current_setting('fsync'), current_setting('full_page_writes'), pg_is_in_recovery(),
  CASE WHEN pg_backend_pid() = $1 AND current_setting('client_connection_check_interval', true) = '0'
    AND version() LIKE '%linux%' THEN set_config('client_connection_check_interval', '250ms', false) END;

-- installed: Whether our schema exists, and whether it stores its version.
SELECT to_regprocedure('fenced.version()') IS NOT NULL, to_regprocedure('fenced.installed()') IS NOT NULL;

-- version: The schema's versions, the fenced that installed it, and a digest of its functions.
SELECT * FROM fenced.installed();

-- enter: A namespace by its name.
SELECT *, extract(epoch FROM clock_timestamp()) FROM fenced.enter($1, $2, $3);

-- ask: Grant, queue or refuse.
SELECT fenced.ask($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12);

-- release: Release a lease, or leave the queue.
SELECT fenced.release($1, $2, $3, $4, $5);

-- renew: Extend leases and queue entries, all in one statement.
SELECT * FROM fenced.renew($1, $2, $3, $4, $5);

-- ready: Which waiters could be granted.
SELECT fenced.ready($1, $2);

-- release_later: Release a lease, and keep its names taken for a while.
SELECT fenced.release_later($1, $2, $3, $4, $5);

-- force_release: Take a name from the holder that has this token.
SELECT fenced.force_release($1, $2, $3, $4);

-- raise_floor: Every later token is above this.
SELECT fenced.raise_floor($1, $2);

-- tidy: Delete old attempts, one page at a time.
SELECT * FROM fenced.tidy($1, $2);

-- survey: Names that are held, delayed or waited for.
SELECT fenced.survey($1, $2, $3);

-- look: One name.
SELECT fenced.look($1, $2);

-- past: Attempts at a name that are not forgotten.
SELECT fenced.past($1, $2, $3, $4);
