// A client in another language, written from docs/protocol.md alone: node client.mjs URL VECTORS
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { request } from "node:http";
import assert from "node:assert/strict";

const [url, path] = process.argv.slice(2);
const vectors = JSON.parse(readFileSync(path)).http;
let checked = 0;

function call(method, path, pairs) {
  const headers = {};
  for (const [name, value] of pairs) (headers[name] ??= []).push(value);
  return new Promise((resolve, reject) => {
    const sent = request(url + path, { method, headers }, (answer) => {
      let text = "";
      answer.on("data", (part) => (text += part));
      answer.on("end", () => resolve({ status: answer.statusCode, headers: answer.headers, body: JSON.parse(text) }));
    });
    sent.on("error", reject).end();
  });
}

function isProblem(answer, status, type, why) {
  assert.equal(answer.status, status, why);
  assert.equal(answer.headers["content-type"], "application/problem+json");
  assert.equal(answer.body.type, type, why);
  assert.equal(answer.body.status, status);
}

function stampHeaders(token, seq, grant, name) {
  const names = encodeURIComponent(name).replaceAll("%2F", "/").replace(/[!'()*]/g, (c) => "%" + c.charCodeAt(0).toString(16).toUpperCase());
  const key = createHash("sha256").update(`fenced operation:${grant}:${seq}`).digest("hex").slice(0, 32);
  return [["Fenced-Stamp", `"1:00000000000000aa:${token}:${seq}:${grant}:${names}"`], ["Idempotency-Key", `"${key}"`]];
}

for (const vector of vectors.requests) {
  const why = JSON.stringify(vector.headers);
  const answer = await call("POST", "/parsed", vector.headers);
  if (vector.status) isProblem(answer, vector.status, vector.type, why);
  else assert.deepEqual(answer.body, { stamp: vector.stamp, proof: vector.proof }, why);
  if (vector.key) {
    const [, , , seq, grant, ...names] = vector.stamp.split(":");
    assert.equal(stampHeaders(1, seq, grant, "")[1][1], vector.key, why);
    const one = names.join(":");
    if (!one.includes(",")) assert.ok(stampHeaders(10, seq, grant, decodeURIComponent(one))[0][1].endsWith(one + '"'), why);
  }
  checked += 1;
}

for (const [verdict, status, type, retry] of vectors.verdicts.rows) {
  const answer = await call("POST", `/verdict/${verdict}`, []);
  if (status === null) assert.equal(answer.status, 200);
  else isProblem(answer, status, type, verdict);
  assert.equal(answer.body.retry ?? null, retry);
  checked += 1;
}

// A holder, its successor, and the late write of the first.
const [old, young] = ["a".repeat(32), "b".repeat(32)];
const story = [
  [old, 33, 1, "admit"], [old, 33, 2, "admit"], [old, 33, 2, "replayed"], [old, 33, 1, "out_of_order"],
  [young, 34, 1, "admit"], [old, 33, 3, "stale"], [old, 34, 1, "reused"],
];
for (const [grant, token, seq, due] of story) {
  const answer = await call("POST", "/apply/orders/42", stampHeaders(token, seq, grant, "orders/42"));
  if (answer.status !== 200) assert.equal(answer.body.type, `urn:fenced:problem:${due}`);
  else assert.equal(answer.headers["fenced-replayed"] === "?1" ? "replayed" : "admit", due);
  checked += 1;
}
isProblem(await call("POST", "/apply/orders/42", []), 428, "urn:fenced:problem:missing");
console.log(checked);
