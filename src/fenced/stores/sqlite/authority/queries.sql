-- attempt: One attempt by its public id.
SELECT id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, wake, holder FROM attempt
WHERE id = ?;

-- attempts: Several, by a JSON array of their ids.
SELECT id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, wake, holder FROM attempt
WHERE id IN (SELECT value FROM json_each(?));

-- put: Insert an attempt, or replace its row.
INSERT INTO attempt (id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, wake, holder)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
  state = excluded.state, token = excluded.token, ticket = excluded.ticket,
  expires = excluded.expires, forget = excluded.forget, wake = excluded.wake;

-- update: What changes when an attempt is renewed or ends.
UPDATE attempt SET state = ?, expires = ?, forget = ? WHERE id = ?;

-- update_all: The same for several, by a JSON array of their ids.
UPDATE attempt SET state = ?, expires = ?, forget = ? WHERE id IN (SELECT value FROM json_each(?));

-- forget: Delete an attempt. The counter is not touched.
DELETE FROM attempt WHERE id = ?;

-- overdue: All attempts that may be deleted.
SELECT id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, wake, holder FROM attempt
WHERE forget <= ?;

-- overdue_near: Those among the few that follow an id. Ids are random, so this samples the table.
SELECT id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, wake, holder
FROM (SELECT * FROM attempt WHERE id > ? ORDER BY id LIMIT ?) WHERE forget <= ?;

-- claim: The attempt that holds a name, or held it last.
SELECT a.id, a.namespace, a.state, a.names, a.ttl, a.lock_delay, a.ticket, a.token, a.expires, a.forget, a.wake, a.holder
FROM claim c JOIN attempt a ON a.id = c.attempt
WHERE c.namespace = ? AND c.name = ?;

-- naming: All attempts at a name that are not forgotten.
SELECT id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, wake, holder FROM attempt
WHERE namespace = ? AND EXISTS (SELECT 1 FROM json_each(names) WHERE value = ?);

-- take: Record this attempt as the holder of a name.
INSERT INTO claim (namespace, name, attempt) VALUES (?, ?, ?)
ON CONFLICT (namespace, name) DO UPDATE SET attempt = excluded.attempt;

-- free: Delete the claim on a name, if it is this attempt's.
DELETE FROM claim WHERE namespace = ? AND name = ? AND attempt = ?;

-- enqueue: Join the queue for a name.
INSERT INTO queue (namespace, name, ticket, attempt) VALUES (?, ?, ?, ?);

-- dequeue: Leave the queue.
DELETE FROM queue WHERE namespace = ? AND name = ? AND ticket = ?;

-- before: The attempt directly ahead of a ticket.
SELECT a.id, a.namespace, a.state, a.names, a.ttl, a.lock_delay, a.ticket, a.token, a.expires, a.forget, a.wake, a.holder
FROM queue q JOIN attempt a ON a.id = q.attempt
WHERE q.namespace = ? AND q.name = ? AND q.ticket < ?
ORDER BY q.ticket DESC LIMIT 1;

-- ahead: How many are ahead of a ticket.
SELECT count(*) FROM queue WHERE namespace = ? AND name = ? AND ticket < ?;

-- head: The first in the queue for a name that has not expired.
SELECT a.id, a.namespace, a.state, a.names, a.ttl, a.lock_delay, a.ticket, a.token, a.expires, a.forget, a.wake, a.holder
FROM queue q JOIN attempt a ON a.id = q.attempt
WHERE q.namespace = ? AND q.name = ? AND a.expires > ?
ORDER BY q.ticket LIMIT 1;

-- queue: The queue for a name, in order.
SELECT a.id, a.namespace, a.state, a.names, a.ttl, a.lock_delay, a.ticket, a.token, a.expires, a.forget, a.wake, a.holder
FROM queue q JOIN attempt a ON a.id = q.attempt
WHERE q.namespace = ? AND q.name = ?
ORDER BY q.ticket;

-- mint: The next token. Runs after the names are locked.
UPDATE namespace SET token = token + 1 WHERE id = ? AND token < 9007199254740991 RETURNING token;

-- next_ticket: The next place in the queues.
UPDATE namespace SET ticket = ticket + 1 WHERE id = ? RETURNING ticket;

-- raise_floor: Every later token is above this.
UPDATE namespace SET token = max(token, ?) WHERE id = ? RETURNING token;

-- names: Names that are held or waited for, in order.
SELECT name FROM (
  SELECT name FROM claim WHERE namespace = :namespace AND name > :after
  UNION SELECT name FROM queue WHERE namespace = :namespace AND name > :after
) ORDER BY name LIMIT :limit;

-- namespace: A namespace by its name.
SELECT id, realm, token FROM namespace WHERE name = ?;

-- new_namespace: A new stream of tokens, with a new realm.
INSERT INTO namespace (name, realm) VALUES (?, lower(hex(randomblob(8))));

-- boot: Which boot the times belong to.
SELECT boot FROM machine WHERE id = 1;

-- new_boot: The machine was restarted: no holder and no waiter is alive, and the clock started again.
UPDATE attempt SET
  state = CASE WHEN state IN ('granted', 'waiting') THEN 'expired' ELSE state END, expires = 0, lock_delay = 0, forget = ?;
