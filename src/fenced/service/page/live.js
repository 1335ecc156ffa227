// The live page: its stream, its table, its feed, and what an operator can do.

import { drawLanes, lanesOf, lanesOfDrill } from "./lanes.js";
import { count, drawHot, drawHour, drawNotices, drawUnstamped, lookAway, lookBack, notices } from "./watch.js";
import { clock, element, explain, isLate, label, number, plural, put, sentence, sign, span, time, where, who } from "./words.js";

const ROWS_MAX = 1000;
const FEED_MAX = 200;
const SAMPLES_MAX = 60;
const LONG_SECONDS = 600;
const LATELY_SECONDS = 300;
const LATELY_MAX = 12;
const SILENCE_MS = 6000;
const RETRY_MS = 1500;
const GLANCE_EVERY_MS = 30_000, GLANCE_MS = 3000; // how often, and for how long, a hidden tab looks for refusals
const HIDDEN = "paused while the tab is hidden";
const NEW_SECONDS = 60; // an older refusal is history, and not announced

const $ = (id) => document.getElementById(id);
const namespace = document.body.dataset.namespace;
const place = (path) => `${path}?namespace=${encodeURIComponent(namespace)}`;
const now = () => performance.now() / 1000;

const names = new Map(); // name → { view, ends, seen, row, parts }
let events = [];
let samples = [];
let chosen = nameInAddress();
let mayOperate = false;
let paused = false;
let missed = 0;
let lastToken = 0;
let guards = [], alerts = [], realm = "";
let problem = "", problemSince = 0; // what the store or the connection lacks
let more = false; // there are more names than the service looks at

function nameInAddress() {
  try {
    return decodeURIComponent(location.hash.slice(1));
  } catch {
    return "";
  }
}

// The stream.

let source = null;
let arriving = []; // names that come before their state
let lastMessage = 0;
let retry = 0;

function connect() {
  source?.close();
  clearTimeout(retry);
  lastMessage = performance.now();
  arriving = [];
  source = new EventSource(place("v1/events"));
  const on = (kind, take) => source.addEventListener(kind, (message) => { lastMessage = performance.now(); take(JSON.parse(message.data)); });
  on("names", (views) => arriving.push(...views));
  on("state", (state) => { onState(state, [...arriving, ...state.names]); arriving = []; });
  on("change", onChange);
  source.onerror = lost;
}

function lost() {
  source?.close();
  source = null;
  if (document.hidden) return;
  setProblem("This instance does not answer");
  showLive("off", "connection lost, retrying");
  clearTimeout(retry);
  retry = setTimeout(reconnect, RETRY_MS);
}

async function reconnect() {
  const answer = await fetch(place("v1/events"), { method: "HEAD" }).catch(() => null);
  if (document.hidden) return;
  if ([401, 403, 404].includes(answer?.status)) location.reload(); // the token is no longer known: the page asks again
  else if (answer?.ok) connect();
  else lost();
}

function showLive(kind, words) {
  $("live").className = `live ${kind}`;
  put($("live"), words);
}

// Six streams are all that a browser opens to one address: a tab that nobody sees gives its own back.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return hide();
  clearTimeout(glance);
  lookBack();
  connect();
});

let glance = 0;

// It comes back for a moment now and then, so that its title counts the refusals.
function hide() {
  lookAway(events);
  rest();
}

function rest() {
  source?.close();
  source = null;
  clearTimeout(retry);
  showLive("", HIDDEN);
  glance = setTimeout(() => {
    connect();
    glance = setTimeout(rest, GLANCE_MS);
  }, GLANCE_EVERY_MS);
}

function setProblem(found) {
  if (found && !problem) problemSince = time.now();
  problem = found;
  drawNotices($("notices"), notices({
    problem, since: problemSince, alerts, guards, events, realm, lastToken, views: [...names.values()].map((each) => each.view),
  }));
}

