-- Tables of the PostgreSQL guard, from version 2 to 3. Clients of the versions before can use it: it only adds.

-- Where a write came from. The defaults are set separately, so that older records get no address and no process.
ALTER TABLE fenced_guard.record
  ADD COLUMN address inet,                           -- of the client; NULL for a Unix socket. Behind a pooler: the pooler's
  ADD COLUMN pid integer;                            -- the server process, as in the server's log
ALTER TABLE fenced_guard.record
  ALTER COLUMN address SET DEFAULT inet_client_addr(),
  ALTER COLUMN pid SET DEFAULT pg_backend_pid();
