// What the page says, and how it makes elements. Text of strangers goes into text nodes only, never into markup.

export const number = new Intl.NumberFormat();
export const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 1, hour12: false });
export const plural = (count, what) => `${number.format(count)} ${what}${count === 1 ? "" : "s"}`;
export const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
export const label = (holder) => (holder ? holder.label || "somebody without a label" : "somebody");
export const where = (holder) => (holder ? [holder.host, holder.pid && `pid ${holder.pid}`].filter(Boolean).join(", ") : "");
export const who = (holder) => label(holder) + (holder?.host ? ` on ${holder.host}` : "");

// Times of day are the service's: clocks need not agree.
export const time = { skew: 0, now: () => Date.now() / 1000 + time.skew };

// A client renews after a third of the ttl: past two thirds it has missed a renewal.
export const isLate = (view, left) => Boolean(view?.held_by && view.ttl && left < view.ttl / 3);

export function element(kind, attributes = {}, ...children) {
  const made = kind.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", kind.slice(4))
    : document.createElement(kind);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== "" && child != null));
  return made;
}

export function span(seconds) {
  const [amount, unit] = seconds >= 7200 ? [seconds / 3600, "h"] : seconds >= 120 ? [seconds / 60, "min"] : [seconds, "s"];
  return `${Math.max(0, Math.round(amount))}\u00a0${unit}`;
}

// The sign of an event, drawn: fonts differ in the symbols that they have.
const SIGNS = {
  granted: "M4,2.5 L11,7 L4,11.5 Z", released: "M7,3.5 a3.5,3.5 0 1 0 0.01,0", ended: "M7,3.5 a3.5,3.5 0 1 0 0.01,0",
  lost: "M7,1.5 L13,12.5 H1 Z M7,5.5 v3.2 M7,10.2 v0.9", taken: "M2,2.5 v9 h5 M5.5,7 H12.5 M9.5,4 L12.5,7 L9.5,10", refused: "M3,3 L11,11 M11,3 L3,11",
};
export const sign = (kind) => element("svg:svg", { viewBox: "0 0 14 14", class: "sign", "aria-hidden": "true" }, element("svg:path", { d: SIGNS[kind] }));

// An event in three parts: what happened, to which name, and the rest.
export function sentence(event) {
  const name = event.names?.join(", ") ?? "";
  switch (event.kind) {
    case "granted": return ["granted", name, `to ${who(event.holder)}, token ${number.format(event.token)}${event.why ? ` (${event.why})` : ""}`];
    case "released": return ["released", name, `by ${who(event.holder)}, token ${number.format(event.token)}`];
    case "ended": return ["ended", name, `token ${number.format(event.token)} of ${who(event.holder)}; how is not known here`];
    case "lost": return ["Lost", name, `by ${who(event.holder)}, token ${number.format(event.token)}: ${event.why}`];
    case "taken": return ["Taken away", name, `token ${number.format(event.token)} ${event.why}`];
    default: return ["Refused", name, refusal(event)];
  }
}

export function refusal(event) {
  if (event.why === "missing") return "a write without a stamp";
  const late = `${who(event.holder)} with token ${event.token == null ? "?" : number.format(event.token)}`;
  if (event.why !== "stale") return `${late}: ${event.why}`;
  return `${late}, because ${event.mark_holder ? `${who(event.mark_holder)} has` : "the guard has seen"} ${number.format(event.mark)}`;
}

// What an operator should know about a name: `left` seconds until its lease ends, and its `own` events.
export function explain(view, left, own) {
  const said = [];
  const held = view?.held_by;
  if (held) {
    said.push(`${who(held.holder)} holds it under token ${number.format(held.token)}` +
      (view.since ? `, for ${span(time.now() - view.since)} as far as this instance knows` : "") +
      `. If it does not renew, it ends in ${span(left)}.`);
    if (isLate(view, left)) said.push("⚠ It has not renewed in time. Its process may be stopped, overloaded or cut off from the store.");
    if (view.names.length > 1) said.push(`The same lease covers ${view.names.filter((name) => name !== view.name).join(", ")}.`);
  } else said.push(left > 0 ? `Nobody holds it. It is kept free for ${span(left)} more.` : "Nobody holds it now.");
  if (view?.waiting) said.push(`${plural(view.waiting, "waiter")} in line, first come, first served; the next grant goes to ${who(view.waiters[0])}.`);
  const refused = own.filter((event) => event.kind === "refused").at(-1);
  if (refused) {
    said.push(`At ${clock.format(refused.at * 1000)} the guard refused ${refusal(refused)}. ` + (refused.why === "stale"
      ? "The late holder did not know that its lease had ended; nothing of its write was applied, and the newer holder's data is untouched."
      : "Nothing of that write was applied."));
  }
  return said;
}