function onState(state, views) {
  const present = new Set(views.map((view) => view.name));
  for (const name of [...names.keys()]) if (!present.has(name)) names.delete(name);
  for (const view of views) keep(view);
  events = state.events;
  count(events);
  $("feed").replaceChildren(); // another instance counts its events from 1 again
  time.skew = state.now - Date.now() / 1000;
  samples = state.samples.slice(-SAMPLES_MAX);
  mayOperate = state.may_operate;
  put($("store"), state.store);
  put($("guarantee"), state.guarantee === "strict" ? "✓ strict" : "⚠ best effort");
  $("guarantee").className = state.guarantee === "strict" ? "chip" : "chip doubt";
  $("guarantee").title = state.doubts.join("; ");
  showToken(state.last_token);
  put($("version"), `fenced ${state.version}, realm ${state.realm}`);
  for (const id of ["numbers", "search", "filters", "sorting", "feed-section", "drill"]) $(id).hidden = false;
  showLive("on", "live");
  more = state.more;
  missed = 0;
  drawNamespaces(state.namespaces);
  alerts = state.alerts;
  realm = state.realm;
  drawGuards(state.guards);
  setProblem("");
  drawHour($("hour-section"), state.hour);
  drawHot($("hot-section"), state.hot, choose);
  drawNumbers();
  drawRows();
  drawLately();
  drawFeed();
  drawDetail();
}

function drawNamespaces(all) {
  const list = $("namespaces");
  if ([...list.children].map((item) => item.textContent).join("\n") !== all.join("\n")) {
    list.replaceChildren(...all.map((each) => element("li", {},
      element("a", { href: `?namespace=${encodeURIComponent(each)}`, "aria-current": each === namespace && "page" }, each))));
  }
}

function showToken(token) {
  lastToken = token;
  put($("last-token"), number.format(token));
}

function onChange(change) {
  const gone = change.gone ?? [], changed = change.names ?? [], happened = change.events ?? [];
  for (const name of gone) names.delete(name);
  for (const view of changed) keep(view);
  if (change.problem) {
    showLive("off", "the store does not answer");
    setProblem(`The store does not answer: ${change.problem}`);
  } else if (change.sample) {
    showLive("on", "live");
    setProblem("");
  }
  if (change.sample) {
    samples = [...samples, change.sample].slice(-SAMPLES_MAX);
    more = change.more ?? false;
    drawNumbers();
  }
  if (change.last_token) showToken(Math.max(lastToken, change.last_token));
  if (change.namespaces) drawNamespaces(change.namespaces);
  if (change.guards) drawGuards(change.guards);
  if (change.hour) drawHour($("hour-section"), change.hour);
  if (change.alerts) {
    alerts = change.alerts;
    setProblem(problem);
  }
  if (change.hot) drawHot($("hot-section"), change.hot, choose);
  if (changed.length || gone.length) drawRowsSoon();
  if (happened.length) {
    events = newest([...events, ...happened]);
    count(happened);
    say(happened.filter((event) => event.kind === "refused" && time.now() - event.at < NEW_SECONDS));
    if (paused) missed += happened.length;
    drawFeed();
  }
  if (happened.some((event) => event.names?.includes(chosen)) || [...gone, ...changed.map((view) => view.name)].includes(chosen)) drawDetail();
}

// However many grants come, refusals and losses stay.
function newest(all) {
  const notable = (event) => KINDS[event.kind] !== "granted";
  return [...all.filter(notable).slice(-500), ...all.filter((event) => !notable(event)).slice(-500)];
}

function say(refusals) {
  if (!refusals.length || paused) return;
  const [newest] = refusals.slice(-1);
  const many = refusals.length > 1 ? `${refusals.length} refusals, the last one: ` : "";
  put($("said"), many + sentence(newest).join(" "));
}

// The numbers.

