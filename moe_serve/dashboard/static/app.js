// The page: takes events in, draws. Everything it shows comes from /api/v1; it asks for nothing else.
import { render } from "./vendor/preact.js";
import { batch, effect, signal } from "./vendor/signals.js";
import { ask, askSession } from "./api.js";
import { Devices } from "./devices.js";
import { Dialogs } from "./dialogs.js";
import { ExpertPanel, closeExpert } from "./expert.js";
import { WhyStrip, WhyView } from "./explain.js";
import { SlowRange, loadOf, readFrame, readPlacement } from "./figures.js";
import { Banner, Controls, Header } from "./header.js";
import { HeatCard } from "./logical.js";
import { MovesCard, onTabKey } from "./moves.js";
import { OperatorBar } from "./operator.js";
import { PlanView } from "./plan.js";
import { before, frame, held, html, link, marks, merge, moves, newest, now_ms, placement, points, range, records, status, worth } from "./state.js";
import { listen } from "./stream.js";
import { TimelineCard } from "./trends.js";
import { PHASES, VIEWS, chosen, layer, mode, phase, view } from "./url.js";

const POINTS_MAX = 3600;
/** Left to a frame to reach the screen before the rest of the page is worked out. */
const BREATH_MS = 5;
/** After a fault that passes. */
const RETRY_MS = 2000;
const MOVES_KEPT = 400;
const RECORDS_KEPT = 2000;
const NAMES = { overview: "Overview", devices: "Devices", timeline: "Timeline", moves: "Moves", plan: "Plan", why: "Why slow?" };

const ranges = new Map(PHASES.map((name) => [name, new SlowRange()]));
const chooseRange = () => { const r = ranges.get(phase.value); if (r?.high) range.value = { low: r.low, high: r.high }; };
/** What closed while the picture was held. */
let waiting = /** @type {any} */ (null);

/** Sorted: a clock that is set dates a window before an earlier one, and a graph goes from left to right. */
function addPoints(/** @type {any[]} */ news) {
  points.value = merge(points.value, news, (p) => String(p.wall_s)).sort((a, b) => a.wall_s - b.wall_s).slice(-POINTS_MAX);
}

function takeFrame(/** @type {any} */ doc) {
  const point = { wall_s: doc.wall_s, window: doc.window, imbalance: doc.imbalance, worst_layer: Math.max(0, ...doc.layer_imbalance), p50_s: doc.p50_s, p99_s: doc.p99_s, rows_per_s: doc.rows_per_s };
  if (held.peek()) {
    waiting = doc;
    addPoints([point]);
    return;
  }
  const read = readFrame(doc);
  const rest = PHASES.filter((name) => name !== phase.peek());
  batch(() => {
    ranges.get(phase.peek())?.next(loadOf(read, phase.peek()).load);
    chooseRange();
    newest.value = read;
  });
  // The map is painted first; panels and tables follow after its frame.
  afterFrame(() => {
    for (const name of rest) ranges.get(name)?.next(loadOf(read, name).load);
    if (newest.peek() === read) { frame.value = read; addPoints([point]); }
  });
}

/** Run soon after the next frame; a hidden tab has no frames. */
function afterFrame(/** @type {() => void} */ run) {
  if (document.hidden) setTimeout(run);
  else requestAnimationFrame(() => setTimeout(run, BREATH_MS));
}

async function takeHistory() {
  const { ok, data } = await ask("/api/v1/history");
  if (!ok) return;
  addPoints(data.points);
  marks.value = data.marks;
}

listen({
  frame: takeFrame,
  // These come with a window often; its picture goes first.
  status: (doc) => { const heard_ms = performance.now(); afterFrame(() => { status.value = { ...doc, heard_ms }; }); },
  placement: (doc) => afterFrame(() => batch(() => { placement.value = readPlacement(doc); layer.value = Math.min(layer.value, Math.max(0, doc.layers - 1)); })),
  move: (news) => { moves.value = merge(moves.value, news, (m) => `${m.plan_id}/${m.move_id}`).slice(-MOVES_KEPT); },
  record: (news) => {
    records.value = merge(records.value, news, (r) => `${r.n}/${r.wall_s}`).slice(-RECORDS_KEPT);
    if (news.some((/** @type {any} */ r) => r.outcome === "started")) takeHistory();
  },
}, (state) => { link.value = state; });
takeHistory();
askSession();
setInterval(() => { now_ms.value = performance.now(); }, 500);

