-- Values are put in as literals (see `literal`): a script of several statements is one request.

-- attempts: Several attempts by their ids.
SELECT id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, holder FROM fenced_attempt
WHERE id IN ({ids});

-- insert: A new attempt. A duplicate id means that another copy of the same request was faster.
INSERT INTO fenced_attempt (id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, holder)
VALUES ({id}, {namespace}, {state}, {names}, {ttl}, {lock_delay}, {ticket}, {token}, {expires}, {forget}, {holder});

-- replace: What changes in a known attempt when it is granted, or keeps waiting.
UPDATE fenced_attempt SET state = {state}, ticket = {ticket}, token = {token}, expires = {expires}, forget = {forget}
WHERE id = {id};

-- update: What changes when attempts are renewed or end.
UPDATE fenced_attempt SET state = {state}, expires = {expires}, forget = {forget} WHERE id IN ({ids});

-- forget: Delete an attempt. The numbers are not touched.
DELETE FROM fenced_attempt WHERE id = {id};

-- overdue: Attempts that may be deleted.
SELECT id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, holder FROM fenced_attempt
WHERE namespace = {namespace} AND forget <= {now} LIMIT {limit};

-- overdue_near: Those among the few that follow an id. Ids are random, so this samples the table.
SELECT id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, holder
FROM (SELECT * FROM fenced_attempt WHERE id > {near} ORDER BY id LIMIT {limit}) AS some
WHERE namespace = {namespace} AND forget <= {now};

-- unlocked: Which of these names nobody else has locked. They are locked now, without waiting for anybody.
SELECT name FROM fenced_name WHERE namespace = {namespace} AND name IN ({names}) FOR UPDATE SKIP LOCKED;

-- known: Which of these names have a row.
SELECT name FROM fenced_name WHERE namespace = {namespace} AND name IN ({names});

-- spent: Old numbers that nobody has locked.
SELECT id FROM fenced_number WHERE id < {before} ORDER BY id LIMIT {limit} FOR UPDATE SKIP LOCKED;

-- drop_numbers: Delete them. The newest rows stay.
DELETE FROM fenced_number WHERE id IN ({ids});

-- lock: Lock the rows of these names, in the order in which they are listed. Missing rows are created.
INSERT INTO fenced_name (namespace, name) VALUES {rows} ON DUPLICATE KEY UPDATE namespace = VALUES(namespace);

-- take: Record this attempt as the holder of the names.
UPDATE fenced_name SET attempt = {id}, held = TRUE WHERE namespace = {namespace} AND name IN ({names});

-- give: Nobody holds these names, as far as they are this attempt's.
UPDATE fenced_name SET held = FALSE WHERE namespace = {namespace} AND name IN ({names}) AND attempt = {id};

-- drop_names: Delete the rows of names whose last attempt is forgotten, and of those that nobody was ever granted.
DELETE FROM fenced_name WHERE namespace = {namespace} AND name IN ({names}) AND attempt IN ({id}, '');

-- claim: The attempt that holds a name, or held it last.
SELECT a.id, a.namespace, a.state, a.names, a.ttl, a.lock_delay, a.ticket, a.token, a.expires, a.forget, a.holder
FROM fenced_name n STRAIGHT_JOIN fenced_attempt a ON a.id = n.attempt
WHERE n.namespace = {namespace} AND n.name = {name} AND n.held;

-- enqueue: Join queues.
INSERT INTO fenced_queue (namespace, name, ticket, attempt) VALUES {rows};

-- dequeue: Leave queues.
DELETE FROM fenced_queue WHERE namespace = {namespace} AND name IN ({names}) AND ticket = {ticket};

-- before: The attempt directly ahead of a ticket.
SELECT a.id, a.namespace, a.state, a.names, a.ttl, a.lock_delay, a.ticket, a.token, a.expires, a.forget, a.holder
FROM fenced_queue q STRAIGHT_JOIN fenced_attempt a ON a.id = q.attempt
WHERE q.namespace = {namespace} AND q.name = {name} AND q.ticket < {ticket} ORDER BY q.ticket DESC LIMIT 1;

-- ahead: How many are ahead of a ticket.
SELECT count(*) FROM fenced_queue WHERE namespace = {namespace} AND name = {name} AND ticket < {ticket};

-- queue: The queue for a name, in order.
SELECT a.id, a.namespace, a.state, a.names, a.ttl, a.lock_delay, a.ticket, a.token, a.expires, a.forget, a.holder
FROM fenced_queue q STRAIGHT_JOIN fenced_attempt a ON a.id = q.attempt
WHERE q.namespace = {namespace} AND q.name = {name} ORDER BY q.ticket;

-- naming: All attempts at a name that are not forgotten, and perhaps some at names that contain its text.
SELECT id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, holder FROM fenced_attempt
WHERE namespace = {namespace} AND LOCATE({name}, names);