function drawNumbers() {
  const last = samples.at(-1) ?? { held: 0, waiting: 0, granted: 0, refused: 0, lost: 0 };
  const rate = samples.map((sample, index) => (index ? Math.max(0, sample.granted - samples[index - 1].granted) : 0));
  const recent = rate.slice(-5);
  const perSecond = recent.reduce((sum, each) => sum + each, 0) / Math.max(1, recent.length);
  const shown = [
    ["held", number.format(last.held), samples.map((sample) => sample.held)],
    ["waiting", number.format(last.waiting), samples.map((sample) => sample.waiting)],
    ["grants/s", perSecond < 10 ? perSecond.toFixed(1) : number.format(Math.round(perSecond)), rate],
    ["refused", number.format(last.refused), samples.map((sample) => sample.refused)],
    ["lost while held", number.format(last.lost), samples.map((sample) => sample.lost)],
  ];
  if (!$("numbers").childElementCount) {
    $("numbers").append(...shown.map(([title]) => element("div", { class: "number" }, element("p", {}, title), element("b"),
      element("svg:svg", { viewBox: `0 0 ${SAMPLES_MAX - 1} 30`, preserveAspectRatio: "none", "aria-hidden": "true" }, element("svg:path", { class: "under" }), element("svg:path")))));
  }
  shown.forEach(([, text, series], index) => {
    const [, value, picture] = $("numbers").children[index].children;
    put(value, text);
    const high = Math.max(...series, 1), first = SAMPLES_MAX - series.length;
    const points = series.map((each, at) => `${first + at},${(28 - (26 * each) / high).toFixed(1)}`);
    picture.children[0].setAttribute("d", `M${first},30 L${points.join(" L")} L${SAMPLES_MAX - 1},30 Z`);
    picture.children[1].setAttribute("d", `M0,28 H${first} L${points.join(" L")}`);
  });
}

// The names.

const visible = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const known = names.get(entry.target.dataset.name);
    if (known) known.seen = entry.isIntersecting;
    if (known && entry.isIntersecting) drawLeft(known);
  }
}, { rootMargin: "200px" });

function keep(view) {
  const known = names.get(view.name) ?? { seen: true };
  const rose = known.view?.held_by && view.held_by && view.held_by.token > known.view.held_by.token;
  known.view = view;
  known.ends = now() + (view.held_by ? view.held_by.remaining : view.free_in);
  names.set(view.name, known);
  if (known.row) drawRow(known);
  if (known.row && rose) {
    known.row.classList.remove("rose");
    void known.row.offsetWidth; // begins the animation again
    known.row.classList.add("rose");
  }
}

function matches({ view, ends }) {
  const words = $("search").value.trim().toLowerCase();
  if (words) {
    const holders = [view.held_by?.holder, ...view.waiters].filter(Boolean).map((holder) => `${holder.label} ${holder.host} ${holder.pid}`);
    if (![view.name, ...holders].join(" ").toLowerCase().includes(words)) return false;
  }
  const filter = document.querySelector("#filters input:checked").value;
  if (filter === "waited") return view.waiting > 0;
  if (filter === "long") return view.since !== null && time.now() - view.since > LONG_SECONDS;
  return filter !== "late" || isLate(view, ends - now());
}

// What comes first has the highest number, or the first text. Where two are equal, or not known, names decide.
const ORDERS = {
  name: () => 0,
  holder: (view) => (view.held_by ? label(view.held_by.holder) : "\uffff"),
  token: (view) => -(view.held_by?.token ?? 0),
  held: (view) => view.since ?? Infinity,
  queue: (view) => -view.waiting,
  oldest: (view) => view.waiting_since ?? Infinity,
};
const FILTERS_ORDERS = { all: "name", waited: "queue", long: "held" };
const compare = (one, two) => (one < two ? -1 : one > two ? 1 : 0);

