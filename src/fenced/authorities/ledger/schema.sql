-- The journal of a ledger: one row for each batch of changes since the snapshot.
CREATE TABLE journal (
  number INTEGER PRIMARY KEY,  -- given by the ledger: SQLite would begin at 1 again once the table is empty
  now INTEGER NOT NULL,        -- nanoseconds on the ledger's clock
  changes TEXT NOT NULL
) STRICT;
CREATE TABLE ledger (
  id INTEGER PRIMARY KEY CHECK (id = 1),
  boot TEXT NOT NULL,          -- the kernel's id of the boot in which the ledger was opened last
  ahead INTEGER NOT NULL,      -- what is added to the clock of that boot
  trimmed INTEGER NOT NULL     -- batches up to this one were deleted: a snapshot has them
) STRICT;
