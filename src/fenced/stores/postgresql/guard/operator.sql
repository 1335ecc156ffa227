-- database: The settings that all guards of a database share.
SELECT clock_timestamp(), realm, max_jump, sample, proof, fenced_guard.unrecorded(), patience FROM fenced_guard.trust

-- store: What a crash and a fail-over of this server would do to marks, as far as this role may see it.
SELECT current_setting('fsync'), current_setting('full_page_writes'), current_setting('synchronous_commit'),
  (SELECT CASE relpersistence WHEN 'u' THEN 'off' END FROM pg_catalog.pg_class WHERE oid = 'fenced_guard.mark'::regclass),
  (SELECT string_agg(pg_get_userbyid(s.setrole), ', ') FROM pg_catalog.pg_db_role_setting s
   WHERE s.setrole <> 0 AND 'synchronous_commit=off' = ANY (s.setconfig)
     AND s.setdatabase IN (0, (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()))),
  pg_has_role(current_user, 'pg_read_all_stats', 'MEMBER'), count(r.pid), string_agg(r.application_name, ', ' ORDER BY r.application_name)
    FILTER (WHERE r.sync_state IN ('async', 'potential') AND r.state IS DISTINCT FROM 'backup')
FROM pg_stat_replication r

-- guards: The guarded tables. The oid is NULL for a table that was dropped or renamed.
SELECT g.guard, g.template, g.rule, g.mandatory, g.epoch,
  fenced_guard.refusals(g.guard), g.triggers, fenced_guard.relation(g.guard)::bigint, g.claims IS NOT NULL
FROM fenced_guard.guard g ORDER BY 1

-- outboxes: Tables of messages: guards without triggers, and the columns that fenced.messages makes.
SELECT g.guard, format('%I.%I', split_part(g.guard, '.', 1), split_part(g.guard, '.', 2)) FROM fenced_guard.guard g
WHERE NOT g.mandatory AND (
  SELECT count(*) FROM pg_attribute a WHERE a.attrelid = fenced_guard.relation(g.guard)
    AND a.attname IN ('id', 'headers', 'topic', 'body') AND NOT a.attisdropped
) = 4

-- modes: The modes, the shortest pattern first.
SELECT guard, pattern, mode, since FROM fenced_guard.mode ORDER BY length(pattern), pattern

-- pending: Transactions that the last change of a guard's modes does not bind, as far as this role can see.
SELECT who FROM fenced_guard.pending({guard}) WHERE known

-- overrides: The overrides in force.
SELECT guard, pattern, until, who, why FROM fenced_guard.override WHERE until > clock_timestamp() ORDER BY until

-- counts: Decisions by kind and writer, under the pattern whose mode counts for the name now. A sum of old records has only
-- the time of its last record, and counts as recent if that time is recent.
SELECT r.guard, r.verdict, r.ruling, r.mode, sum(r.count)::bigint,
  coalesce(sum(r.count) FILTER (WHERE r.at >= greatest(m.since, clock_timestamp() - interval '{quiet} seconds')), 0)::bigint,
  max(r.at), r.who, r.application, m.pattern,
  (array_agg(host(r.address) ORDER BY r.id DESC))[1], (array_agg(r.pid ORDER BY r.id DESC))[1]
FROM fenced_guard.record r CROSS JOIN LATERAL (
  SELECT m.pattern, m.since FROM fenced_guard.mode m
  WHERE m.guard = r.guard AND coalesce(r.name, '') LIKE m.likes ORDER BY length(m.pattern) DESC, m.pattern DESC LIMIT 1
) m
GROUP BY 1, 2, 3, 4, 8, 9, 10
UNION ALL
SELECT guard, verdict, ruling, mode, count,
  CASE WHEN last >= clock_timestamp() - interval '{quiet} seconds' THEN count ELSE 0 END, last, who, application, NULL, NULL, NULL
FROM fenced_guard.tally
ORDER BY 7

-- marks: How many marks a guard's template can have, and the highest of them.
SELECT count(*), coalesce(max(token), 0) FROM fenced_guard.mark WHERE name ~ {names}

-- extent: How many marks there are, and the highest of them. Both take one walk through the table.
SELECT count(*), coalesce(max(token), 0) FROM fenced_guard.mark