function drawRows() {
  const body = $("rows");
  const by = ORDERS[$("order").value];
  const found = [...names.values()].filter(matches).sort((one, two) => compare(by(one.view), by(two.view)) || compare(one.view.name, two.view.name));
  if (!body.firstElementChild?.dataset.name) body.replaceChildren();
  const shown = new Set();
  found.slice(0, ROWS_MAX).forEach((known, index) => {
    if (!known.row) makeRow(known);
    shown.add(known.row);
    if (body.children[index] !== known.row) body.insertBefore(known.row, body.children[index] ?? null);
  });
  while (body.children.length > shown.size) body.lastElementChild.remove();
  const total = names.size;
  put($("count"), !total ? "Nobody holds a lease, and nobody waits for one."
    : !found.length ? `None of ${plural(total, "name")} matches.`
    : found.length > ROWS_MAX ? `${number.format(ROWS_MAX)} of ${plural(found.length, "name")}: search to see others.`
    : `${plural(found.length, "name")}${found.length < total ? ` of ${number.format(total)}` : ""}${more ? ", and more that are not looked at" : ""}`);
}

// Names that are free by now have no row; their history is worth a look all the same.
function drawLately() {
  const since = time.now() - LATELY_SECONDS, words = $("search").value.trim().toLowerCase();
  const found = ({ names: own = [], holder }) => [...own, holder?.label, holder?.host, holder?.pid].join(" ").toLowerCase().includes(words);
  const used = events.filter((event) => event.at > since && found(event)).sort((one, two) => two.at - one.at).flatMap((event) => event.names ?? []);
  const free = [...new Set(used)].filter((name) => !names.has(name)).slice(0, LATELY_MAX);
  const box = $("lately");
  box.hidden = !free.length;
  if (box.dataset.names === JSON.stringify(free) || box.contains(document.activeElement)) return; // somebody is choosing
  box.dataset.names = JSON.stringify(free);
  box.replaceChildren("Used lately, and free now: ", ...free.flatMap((name) => [element("button", { type: "button", onclick: () => choose(name) }, name), " "]));
}

// Many names come in many changes: one drawing for all that came before a frame.
let rowsDue = 0;
function drawRowsSoon() {
  cancelAnimationFrame(rowsDue);
  rowsDue = requestAnimationFrame(drawRows);
}

function makeRow(known) {
  const name = known.view.name;
  const parts = { button: element("button", { type: "button" }, name), meter: element("i"), left: element("span") };
  for (const kind of ["name", "holder", "token", "since", "left", "line"]) parts[`${kind}Cell`] = element("td", { role: "cell", class: kind });
  parts.nameCell.append(parts.button);
  parts.holder = element("span");
  parts.host = element("small");
  parts.holderCell.append(parts.holder, parts.host);
  parts.leftCell.append(parts.left, element("span", { class: "meter", "aria-hidden": "true" }, parts.meter));
  parts.line = element("span");
  parts.first = element("small");
  parts.oldest = element("small");
  parts.lineCell.append(parts.line, parts.oldest, parts.first);
  known.parts = parts;
  known.row = element("tr", { role: "row", "data-name": name, onclick: () => choose(name) },
    parts.nameCell, parts.holderCell, parts.tokenCell, parts.sinceCell, parts.leftCell, parts.lineCell);
  visible.observe(known.row);
  drawRow(known);
}

function drawRow(known) {
  const { view, parts, row } = known;
  const held = view.held_by;
  put(parts.holder, held ? label(held.holder) : "nobody");
  put(parts.host, held ? where(held.holder) : "");
  put(parts.tokenCell, held ? number.format(held.token) : "");
  put(parts.line, view.waiting ? `${number.format(view.waiting)} waiting` : "");
  put(parts.first, view.waiters.slice(0, 2).map(label).join(", ") + (view.waiting > 2 ? " …" : ""));
  row.classList.toggle("chosen", view.name === chosen);
  parts.button.setAttribute("aria-current", view.name === chosen);
  if (known.seen) drawLeft(known);
}

