// Lanes: who held a name, from when to when, and what was refused. Of the live page, and of a drill.

import { element, label, number, span, time } from "./words.js";

const WINDOW_SECONDS = 300, WINDOW_MIN_SECONDS = 5;
const TOKENS_FITTED = 4; // short leases would be dots in a longer window

export function lanesOf(view, own, left) {
  const lanes = [], end = time.now();
  const lane = (event) => {
    let found = lanes.find((each) => each.token === event.token);
    if (!found) lanes.push(found = { token: event.token, who: label(event.holder), from: null, to: null, fate: "", marks: [] });
    return found;
  };
  for (const event of own) {
    if (event.token == null && event.kind !== "refused") continue;
    const at = lane(event);
    if (event.kind === "granted") at.from = event.at;
    else if (event.kind === "refused") at.marks.push({ at: event.at, kind: "refused" });
    else if (event.kind !== "taken" && at.to === null) Object.assign(at, { to: event.at, fate: event.kind === "lost" ? `lost: ${event.why}` : event.kind });
  }
  if (view?.held_by) Object.assign(lane({ token: view.held_by.token, holder: view.held_by.holder }), { to: null, ahead: left }, { fate: `${span(left)} left` });
  for (const each of lanes) if (each.from === null && (each.to !== null || each.ahead !== undefined)) each.from = view?.since ?? end - WINDOW_SECONDS;
  lanes.sort((one, two) => (one.token ?? 0) - (two.token ?? 0));
  const starts = lanes.slice(-TOKENS_FITTED).flatMap((each) => [each.from, ...each.marks.map((mark) => mark.at)]).filter((each) => each !== null);
  const from = Math.max(end - WINDOW_SECONDS, Math.min(end - WINDOW_MIN_SECONDS, ...starts));
  const recent = lanes.filter((each) => (each.to ?? end) >= from || each.marks.some((mark) => mark.at >= from));
  return { lanes: recent.slice(-8), from, to: end, live: true };
}

// A drill is drawn in the same lanes: who held the name, who was stopped, what was refused.
export function lanesOfDrill(drill) {
  const name = drill.names[0];
  const lanes = drill.grants.filter((grant) => grant.name === name).map((grant) => ({ token: grant.token, who: grant.holder, from: grant.time, to: null, fate: "", marks: [], pauses: [] }));
  lanes.forEach((lane, index) => { lane.to = lanes[index + 1]?.from ?? drill.seconds; });
  for (const each of drill.operations.filter((operation) => operation.name === name && operation.kind === "write")) {
    lanes.find((lane) => lane.token === each.token)?.marks.push({ at: each.time, kind: each.decision });
  }
  for (const each of drill.pauses ?? []) lanes.find((lane) => lane.token === each.token)?.pauses.push([each.began, each.ended]);
  return { lanes: lanes.slice(-8), from: 0, to: drill.seconds, live: false };
}

// As wide as its place; sizes follow the font of the page.
export function drawLanes({ lanes, from, to, live }, title, pixels) {
  const size = parseFloat(getComputedStyle(document.documentElement).fontSize) / 15;
  const width = Math.max(260, (pixels || 600) / size), step = 46, height = lanes.length * step + 26;
  const right = width - (lanes.some((lane) => lane.ahead) ? 40 : 8);
  const x = (at) => Math.min(right, Math.max(2, ((at - from) / (to - from || 1)) * right));
  const picture = element("svg:svg", { viewBox: `0 0 ${width} ${height}`, height: height * size, role: "img", "aria-label": title });
  lanes.forEach((lane, index) => picture.append(...drawLane(lane, index * step + 30, `lane${index % 8}`, { x, to, width })));
  const caption = (at, anchor, text) => element("svg:text", { x: at, y: height - 4, "text-anchor": anchor, class: "soft" }, text);
  picture.append(caption(2, "start", live ? `${span(to - from)} ago` : "0 s"), caption(right, "end", live ? "now" : span(to)));
  if (lanes.some((lane) => lane.marks.length)) picture.append(caption(width / 2, "middle", live ? "✕ refused" : "● written · ✕ refused · ┄ stopped"));
  return picture;
}

function drawLane(lane, y, color, { x, to, width }) {
  const token = lane.token == null ? "no token" : `token ${number.format(lane.token)}`;
  const parts = [element("svg:text", { x: 2, y: y - 10 }, [lane.who, token, lane.fate].filter(Boolean).join(" · ")),
    element("svg:line", { x1: 0, x2: width, y1: y, y2: y, class: "axis" })];
  for (const [began, ended] of lane.pauses ?? []) {
    parts.push(element("svg:rect", { x: x(began), y: y - 8, width: Math.max(3, x(ended) - x(began)), height: 16, rx: 3, class: "paused" }, element("svg:title", {}, "process stopped")));
  }
  if (lane.from !== null) {
    const end = x(lane.to ?? to);
    parts.push(element("svg:rect", { x: x(lane.from), y: y - 4, width: Math.max(2, end - x(lane.from)), height: 8, rx: 3, class: color }));
    if (lane.ahead) parts.push(element("svg:line", { x1: end + 2, x2: width - 4, y1: y, y2: y, class: `ahead ${color}` }));
    if (lane.fate.startsWith("lost")) parts.push(element("svg:path", { d: `M${end},${y - 8} v16`, class: "end" }));
  }
  for (const mark of lane.marks) {
    const shown = mark.kind === "admitted"
      ? element("svg:circle", { cx: x(mark.at), cy: y, r: 5, class: `dot ${color}` })
      : element("svg:path", { d: `M${x(mark.at) - 5},${y - 5} l10,10 m0,-10 l-10,10`, class: mark.kind === "refused" ? "cross" : "cross wrong" });
    shown.append(element("svg:title", {}, `write ${mark.kind}`));
    parts.push(shown);
  }
  return parts;
}
