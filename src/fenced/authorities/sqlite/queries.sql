-- attempt: One attempt by its public id.
SELECT namespace, state, names, ttl, lock_delay, ticket, token, expires FROM attempt WHERE id = ?;

-- claim: Who holds a name, or held it last: the attempt, its state, when it ends and its delay.
SELECT a.id, a.state, a.expires, a.lock_delay, a.token, a.holder, a.names, a.ttl
FROM claim c JOIN attempt a ON a.id = c.attempt
WHERE c.namespace = ? AND c.name = ?;

-- head: The first in the queue for a name.
SELECT q.attempt, a.expires, a.wake
FROM queue q JOIN attempt a ON a.id = q.attempt
WHERE q.namespace = ? AND q.name = ?
ORDER BY q.ticket LIMIT 1;

-- before: The one directly ahead of a ticket.
SELECT q.attempt, a.expires
FROM queue q JOIN attempt a ON a.id = q.attempt
WHERE q.namespace = ? AND q.name = ? AND q.ticket < ?
ORDER BY q.ticket DESC LIMIT 1;

-- ahead: How many stand ahead of a ticket.
SELECT count(*) FROM queue WHERE namespace = ? AND name = ? AND ticket < ?;

-- mint: The next token. Runs after the names are locked.
UPDATE namespace SET token = token + 1 WHERE id = ? AND token < 9007199254740991 RETURNING token;

-- next_ticket: The next place in the queues.
UPDATE namespace SET ticket = ticket + 1 WHERE id = ? RETURNING ticket;

-- put_attempt: A new attempt, or its new state.
INSERT INTO attempt (id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, wake, holder)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
  state = excluded.state, token = excluded.token, ticket = excluded.ticket,
  expires = excluded.expires, forget = excluded.forget, wake = excluded.wake;

-- put_claim: The name is held by this attempt now.
INSERT INTO claim (namespace, name, attempt) VALUES (?, ?, ?)
ON CONFLICT (namespace, name) DO UPDATE SET attempt = excluded.attempt;

-- drop_claim: The name is free, if it was this attempt's.
DELETE FROM claim WHERE namespace = ? AND name = ? AND attempt = ?;

-- enqueue: A place in the queue.
INSERT INTO queue (namespace, name, ticket, attempt) VALUES (?, ?, ?, ?);

-- dequeue: Leave the queue.
DELETE FROM queue WHERE namespace = ? AND name = ? AND ticket = ?;

-- end_attempt: How it ended, and how long that is remembered: not shorter than its delay after an expiry.
UPDATE attempt SET
  state = ?,
  forget = CASE ? WHEN 'expired' THEN max(?, expires + lock_delay) ELSE ? END + ?
WHERE id = ?;

-- extend: Renew all live leases and places of a batch.
UPDATE attempt SET
  expires = :now + CASE state WHEN 'granted' THEN ttl ELSE min(ttl, :waiter_ttl) END,
  forget = :now + ttl + lock_delay + max(:remember, 4 * ttl)
WHERE id IN (SELECT value FROM json_each(:ids)) AND state IN ('granted', 'waiting') AND expires > :now;

-- batch: What has become of the attempts of a batch.
SELECT id, namespace, state, names, ticket, expires FROM attempt
WHERE id IN (SELECT value FROM json_each(:ids));

-- overdue: All attempts that can be forgotten.
SELECT id, namespace, state, names, ticket FROM attempt WHERE forget <= ?;

-- overdue_near: Those among the few that follow an id. Ids are random, so this samples the table.
SELECT id, namespace, state, names, ticket
FROM (SELECT * FROM attempt WHERE id > ? ORDER BY id LIMIT ?) WHERE forget <= ?;

-- forget: Drop an attempt. The counter is not touched.
DELETE FROM attempt WHERE id = ?;

-- raise_floor: Every later token is above this.
UPDATE namespace SET token = max(token, ?) WHERE id = ? RETURNING token;

-- names: Names that are held or waited for, in order.
SELECT name FROM (
  SELECT name FROM claim WHERE namespace = :namespace AND name > :after
  UNION SELECT name FROM queue WHERE namespace = :namespace AND name > :after
) ORDER BY name LIMIT :limit;

-- waiters: Who waits for a name, in order.
SELECT a.holder, a.names, a.expires FROM queue q JOIN attempt a ON a.id = q.attempt
WHERE q.namespace = ? AND q.name = ? ORDER BY q.ticket;

-- namespace: A namespace by its name.
SELECT id, realm, token FROM namespace WHERE name = ?;

-- new_namespace: A new stream of tokens, with a realm of its own.
INSERT INTO namespace (name, realm) VALUES (?, lower(hex(randomblob(8))));

-- boot: Which boot the times belong to.
SELECT boot FROM machine WHERE id = 1;

-- new_boot: The machine was restarted: no holder and no waiter of before lives, and its clock began anew.
UPDATE attempt SET
  state = CASE WHEN state IN ('granted', 'waiting') THEN 'expired' ELSE state END, expires = 0, lock_delay = 0, forget = ?;