function drawLeft({ view, ends, parts, row }) {
  const left = Math.max(0, ends - now());
  const late = isLate(view, left);
  row.classList.toggle("late", late);
  put(parts.left, !view.held_by ? (left > 0 ? `free in ${span(left)}` : "free") : late ? `⚠ ${span(left)}, not renewed` : span(left));
  put(parts.sinceCell, view.held_by && view.since ? span(time.now() - view.since) : "");
  parts.sinceCell.title = view.held_by && view.since ? `since ${new Date(view.since * 1000).toLocaleString()}` : "";
  put(parts.oldest, view.waiting && view.waiting_since ? `oldest for ${span(time.now() - view.waiting_since)}` : "");
  parts.meter.style.transform = `scaleX(${view.held_by && view.ttl ? Math.min(1, left / view.ttl) : 0})`;
}

// What happens.

const KINDS = { refused: "refused", lost: "lost", taken: "lost", granted: "granted", released: "granted", ended: "granted" };

function drawFeed() {
  put($("pause"), paused ? `Continue${missed ? ` (${missed} new)` : ""}` : "Pause");
  if (paused) return;
  const wanted = new Set([...document.querySelectorAll("#kinds input:checked")].map((box) => box.value));
  const shown = events.filter((event) => wanted.has(KINDS[event.kind])).sort((one, two) => two.at - one.at || two.number - one.number).slice(0, FEED_MAX);
  const list = $("feed");
  const old = new Map([...list.children].map((item) => [Number(item.dataset.number), item]));
  list.replaceChildren(...shown.map((event) => old.get(event.number) ?? feedItem(event)));
  if (!shown.length) list.append(element("li", { class: "nothing soft" }, "Nothing of that yet."));
}

function feedItem(event) {
  const [what, name, rest] = sentence(event);
  const first = event.names?.[0];
  return element("li", { class: event.kind, "data-number": event.number },
    element("time", { datetime: new Date(event.at * 1000).toISOString() }, clock.format(event.at * 1000)),
    element("span", {}, element("strong", {}, sign(event.kind), what), " ", first ? element("button", { type: "button", onclick: () => choose(first) }, name) : name,
      element("small", {}, rest), event.guard ? element("small", {}, `${event.guard}${event.mode ? `, ${event.mode}` : ""}`) : ""));
}

// One name: what it means, and its lanes.

function select(name) {
  const before = names.get(chosen);
  chosen = name;
  history.replaceState(null, "", name ? `#${encodeURIComponent(name)}` : "#");
  for (const known of [before, names.get(name)]) if (known?.row) drawRow(known);
  return before;
}

function choose(name) {
  const before = select(name);
  drawDetail();
  if (name && innerWidth < 1050) $("detail").scrollIntoView({ block: "start" });
  if (name) $("detail").focus({ preventScroll: true });
  else before?.parts?.button.focus();
}

function drawDetail() {
  const box = $("detail");
  if (chosen) delete box.dataset.drill;
  box.hidden = !chosen && !("drill" in box.dataset);
  if (!chosen) return;
  const known = names.get(chosen), view = known?.view;
  const left = known ? Math.max(0, known.ends - now()) : 0;
  const own = events.filter((event) => event.names?.includes(chosen)).sort((one, two) => one.at - two.at);
  const frame = JSON.stringify([chosen, view?.held_by?.token]);
  if (box.dataset.frame !== frame) { // only what has changed is made again: a reader may be in the middle of it
    const focused = document.activeElement?.dataset?.act;
    box.dataset.frame = frame;
    box.replaceChildren(...detailFrame(chosen, view?.held_by && mayOperate, () => choose("")));
    if (focused) box.querySelector(`[data-act="${focused}"]`)?.focus();
  }
  const [, said, picture, line] = box.children;
  const texts = explain(view, left, own);
  while (said.children.length > texts.length) said.lastElementChild.remove();
  texts.forEach((text, index) => put(said.children[index] ?? said.appendChild(element("p")), text));
  picture.replaceChildren(drawLanes(lanesOf(view, own, left), `History of ${chosen}`, picture.clientWidth));
  const waiters = view?.waiting > 1 ? view.waiters.map((holder) => `${label(holder)} (${where(holder)})`) : [];
  if ([...line.children].map((item) => item.textContent).join() !== waiters.join()) line.replaceChildren(...waiters.map((text) => element("li", {}, text)));
}

