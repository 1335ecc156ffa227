-- Tables of the PostgreSQL authority, from version 1 to 2. Clients of version 1 can use it: it only adds, except for force_release.

-- Which version the tables have, and by which clients they can be read, in one row.
CREATE TABLE fenced.schema (
  one         boolean PRIMARY KEY DEFAULT true CHECK (one),
  version     integer NOT NULL,          -- the last migration that ran
  readable_by integer NOT NULL,          -- the oldest version that a client must know
  release     text NOT NULL,             -- the fenced that replaced the functions last
  functions   text NOT NULL              -- a digest of their text
);
INSERT INTO fenced.schema (version, readable_by, release, functions) VALUES (1, 1, '0.1', '');

-- It took a name from whoever held it. An operator's client of version 1 fails now; no other function calls it.
DROP FUNCTION IF EXISTS fenced.force_release(integer, text, interval);
