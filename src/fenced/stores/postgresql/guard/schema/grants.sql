-- Every role may call these functions; all others are for the owner, whose rights triggers have. They find out themselves whether
-- the caller is a writer (`may_write`): a GRANT would have to be repeated for each role that is given a table later.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA fenced_guard FROM PUBLIC;
GRANT USAGE ON SCHEMA fenced_guard TO PUBLIC;
GRANT EXECUTE ON FUNCTION fenced_guard.version(), fenced_guard.installed(),
  fenced_guard.announce(text, bigint, text, text, boolean, boolean, text, boolean),
  fenced_guard.announce_alone(text, text, text, text), fenced_guard.expect_rule(text, text),
  fenced_guard.still_stamped(), fenced_guard.peek(text), fenced_guard.report(text),
  fenced_guard.in_the_way(text, text, bigint), fenced_guard.make_way(text, text, bigint, text),
  fenced_guard.announce_claim(text, text, text, bigint, bigint), fenced_guard.over_workers(text, uuid[]),
  fenced_guard.begin_work(text, text), fenced_guard.check_worker(text),
  fenced_guard.idle_until(text, double precision) TO PUBLIC;

-- The monitors also get what this version has added. Only `let_read` lets a role call `refusals`.
DO $fenced$ BEGIN
  PERFORM fenced_guard.let_read(pg_get_userbyid(grantee)) FROM pg_proc p, aclexplode(p.proacl)
  WHERE p.oid = 'fenced_guard.refusals(text)'::regprocedure AND grantee <> p.proowner;
END $fenced$;