function detailFrame(title, takes, close) {
  return [
    element("div", { class: "bar" }, element("h2", { id: "detail-title" }, title),
      takes ? element("button", { type: "button", "data-act": "take", onclick: () => openTake(names.get(title).view) }, "Take it away…") : "",
      element("button", { type: "button", "data-act": "close", onclick: close }, "Close")),
    element("div", { class: "said" }), element("div", { class: "picture" }), element("ol", { "aria-label": "In line" })];
}

$("drill").querySelector("input").addEventListener("change", async (event) => {
  const box = $("detail"), [file] = event.target.files;
  if (!file) return;
  const close = () => { delete box.dataset.drill; drawDetail(); };
  select("");
  delete box.dataset.frame;
  box.dataset.drill = file.name;
  box.hidden = false;
  box.replaceChildren(...detailFrame(`Drill ${file.name}`, false, close));
  const [, said, picture] = box.children;
  try {
    const drill = JSON.parse(await file.text());
    picture.replaceChildren(drawLanes(lanesOfDrill(drill), `Drill ${drill.drill}`, picture.clientWidth));
    put(said, `${drill.verdict.toUpperCase()}: ${plural(drill.refused, "operation")} refused, ${plural(drill.lost_updates, "acknowledged update")} lost. ${drill.authority}, guarded by ${drill.guard}.`);
  } catch {
    put(said, "This is no report of a drill: write one with fenced drill --json.");
  }
  box.focus();
  event.target.value = "";
});

// Force-release. It sends the token that the operator has seen: another holder is not touched.

let taking = null;

function openTake(view) {
  const { holder, token } = view.held_by;
  taking = { name: view.name, token };
  put($("take-title"), `Take ${view.name} away from ${label(holder)}?`);
  put($("take-what"), `${label(holder)} (${where(holder) || "host not known"}) holds it under token ${number.format(token)}.`);
  put($("take-answer"), "");
  $("reason").value = "";
  $("take").showModal();
  $("reason").focus();
}

$("take").querySelector("form").addEventListener("submit", async (event) => {
  if (event.submitter?.value !== "take") return;
  event.preventDefault();
  $("take-it").disabled = true;
  try {
    const path = `v1/names/${taking.name.split("/").map(encodeURIComponent).join("/")}/force-release`;
    const answer = await fetch(place(path), { method: "POST", headers: { "fenced-operator": "page", "content-type": "application/json" }, body: JSON.stringify({ token: taking.token, reason: $("reason").value }) });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.detail || found.title);
    if (found.token !== null) return $("take").close();
    put($("take-answer"), "That holder has it no more, so nothing was done.");
  } catch (error) {
    put($("take-answer"), `It is not known whether it was taken: ${error.message}`);
  } finally {
    $("take-it").disabled = false;
  }
});

// The guards.

const STAGES = ["observe", "shadow", "canary", "enforce", "require"];

function drawGuards(found) {
  guards = found;
  setProblem(problem);
  $("guards-section").hidden = !guards.length;
  $("guards").replaceChildren(...guards.flatMap((guard) => [
    element("div", { class: "guard" }, element("code", {}, guard.url), guard.problem ? element("p", { class: "warn" }, `⚠ ${guard.problem}`) : "",
      ...guard.tables.flatMap((table) => table.stages.map((stage) => drawStage(table, stage)))),
  ]));
}