effect(chooseRange);
effect(() => { if (!held.value && waiting) { const doc = waiting; waiting = null; takeFrame(doc); } });
effect(() => { Object.assign(document.documentElement.dataset, { worth: worth.value, window: frame.value?.window ?? "" }); });
effect(() => { document.title = `${worth.value === "live" ? "" : "▲ "}${placement.value?.model ?? "moe_serve"}${frame.value ? ` · imbalance ${frame.value.imbalance.toFixed(2)}` : ""}`; });
// The window before the newest plan: asked for while it is compared with, and again after a fault
// that passes. That there is none is an answer (404).
const again = signal(0);
effect(() => {
  const newest = marks.value.at(-1)?.plan_id ?? "";
  const known = before.peek();
  if (mode.value !== "change" || (known?.plan_id === newest && again.value === (known.asked ?? again.value))) return;
  const asked = again.value;
  ask("/api/v1/frame?before_plan=1").then(({ ok, data, error }) => {
    if ((marks.peek().at(-1)?.plan_id ?? "") !== newest) return;
    if (ok) { before.value = { plan_id: newest, frame: readFrame(data) }; return; }
    const passes = error.status !== 404;
    before.value = { plan_id: newest, frame: null, why: error.message, asked: passes ? asked : undefined };
    if (passes) setTimeout(() => { again.value += 1; }, RETRY_MS);
  });
});

addEventListener("keydown", (event) => {
  // Here and not at the panel: the key may come before the focus has moved there.
  if (event.key === "Escape" && chosen.peek() && !(event.target instanceof Element && event.target.closest("dialog"))) { closeExpert(); return; }
  const typing = event.target instanceof Element && event.target.closest("input, select, textarea, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    view.value = "overview";
    requestAnimationFrame(() => document.getElementById("jump")?.focus());
  } else if (event.key === "p") held.value = !held.value;
});

const Tabs = () => html`<div class="bar-of-tabs"><div class="tabs" role="tablist" aria-label="Views" onKeyDown=${onTabKey}>${VIEWS.map((key) => html`
  <button type="button" role="tab" id=${`tab-${key}`} aria-controls="view" tabindex=${view.value === key ? 0 : -1} aria-selected=${view.value === key} onClick=${() => { view.value = key; }}>${NAMES[/** @type {keyof typeof NAMES} */ (key)]}</button>`)}</div><${Controls}/></div>`;

function View() {
  switch (view.value) {
    case "devices": return html`<${Devices} full=${true}/>`;
    case "timeline": return html`<${TimelineCard} key="full" full=${true}/>`;
    case "moves": return html`<${MovesCard} full=${true}/>`;
    case "plan": return html`<${PlanView}/>`;
    case "why": return html`<${WhyView}/>`;
    default: return html`<${WhyStrip}/><${HeatCard}/><div class="pair"><${Devices}/><${TimelineCard} key="small"/></div><${MovesCard}/>`;
  }
}

const App = () => html`<a class="skip" href="#view" onClick=${(/** @type {Event} */ e) => { e.preventDefault(); document.getElementById("view")?.focus(); }}>To the figures</a>
  <${Header}/><${OperatorBar}/><${Banner}/><${Tabs}/>
  <main><div id="view" role="tabpanel" tabindex="-1" aria-labelledby=${`tab-${view.value}`}><${View}/></div></main><${ExpertPanel}/><${Dialogs}/>
  <footer>Load is demand as routers counted it, one window at a time; bars are pairs as shards executed them. The same figures: <a href="/api/v1/frame">frame</a> <a href="/api/v1/placement">placement</a> <a href="/api/v1/history">history</a> <a href="/api/v1/moves">moves</a> <a href="/api/v1/plan">plan</a> <a href="/api/v1/events">events</a> <a href="/api/v1/experts.csv">experts.csv</a> <a href="/api/v1/explain">explain</a> <a href="/api/v1/openapi.json">openapi.json</a></footer>`;

const root = /** @type {HTMLElement} */ (document.getElementById("app"));
root.replaceChildren();
render(html`<${App}/>`, root);