-- triggers: The triggers that are missing or disabled, on the table and its partitions. A partition that was created later and
-- an inheritance child have row triggers instead.
SELECT tree.guard, n.nspname || '.' || c.relname, coalesce(t.tgname::text, e.name), t.oid IS NULL
FROM (
  SELECT g.guard, g.epoch, root.oid AS root, relation.oid AS relation
  FROM fenced_guard.guard g
  CROSS JOIN LATERAL fenced_guard.relation(g.guard) AS root (oid)
  CROSS JOIN LATERAL (SELECT root.oid UNION SELECT relid FROM pg_catalog.pg_partition_tree(root.oid)) AS relation (oid)
  WHERE g.mandatory AND root.oid IS NOT NULL
) AS tree
JOIN pg_catalog.pg_class c ON c.oid = tree.relation
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN LATERAL unnest(
  ARRAY['fenced_insert', 'fenced_update', 'fenced_delete', 'fenced_truncate']
  || CASE WHEN tree.epoch IS NOT NULL THEN ARRAY['fenced_epoch_insert', 'fenced_epoch_update'] END
) AS e (name)
LEFT JOIN LATERAL (
  SELECT t.oid, t.tgname, t.tgenabled FROM pg_catalog.pg_trigger t
  WHERE t.tgrelid = tree.relation AND t.tgfoid IN (SELECT oid FROM pg_catalog.pg_proc WHERE pronamespace = 'fenced_guard'::regnamespace)
    AND (t.tgname = e.name OR (t.tgname = replace(e.name, 'fenced_', 'fenced_row_') AND (tree.relation <> tree.root OR c.relkind = 'r')))
  ORDER BY t.tgenabled IN ('O', 'A') DESC, t.tgname = e.name DESC LIMIT 1
) AS t ON true
WHERE t.oid IS NULL OR t.tgenabled NOT IN ('O', 'A')
ORDER BY tree.guard, tree.relation <> tree.root, 2, 3

-- unseen: Writes that the triggers do not see: to tables that inherit from a guarded one (INHERITS), and of sessions in which
-- no trigger fires, because a setting or a subscription makes them replicas.
SELECT g.guard, format('table %s inherits from it, and its rows are not guarded', i.inhrelid::regclass)
FROM fenced_guard.guard g
JOIN pg_catalog.pg_inherits i ON i.inhparent = fenced_guard.relation(g.guard)
JOIN pg_catalog.pg_class c ON c.oid = i.inhparent AND c.relkind = 'r'
WHERE g.mandatory
UNION ALL
SELECT g.guard, 'a subscription writes it, and fires no trigger' FROM fenced_guard.guard g
JOIN pg_catalog.pg_subscription_rel r ON r.srrelid = fenced_guard.relation(g.guard) WHERE g.mandatory
UNION ALL
SELECT g.guard, format('%1$s %2$I has session_replication_role = replica, and fires no trigger (ALTER %1$s %2$I RESET session_replication_role)',
  CASE WHEN s.setrole = 0 THEN 'DATABASE' ELSE 'ROLE' END, CASE WHEN s.setrole = 0 THEN current_database() ELSE pg_get_userbyid(s.setrole) END)
FROM fenced_guard.guard g CROSS JOIN pg_catalog.pg_db_role_setting s
WHERE g.mandatory AND s.setdatabase IN (0, (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()))
  AND 'session_replication_role=replica' = ANY (s.setconfig)
  AND (s.setrole = 0 OR has_table_privilege(s.setrole, fenced_guard.relation(g.guard), 'INSERT, UPDATE, DELETE, TRUNCATE'))
ORDER BY 1, 2

-- bypass: The roles that can log in and disable the triggers of each table, with the strongest reason.
SELECT g.guard, r.rolname::text, CASE
  WHEN r.rolsuper THEN 'superuser'
  WHEN pg_has_role(r.oid, c.relowner, 'MEMBER') THEN 'owner of the table'
  WHEN pg_has_role(r.oid, n.nspowner, 'MEMBER') THEN 'owner of the guards'
  WHEN {may_replicate} THEN 'may set session_replication_role'
  ELSE 'may add triggers' END
FROM fenced_guard.guard g
JOIN pg_catalog.pg_class c ON c.oid = fenced_guard.relation(g.guard)
JOIN pg_catalog.pg_namespace n ON n.nspname = 'fenced_guard'
CROSS JOIN pg_catalog.pg_roles r
WHERE r.rolcanlogin AND (
  r.rolsuper OR pg_has_role(r.oid, c.relowner, 'MEMBER') OR pg_has_role(r.oid, n.nspowner, 'MEMBER') OR {may_replicate}
  OR has_table_privilege(r.oid, c.oid, 'TRIGGER')
)
ORDER BY 1, r.rolsuper DESC, 2

-- roles: The names of all roles.
SELECT rolname::text FROM pg_catalog.pg_roles

-- records: The newest lines of the audit, the newest first.
SELECT at, guard, name, stamp, token, grant_id, seq, verdict, ruling, mode, who, application, query,
  host(address), pid
FROM fenced_guard.record WHERE guard = coalesce({guard}, guard) ORDER BY id DESC LIMIT {limit}

-- history: What operators did, the newest first.
SELECT at, who, application, guard, what, detail::text
FROM fenced_guard.history WHERE guard = {guard} OR {guard} IS NULL ORDER BY id DESC LIMIT {limit}
