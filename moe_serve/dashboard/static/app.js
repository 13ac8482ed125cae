// The page: takes events in, draws. Everything it shows comes from /api/v1; it asks for nothing else.
import { render } from "./vendor/preact.js";
import { useEffect, useRef } from "./vendor/preact-hooks.js";
import { effect, signal } from "./vendor/signals.js";
import { Devices } from "./devices.js";
import { SlowRange, loadOf, readFrame, readPlacement, sayCell, short } from "./figures.js";
import { Banner, Header } from "./header.js";
import { HeatMap, SHARE_CLAMP, heatView } from "./heatmap.js";
import { HEAT, share } from "./lut.js";
import { MovesCard } from "./moves.js";
import { MODES, PHASES, cursor, dark, frame, html, layer, link, marks, merge, mode, moves, moving, now_ms, phase, placement, points, records, status, worth, beforePlan } from "./state.js";
import { listen } from "./stream.js";
import { Timeline } from "./timeline.js";

const POINTS_MAX = 3600;
const SAY_AFTER_MS = 150;
const NAMES = { load: "Load", share: "Load ÷ fair share", replicas: "Replicas", all: "All", prefill: "Prefill", decode: "Decode" };

const range = signal(/** @type {any} */ ({ low: 1, high: 2 }));
const hovered = signal(/** @type {any} */ (null));
const ranges = new Map(PHASES.map((name) => [name, new SlowRange()]));
const chooseRange = () => { const r = ranges.get(phase.value); if (r?.high) range.value = { low: r.low, high: r.high }; };

function takeFrame(/** @type {any} */ doc) {
  frame.value = readFrame(doc);
  for (const [name, slow] of ranges) slow.next(loadOf(frame.value, name).load);
  chooseRange();
  const point = { wall_s: doc.wall_s, window: doc.window, imbalance: doc.imbalance, worst_layer: Math.max(0, ...doc.layer_imbalance) };
  points.value = merge(points.value, [point], (p) => String(p.wall_s)).slice(-POINTS_MAX);
}

async function takeHistory() {
  const answer = await fetch("/api/v1/history");
  if (!answer.ok) return;
  const past = await answer.json();
  points.value = merge(past.points, points.value, (p) => String(p.wall_s)).slice(-POINTS_MAX);
  marks.value = past.marks;
}

listen({
  status: (doc) => { status.value = { ...doc, heard_ms: performance.now() }; },
  frame: takeFrame,
  placement: (doc) => { placement.value = readPlacement(doc); layer.value = Math.min(layer.value, Math.max(0, doc.layers - 1)); },
  move: (news) => { moves.value = merge(moves.value, news, (m) => `${m.plan_id}/${m.move_id}`).slice(-400); },
  record: (news) => {
    records.value = merge(records.value, news, (r) => `${r.n}/${r.wall_s}`).slice(-2000);
    if (news.some((/** @type {any} */ r) => r.outcome === "started")) takeHistory();
  },
}, (state) => { link.value = state; });
takeHistory();
setInterval(() => { now_ms.value = performance.now(); }, 500);
effect(chooseRange);
effect(() => { document.documentElement.dataset.worth = worth.value; });
effect(() => { document.title = `${worth.value === "live" ? "" : "▲ "}${placement.value?.model ?? "moe_serve"}${frame.value ? ` · imbalance ${frame.value.imbalance.toFixed(2)}` : ""}`; });

const Segments = (/** @type {any} */ { name, all, chosen }) => html`
  <div class="segments" role="group" aria-label=${name}>${all.map((/** @type {string} */ key) => html`
    <button type="button" aria-pressed=${chosen.value === key} onClick=${() => { chosen.value = key; }}>${NAMES[/** @type {keyof typeof NAMES} */ (key)]}</button>`)}</div>`;

function Legend() {
  const ramp = useRef(null);
  const table = mode.value === "share" ? share(dark.value) : HEAT;
  useEffect(() => {
    const pen = /** @type {any} */ (ramp.current).getContext("2d");
    const image = pen.createImageData(256, 1);
    for (let i = 0; i < 256; i++) image.data.set([table[3 * i], table[3 * i + 1], table[3 * i + 2], 255], 4 * i);
    pen.putImageData(image, 0, 0);
  }, [table]);
  const ends = {
    load: [`≤ ${short(range.value.low)}`, "pairs/s, log scale", `≥ ${short(range.value.high)}`],
    share: [`≤ 1/${SHARE_CLAMP}`, "1 = fair share", `≥ ${SHARE_CLAMP}×`],
    replicas: ["1", "listed replicas", "more"],
  }[/** @type {"load"} */ (mode.value)];
  return html`<div class="legend"><span>${ends[0]}</span><span class="ramp"><canvas ref=${ramp} width="256" height="1" aria-hidden="true"></canvas><small>${ends[1]}</small></span><span>${ends[2]}</span>
    ${mode.value !== "replicas" && html`<span class="chip"><i class="cold"></i>no tokens</span>`}
    <span class="chip"><i class="gone">✕</i>no replica</span>
    <span class="chip"><i class="ring"></i>moving or just moved</span></div>`;
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] };