function drawStage(table, stage) {
  const at = STAGES.indexOf(stage.mode.split("(")[0]);
  const next = stage.next ? (stage.reasons.length ? `${stage.next} not yet: ${stage.reasons.join("; ")}` : `✓ ${stage.next} is safe next`) : "the last stage";
  return element("div", { class: "guard" },
    element("h3", {}, `${table.guard}${stage.pattern === "*" ? "" : ` · ${stage.pattern}`}`),
    element("ol", { class: "stages", "aria-label": `Stage ${stage.mode}` }, ...STAGES.map((each, index) =>
      element("li", { class: index < at ? "past" : index === at ? "now" : "", "aria-current": index === at && "step" }, index === at ? `● ${stage.mode}` : each))),
    element("small", { class: "soft" }, `${next}. ${table.refused == null ? "" : `${plural(table.refused, "refusal")}, `}${plural(table.marks, "mark")}, highest ${number.format(table.highest)}.`),
    stage === table.stages[0] && table.work ? drawWork(table) : "",
    stage === table.stages[0] ? drawUnstamped(table) : "",
    ...table.wrong.map((text) => element("p", { class: "warn" }, `⚠ ${text}`)));
}

// Rows that workers have claimed. A worker elsewhere than in the table's database is known by the name of its lease.
function drawWork(table) {
  const work = table.work, leases = `${table.guard.replace(/^public\./, "")}/workers/`;
  const worker = (claim) => {
    const lease = names.get(leases + claim.worker)?.view.held_by;
    return lease ? who(lease.holder) : claim.worker;
  };
  return element("div", { class: "work" },
    element("p", {}, `${number.format(work.ready)} ready${work.next ? ` (next ${work.next})` : ""}, ${number.format(work.later)} later, ${number.format(work.claimed)} claimed, `,
      element("span", { class: work.dead ? "warn" : "" }, `${work.dead ? "⚠ " : ""}${plural(work.dead, "dead letter")}`)),
    work.claims.length ? element("table", {},
      element("caption", { class: "unseen" }, `Claimed rows of ${table.guard}, the oldest first`),
      element("thead", {}, element("tr", {}, ...["Row", "Worker", "Since", "Attempt"].map((title) => element("th", { scope: "col" }, title)))),
      element("tbody", {}, ...work.claims.map((claim) => element("tr", {},
        element("td", {}, element("code", {}, claim.name)), element("td", {}, worker(claim)),
        element("td", { "data-since": claim.since }, span(time.now() - claim.since)), element("td", {}, number.format(claim.attempt)))))) : "");
}

// Keys, filters, and the clock.

$("search").addEventListener("input", () => { drawRows(); drawLately(); });
$("filters").addEventListener("change", (event) => {
  $("order").value = FILTERS_ORDERS[event.target.value] ?? $("order").value;
  drawRows();
});
$("order").addEventListener("change", drawRows);
$("kinds").addEventListener("change", drawFeed);
$("pause").addEventListener("click", () => {
  paused = !paused;
  missed = 0;
  $("pause").setAttribute("aria-pressed", paused);
  drawFeed();
});
addEventListener("keydown", (event) => {
  if ($("take").open || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && $("switch").open) {
    $("switch").open = false;
    return $("switch").firstElementChild.focus();
  }
  const typing = event.target.matches("input[type=search], textarea");
  if (event.key === "/" && !typing) { event.preventDefault(); $("search").focus(); }
  if (event.key === "Escape" && chosen && !typing) choose("");
  const row = event.target.closest?.("#rows tr");
  const next = event.key === "ArrowDown" ? row?.nextElementSibling : event.key === "ArrowUp" ? row?.previousElementSibling : null;
  if (next) { event.preventDefault(); next.querySelector("button").focus(); }
});
addEventListener("click", (event) => { if (!$("switch").contains(event.target)) $("switch").open = false; });
addEventListener("hashchange", () => choose(nameInAddress()));
setInterval(() => {
  if (document.hidden) return;
  for (const known of names.values()) if (known.seen && known.row) drawLeft(known);
  drawLately();
  for (const cell of document.querySelectorAll("[data-since]")) put(cell, span(time.now() - cell.dataset.since));
  if (chosen && !$("take").open) drawDetail();
  if (source && performance.now() - lastMessage > SILENCE_MS) lost();
  if (["long", "late"].includes(document.querySelector("#filters input:checked").value)) drawRows();
}, 1000);

if (document.hidden) hide();
else connect();
