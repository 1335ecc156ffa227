// What calls for somebody: refusals counted in the title while the tab is hidden, and what needs attention now.

import { clock, element, number, plural, time } from "./words.js";

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

const moment = (at) => clock.format(at * 1000).replace(/[.,]\d$/, "");

// What this page and its instance know by themselves. It needs no Prometheus, and replaces none: nobody is woken by it.
export function notices({ problem, since, guards }) {
  const found = problem ? [`${problem} (since ${moment(since)})`] : [];
  for (const guard of guards) {
    if (guard.problem) found.push(`The guard ${guard.url} does not answer: ${guard.problem}`);
    for (const table of guard.tables) {
      found.push(...table.wrong.map((text) => `${table.guard}: ${text}`));
      const writers = table.unstamped ?? [], total = writers.reduce((sum, each) => sum + each.count, 0);
      const known = writers.map((each) => each.who).filter((who) => who !== "somebody");
      if (total) found.push(`${table.guard}: ${plural(total, "write")} without a stamp${known.length ? `, by ${known.join("; ")}` : ""}`);
    }
  }
  return found;
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
  return element("table", { class: "unstamped" },
    element("caption", {}, "Writers without a stamp"),
    element("thead", {}, element("tr", {}, ...["Writer", "Writes", "Last"].map((each) => element("th", { scope: "col" }, each)))),
    element("tbody", {}, ...table.unstamped.map((each) => element("tr", {}, element("td", {}, each.who), element("td", {}, number.format(each.count)),
      element("td", {}, each.last == null ? "" : ago(each.last))))));
}

const ago = (at) => (time.now() - at < 86400 ? moment(at) : new Date(at * 1000).toLocaleString());

export function drawHot(box, hot, choose) {
  box.hidden = !hot.length;
  box.querySelector("ol").replaceChildren(...hot.map((each) => element("li", {},
    element("button", { type: "button", onclick: () => choose(each.name) }, each.name),
    element("span", { class: "soft" }, `waited for ${each.error ? "about " : ""}${number.format(each.count)} ${each.count === 1 ? "time" : "times"}`))));
}
