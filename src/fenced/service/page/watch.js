// What calls for somebody: refusals counted in the title while the tab is hidden, and what needs attention now.

import { clock, element, number, plural, span, time, who } from "./words.js";

const title = document.title;
const key = (event) => [event.at, event.guard, event.token, event.names].join();
const refused = (events) => events.filter((event) => event.kind === "refused").map(key);

let known = null; // the refusals that were on the page when it was last looked at; null: it is looked at now
let unseen = new Set();

export function lookAway(events) {
  known = new Set(refused(events));
  unseen = new Set();
}

export function lookBack() {
  known = null;
  document.title = title;
}

export function count(events) {
  if (known === null) return;
  for (const each of refused(events)) if (!known.has(each)) unseen.add(each);
  if (unseen.size) document.title = `(${number.format(unseen.size)}) ${title}`;
}

const LOST = "the authority has lost its history. Stop the writers, raise the floor, start them";
const moment = (at) => clock.format(at * 1000).replace(/[.,]\d$/, "");

const STUCK_SECONDS = 600, STUCK_SHOWN = 3;
const LASTS_SECONDS = 10; // guard and store are not looked at in one moment, and grants come in between
const above = new Map(); // guards whose mark is above the last token, and since when

function isAbove(key, holds) {
  if (!holds) above.delete(key);
  else if (!above.has(key)) above.set(key, time.now());
  return holds && time.now() - above.get(key) >= LASTS_SECONDS;
}

// Names that are waited for, and whose holder has not changed, for so long.
function stuck(views) {
  const age = (view) => time.now() - Math.max(view.since, view.waiting_since);
  const found = views.filter((view) => view.held_by && view.waiting && view.since && view.waiting_since && age(view) > STUCK_SECONDS);
  const more = found.length - STUCK_SHOWN;
  return [
    ...found.sort((one, two) => age(two) - age(one)).slice(0, STUCK_SHOWN).map((view) =>
      `${view.name} is waited for, and its holder has not changed for ${span(age(view))}: ${who(view.held_by.holder)}`),
    ...(more > 0 ? [`${plural(more, "more name")} like that`] : []),
  ];
}

// What this page and its instance know by themselves. It needs no Prometheus, and replaces none: nobody is woken by it.
export function notices({ problem, since, alerts, guards, views, events, realm, lastToken }) {
  const found = problem ? [`${problem} (since ${moment(since)})`, ...alerts] : [...alerts];
  const twice = events.find((event) => event.kind === "refused" && event.why === "reused" && time.now() - event.at < 3600);
  if (twice) found.push(`${(twice.names ?? []).join(", ")}: token ${number.format(twice.token)} was used by two grants: ${LOST}`);
  for (const guard of guards) {
    if (guard.problem) found.push(`The guard ${guard.url} does not answer: ${guard.problem}`);
    for (const table of guard.tables) {
      if (isAbove(`${guard.url} ${table.guard}`, guard.realm === realm && table.highest > lastToken))
        found.push(`${table.guard} has seen token ${number.format(table.highest)}, and the last one is ${number.format(lastToken)}: ${LOST}`);
      found.push(...(table.overrides ?? []).map((each) =>
        `${table.guard}: an override lets ${each.pattern} through until ${moment(each.until)}, by ${each.who}: ${each.why}`));
      found.push(...table.wrong.map((text) => `${table.guard}: ${text}`));
      const writers = table.unstamped ?? [], total = writers.reduce((sum, each) => sum + each.count, 0);
      const known = writers.map((each) => each.who).filter((who) => who !== "somebody");
      if (total) found.push(`${table.guard}: ${plural(total, "write")} without a stamp${known.length ? `, by ${known.join("; ")}` : ""}`);
    }
  }
  return [...found, ...stuck(views)];
}

export function drawNotices(box, found) {
  const list = box.querySelector("ul");
  if ([...list.children].map((item) => item.dataset.said).join("\n") === found.join("\n")) return;
  box.hidden = !found.length;
  list.replaceChildren(...found.map((text) => element("li", { "data-said": text }, `⚠ ${text}`)));
}

// The writers of a table that send no stamp, the last one first.
export function drawUnstamped(table) {
  if (!table.unstamped?.length) return "";
  return element("div", { class: "unstamped" }, element("p", { class: "warn" }, "Writers without a stamp"),
    element("ul", {}, ...table.unstamped.map((each) => element("li", {}, `${each.who}: ${plural(each.count, "write")}`,
      element("span", { class: "soft" }, each.last == null ? "" : `, the last one at ${ago(each.last)}`)))));
}

const ago = (at) => (time.now() - at < 86400 ? moment(at) : new Date(at * 1000).toLocaleString());

// The last hour, a bar for each minute.
const COUNTED = { granted: "grants", refused: "refused", lost: "lost while held" };

export function drawHour(box, hour) {
  box.hidden = false;
  box.querySelector("ul").replaceChildren(...Object.entries(COUNTED).map(([kind, words]) => {
    const counts = hour[kind], high = Math.max(1, ...counts), total = counts.reduce((sum, each) => sum + each, 0);
    const bars = counts.map((each, index) => (each ? `M${index + 0.5},24 v-${Math.max(2, (23 * each) / high).toFixed(1)}` : "")).join(" ");
    const said = total ? `${number.format(total)} ${words}; at most ${number.format(high)} in a minute` : `0 ${words}`;
    return element("li", { class: kind }, element("b", {}, number.format(total)), element("span", { class: "soft" }, words),
      element("svg:svg", { viewBox: `0 0 ${counts.length} 24`, preserveAspectRatio: "none", role: "img", "aria-label": said },
        element("svg:title", {}, said), element("svg:path", { d: `M0,24 H${counts.length}`, class: "axis" }), element("svg:path", { d: bars })));
  }));
}

export function drawHot(box, hot, choose) {
  box.hidden = !hot.length;
  box.querySelector("ol").replaceChildren(...hot.map((each) => element("li", {},
    element("button", { type: "button", onclick: () => choose(each.name) }, each.name),
    element("span", { class: "soft" }, each.count === 1 && !each.error ? "waited for once" : `waited for ${each.error ? "about " : ""}${number.format(each.count)} times`))));
}