-- names: Names that may be held or waited for, in order.
SELECT n.name FROM fenced_name n
WHERE n.namespace = {namespace} AND n.name > {after} AND (
  n.held OR EXISTS (SELECT 1 FROM fenced_queue q WHERE q.namespace = n.namespace AND q.name = n.name))
ORDER BY n.name LIMIT {limit};

-- number: The next number. It runs after the names are locked.
INSERT INTO fenced_number () VALUES ();

-- floor: What a token is counted from, and in which history. Whoever raises the floor waits for all who have read it here.
SELECT floor, lineage, UUID_SHORT() >> 24 FROM fenced_namespace WHERE id = {namespace} LOCK IN SHARE MODE;

-- raise_floor: Count from here from now on, in this history.
UPDATE fenced_namespace SET floor = {floor}, lineage = {lineage} WHERE id = {namespace};

-- take_free: Grant a name that nobody holds or waits for, in the history that the client knows: the usual case of `ask`.
-- The name is locked, and its number was drawn just now. Nothing is granted to an attempt that has a row.
INSERT IGNORE INTO fenced_attempt (id, namespace, state, names, ttl, lock_delay, ticket, token, expires, forget, holder)
SELECT {id}, s.id, 'granted', {names}, {ttl}, {lock_delay}, 0, s.floor + LAST_INSERT_ID(), c.now + {ttl},
  c.now + {over}, {holder}
FROM (SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) * 1000 AS now) c
STRAIGHT_JOIN fenced_namespace s STRAIGHT_JOIN fenced_name n ON n.namespace = s.id
WHERE s.id = {namespace} AND s.floor = {floor} AND s.lineage = {lineage} AND UUID_SHORT() >> 24 = {start}
AND s.floor + LAST_INSERT_ID() <= {token_max} AND n.name = {name} AND NOT n.held
AND NOT EXISTS (SELECT 1 FROM fenced_queue q WHERE q.namespace = {namespace} AND q.name = {name})
LOCK IN SHARE MODE;

-- taken: The name is its own, if the statement before has granted it.
UPDATE fenced_name SET attempt = {id}, held = TRUE WHERE namespace = {namespace} AND name = {name} AND ROW_COUNT() = 1;

-- end_held: Release a lease that has not expired: the usual case of `release`. Its names are locked.
UPDATE fenced_attempt SET state = 'released',
  forget = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) * 1000 + GREATEST({remember}, 4 * ttl)
WHERE id = {id} AND namespace = {namespace} AND state = 'granted'
AND expires > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) * 1000;

-- given: Nobody holds its names, if the statement before has released it.
UPDATE fenced_name SET held = FALSE
WHERE namespace = {namespace} AND name IN ({names}) AND attempt = {id} AND ROW_COUNT() = 1;

-- clock: The server's clock in microseconds since 1970, at the start of this statement, whatever time zone the session has.
SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6));

-- ready: Which of these waiting attempts could be granted now.
SELECT a.id FROM fenced_attempt a WHERE a.id IN ({ids}) AND a.state = 'waiting'
AND NOT EXISTS (
  SELECT 1 FROM fenced_queue q
  STRAIGHT_JOIN fenced_name n ON n.namespace = q.namespace AND n.name = q.name AND n.held
  STRAIGHT_JOIN fenced_attempt c ON c.id = n.attempt
  WHERE q.attempt = a.id
  AND c.expires + c.lock_delay > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) * 1000)
AND NOT EXISTS (
  SELECT 1 FROM fenced_queue q
  STRAIGHT_JOIN fenced_queue b ON b.namespace = q.namespace AND b.name = q.name AND b.ticket < q.ticket
  STRAIGHT_JOIN fenced_attempt w ON w.id = b.attempt
  WHERE q.attempt = a.id AND w.expires > TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) * 1000);

-- version: The version of the tables.
SELECT version, readable_by, made_by FROM fenced_schema;

-- store_version: Tables that were made just now are complete.
INSERT IGNORE INTO fenced_schema (version, readable_by, made_by) VALUES ({version}, {readable_by}, {made_by});

-- new_namespace: A new namespace, unless another client has made it meanwhile.
INSERT IGNORE INTO fenced_namespace (name, realm, lineage) VALUES ({name}, {realm}, {lineage});

-- namespace: A namespace by its name, and the last number.
SELECT n.id, n.realm, n.floor, n.lineage, (SELECT COALESCE(MAX(id), 0) FROM fenced_number) FROM fenced_namespace n
WHERE n.name = {name};

-- made: When the table of numbers was made: by another time it is another table, from a dump or a copy of the files.
SELECT UNIX_TIMESTAMP(create_time) FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name = 'fenced_number';