function onKey(/** @type {KeyboardEvent} */ event) {
  const size = frame.value ?? placement.value;
  if (!size) return;
  const at = cursor.value ?? { layer: Math.min(layer.value, size.layers - 1), expert: 0 };
  const step = STEPS[/** @type {keyof typeof STEPS} */ (event.key)];
  let next = null;
  if (step && !cursor.value) next = at;
  else if (step) next = { layer: Math.min(size.layers - 1, Math.max(0, at.layer + step[0])), expert: Math.min(size.experts - 1, Math.max(0, at.expert + step[1])) };
  else if (event.key === "Home") next = { ...at, expert: 0 };
  else if (event.key === "End") next = { ...at, expert: size.experts - 1 };
  else if (event.key === "Enter") layer.value = at.layer;
  else if (event.key === "Escape") cursor.value = null;
  else return;
  event.preventDefault();
  if (next) cursor.value = next;
}

/** The chosen cell for screen readers: said once the hand has come to rest, not for each new window. */
function Spoken() {
  const line = useRef(/** @type {any} */ (null));
  useEffect(() => {
    let timer = 0;
    const stop = effect(() => {
      const cell = cursor.value;
      clearTimeout(timer);
      timer = setTimeout(() => { line.current.textContent = cell ? sayCell(frame.peek(), placement.peek(), cell) : ""; }, SAY_AFTER_MS);
    });
    return () => { clearTimeout(timer); stop(); };
  }, []);
  return html`<p class="spoken" aria-live="polite" ref=${line} data-figure="spoken"></p>`;
}

function HeatCard() {
  const canvas = useRef(/** @type {any} */ (null));
  useEffect(() => {
    const map = new HeatMap(canvas.current, (cell, chosen) => { hovered.value = cell; if (chosen) { cursor.value = cell; layer.value = cell.layer; } });
    return effect(() => {
      map.update(
        heatView({ frame: frame.value, placement: placement.value, mode: mode.value, phase: phase.value, range: range.value, dark: dark.value }),
        { cell: cursor.value ?? hovered.value, layer: layer.value, moving: moving.value },
      );
      canvas.current.dataset.window = frame.value?.window ?? "";
    });
  }, []);
  const cell = hovered.value ?? cursor.value;
  const known = frame.value ?? placement.value;
  return html`<section class="card heat">
    <div class="head"><h2>Layers × experts</h2><${Segments} name="Show" all=${MODES} chosen=${mode}/>
      ${mode.value !== "replicas" && html`<${Segments} name="Phase" all=${PHASES} chosen=${phase}/>`}<${Legend}/></div>
    <div class="map" onPointerLeave=${() => { hovered.value = null; }}>
      <canvas ref=${canvas} tabindex="0" role="application" aria-roledescription="heat map" onKeyDown=${onKey} onBlur=${() => { cursor.value = null; }}
        aria-label="Heat map, layers down, experts across. Arrows move, Page Up and Down ten layers, Home and End to the edges, Enter shows the layer's devices."></canvas>
      ${!known && html`<p class="none">No figures yet.</p>`}
      ${worth.value !== "live" && known && html`<p class="veil"><span>not live</span></p>`}</div>
    <p class="cell">${cell && known ? sayCell(frame.value, placement.value, cell) : html`<span class="muted">Point at a cell, or press Tab and use the arrow keys. Click or Enter shows the layer's devices.</span>`}</p>
    <${Spoken}/>
  </section>`;
}

function TimelineCard() {
  const host = useRef(/** @type {any} */ (null));
  const mark = useRef(signal(/** @type {any} */ (null))).current;
  useEffect(() => {
    const chart = new Timeline(host.current, (near) => { if (mark.peek() !== near) mark.value = near; });
    let wasDark = dark.peek();
    return effect(() => {
      const rebuilt = wasDark !== dark.value;
      wasDark = dark.value;
      chart.update(points.value, marks.value);
      if (rebuilt) chart.build();
    });
  }, []);
  const last = beforePlan.value?.mark;
  const shown = mark.value ?? last;
  return html`<section class="card timeline"><div class="head"><h2>Imbalance</h2>
      <span class="key"><i class="solid"></i>all layers</span><span class="key"><i class="dashed"></i>worst layer</span><span class="key"><i class="tri">▼</i>plan begins</span></div>
    <div class="plot" ref=${host} role="img" aria-label="Imbalance over time"></div>
    <p class="cell">${shown ? html`<b>${mark.value ? "Plan" : "Last plan"} ${shown.plan_id}</b> ${shown.detail} <span class="muted">(${shown.rule}, ${new Date(1000 * shown.wall_s).toLocaleTimeString([], { hourCycle: "h23" })})</span>` : html`<span class="muted">No plan has begun since the page started.</span>`}</p>
  </section>`;
}

const App = () => html`<${Header}/><${Banner}/><main><${HeatCard}/><div class="pair"><${Devices} range=${range.value}/><${TimelineCard}/></div><${MovesCard}/></main>
  <footer>Read-only. Load is demand as routers counted it, one window at a time; bars are pairs as shards executed them. <a href="/api/v1/frame">frame</a> <a href="/api/v1/placement">placement</a> <a href="/api/v1/events?after=0">events</a></footer>`;

const root = /** @type {HTMLElement} */ (document.getElementById("app"));
root.replaceChildren();
render(html`<${App}/>`, root);
