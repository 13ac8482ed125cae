// The top of the page: what is served, how it is, and whether the figures may be believed.
import { UNFINISHED, age_s, beforePlan, dark, frame, held, html, moving, moves, placement, problems, status, theme, worth } from "./state.js";
import { short, span } from "./words.js";
import { KINDS } from "./moves.js";
import { OperatorButton } from "./operator.js";
import { showPlan } from "./url.js";

const WORTH = {
  live: ["●", "live"],
  waiting: ["◌", "waiting for the first window"],
  connecting: ["◌", "connecting to the controller"],
  stale: ["▲", "stale"],
  away: ["■", "controller away"],
  lost: ["■", "page server away"],
};
/** Where even placement and moves may be old. */
const GONE = new Set(["away", "lost", "connecting"]);
const STATES = { starting: "◌", steady: "●", planning: "◔", moving: "⇄", paused: "❚❚", degraded: "▲" };

const Figure = (/** @type {any} */ { name, title, children, wide }) => html`
  <div class=${wide ? "figure wide" : "figure"} title=${title}><dt>${name}</dt><dd>${children}</dd></div>`;

function State() {
  const p = placement.value;
  const state = p?.state || "unknown";
  const running = moves.value.filter((m) => UNFINISHED.includes(m.state));
  const plan = running.length ? running[running.length - 1].plan_id : "";
  const all = moves.value.filter((m) => m.plan_id === plan);
  const count = state === "moving" && all.length ? ` ${all.filter((m) => m.state === "done").length}/${all.length}` : "";
  return html`<span class=${`pill is-${state}`}><span aria-hidden="true">${STATES[/** @type {keyof typeof STATES} */ (state)] ?? "?"}</span> ${state}${count}</span>${p && GONE.has(worth.value) && html` <small>last known</small>`}`;
}

function Imbalance() {
  const f = frame.value;
  const before = beforePlan.value;
  if (!f) return "–";
  return html`<b data-figure="imbalance">${f.imbalance.toFixed(2)}</b>${before && html` <small title="Means of up to ten windows">${before.imbalance.toFixed(2)} before${before.since == null ? "" : `, ${before.since.toFixed(2)} since`} <button type="button" class="link" onClick=${() => showPlan(before.mark.plan_id)}>last plan</button></small>`}`;
}

function Rate() {
  const f = frame.value;
  if (!f) return "–";
  const total = f.demand_pairs.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0);
  return html`<b>${short(total / f.window_s)}</b> <small>pairs/s${total ? ` · ${Math.round((100 * f.demand_pairs[0]) / total)}% prefill` : ""}</small>`;
}

function Freshness() {
  const [sign, word] = WORTH[/** @type {keyof typeof WORTH} */ (worth.value)];
  const age = age_s.value;
  return html`<span class=${`pill fresh-${worth.value}`} data-figure="worth"><span aria-hidden="true">${sign}</span> ${word}</span>${age != null && html` <small>${span(age)} old</small>`}`;
}

/** What the banner says when the figures must not be taken for live. */
export function Banner() {
  const p = placement.value;
  const age = age_s.value;
  const old = age == null ? "" : ` What is shown is ${span(age)} old.`;
  const why = status.value?.message;
  const lines = {
    away: `The controller is not reachable: ${why || "no reason given"}.${old} Serving goes on without it; placement does not change.`,
    connecting: `Connecting to the controller${why ? `: ${why}` : ""}.`,
    lost: `This page's server does not answer.${old} It is tried again by itself.`,
    stale: `No load report for ${span(age ?? 0)}.${old} Placement and moves are current.`,
  };
  const line = lines[/** @type {keyof typeof lines} */ (worth.value)];
  const paused = p?.state === "paused" && worth.value !== "lost" && !line;
  const missing = frame.value?.sources_missing ?? [];
  const partly = missing.length > 0 && worth.value === "live" ? `The newest window lacks ${missing.join(", ")}: its load is shown too low.` : "";
  if (!line && !problems.value.length && !paused && !partly && !held.value) return null;
  return html`<div class="banner" role="status">
    ${line && html`<p data-figure="banner">${line}</p>`}
    ${held.value && html`<p data-figure="held">The picture is held at window ${frame.value?.window ?? "–"}. Press p or Go on to follow again.</p>`}
    ${paused && html`<p data-figure="paused"><span aria-hidden="true">❚❚</span> Placement is paused: nothing moves by itself. Serving goes on.</p>`}
    ${partly && html`<p class="problem"><span aria-hidden="true">▲</span> ${partly}</p>`}
    ${problems.value.map((/** @type {string} */ text) => html`<p class="problem"><span aria-hidden="true">▲</span> ${text}</p>`)}
  </div>`;
}

/** What stands at the end of the row of tabs. */
export const Controls = () => html`<div class="controls"><${OperatorButton}/>
  <button type="button" class="quiet" onClick=${() => { theme.value = dark.value ? "light" : "dark"; }}>${dark.value ? "Light" : "Dark"}</button></div>`;

export function Header() {
  const p = placement.value;
  const up = p ? p.ranks.filter((/** @type {any} */ r) => r.state === "up").length : 0;
  const replaced = p?.replicas_replaced ?? 0;
  const done = p ? Object.entries(p.moves_done).map(([kind, n]) => `${n} ${kind}`).join(", ") + (replaced ? `; ${replaced} replicas removed to make room` : "") : "";
  const byKind = p ? Object.entries(KINDS).map(([kind, sign]) => html` <span class=${`k-${kind}`}><span aria-hidden="true">${sign}</span>${p.moves_done[kind] ?? 0}</span>`) : "";
  const total = p ? Object.values(p.moves_done).reduce((a, b) => Number(a) + Number(b), 0) : "–";
  return html`<header>
    <div class="brand">
      <img src="/static/icon.svg" alt="" width="30" height="30"/>
      <div><h1>${p?.model || "moe_serve"}</h1>${p?.simulated && html`<span class="tag" title="Expert GEMM times come from the cost model, not from a device">simulated</span>`}${p?.accepts_insecure && html`<span class="tag bad" title="Calls without a token are accepted">insecure</span>`}
      <p>${p ? `${p.layers} layers × ${p.experts} experts · top-${p.top_k} · policy ${p.policy || "–"}` : "no placement yet"}</p>
      ${p && html`<p data-figure="epoch" title="The controller's number · number of the routing table">term ${p.term} · epoch ${p.epoch}</p>`}</div>
    </div>
    <dl class="figures">
      <${Figure} wide name="Imbalance" title=${`Sum over layers of the busiest rank / sum of the mean over ranks, minus 1. 0 is even.${frame.value ? ` Balancedness ${frame.value.balancedness.toFixed(3)}.` : ""}`}><${Imbalance}/><//>
      <${Figure} name="State" title="State of the controller"><${State}/><//>
      <${Figure} name="Data" title="Whether the figures are live"><${Freshness}/><//>
      <${Figure} name="Demand" title="Tokens × top-k that routers accepted in the newest window"><${Rate}/><//>
      <${Figure} name="Moves done" title=${done}><b>${total}</b> <small aria-label=${done}>${byKind}</small><//>
      <${Figure} name="Ranks" title="Ranks that are up, of all"><b>${p ? up : "–"}</b>${p && html` <small>of ${p.ranks.filter((/** @type {any} */ r) => r.state !== "removed").length} up</small>`}<//>
    </dl>
    <span hidden data-moving=${moving.value.length}></span>
  </header>`;
}
