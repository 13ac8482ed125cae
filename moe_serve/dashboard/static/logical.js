// The map card: layers x experts with its modes, scale, keys, zoom, jump, and the 50 hottest in words.
import { useEffect, useRef } from "./vendor/preact-hooks.js";
import { effect, signal } from "./vendor/signals.js";
import { HeatMap } from "./heatmap.js";
import { SHARE_CLAMP, columnOf, expertAt, heatView, showing, zoomed } from "./heatview.js";
import { HottestTable } from "./hottest.js";
import { HEAT, share } from "./lut.js";
import { PhaseChoice, Segments } from "./segments.js";
import { before, cursor, dark, frame, held, html, moving, newest, placement, range, worth } from "./state.js";
import { MODES, SORTS, chosen, hottest, layer, mode, phase, readCell, sort, zoom } from "./url.js";
import { sayCell, short } from "./words.js";

const SAY_AFTER_MS = 150;
const MODE_NAMES = { load: "Load", share: "Load ÷ fair share", replicas: "Replicas", change: "Change since last plan" };
const SORT_NAMES = { id: "Id", load: "Load", device: "Rank" };
const SORT_SAYS = { id: "Columns in the order of expert ids", load: "Each layer's experts, the hottest first", device: "Each layer's experts by the lowest rank that holds them" };
const KEYS = "Arrows move, Page Up and Down ten layers, Home and End to the edges, Enter or click opens the expert, + − 0 or a drag zoom, / goes to an expert, p holds the picture.";
const hovered = signal(/** @type {any} */ (null));
const wrongJump = signal("");
/** What is drawn now; keys and jumps reckon with it. */
let drawn = /** @type {any} */ (null);

function Legend() {
  const ramp = useRef(/** @type {any} */ (null));
  const table = mode.value === "share" || mode.value === "change" ? share(dark.value) : HEAT;
  useEffect(() => {
    const pen = ramp.current.getContext("2d");
    const image = pen.createImageData(256, 1);
    for (let i = 0; i < 256; i++) image.data.set([table[3 * i], table[3 * i + 1], table[3 * i + 2], 255], 4 * i);
    pen.putImageData(image, 0, 0);
  }, [table]);
  const ends = {
    load: [`≤ ${short(range.value.low)}`, "pairs/s, log scale", `≥ ${short(range.value.high)}`],
    share: [`≤ 1/${SHARE_CLAMP}`, "1 = fair share", `≥ ${SHARE_CLAMP}×`],
    replicas: ["1", "listed replicas", "more"],
    change: [`≤ 1/${SHARE_CLAMP}`, "load a replica, now ÷ then", `≥ ${SHARE_CLAMP}×`],
  }[/** @type {"load"} */ (mode.value)];
  return html`<div class="legend"><span class="scale"><span>${ends[0]}</span><span class="ramp"><canvas ref=${ramp} width="256" height="1" aria-hidden="true"></canvas><small>${ends[1]}</small></span><span>${ends[2]}</span></span>
    ${mode.value !== "replicas" && html`<span class="chip"><i class="cold">–</i>no tokens</span>`}
    <span class="chip"><i class="what">?</i>unknown</span>
    <span class="chip"><i class="gone">✕</i>no replica</span>
    <span class="chip"><i class="ring"></i>moving or just moved</span></div>`;
}

/** Put the keys' cell somewhere, the part that is shown along with it. */
function put(/** @type {{layer: number, expert: number}} */ cell) {
  if (drawn) zoom.value = showing(zoom.value, cell.layer, columnOf(drawn, cell.layer, cell.expert));
  cursor.value = cell;
}

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-10, 0], PageDown: [10, 0] };
const FACTORS = { "+": 0.5, "=": 0.5, "-": 2, "_": 2 };

function zoomBy(/** @type {number} */ factor) {
  if (!drawn) return;
  const cell = cursor.value;
  zoom.value = zoomed(drawn, cell ? { layer: cell.layer, column: columnOf(drawn, cell.layer, cell.expert) } : null, factor);
}

function onKey(/** @type {KeyboardEvent} */ event) {
  const v = drawn;
  if (!v || event.ctrlKey || event.metaKey || event.altKey) return;
  const [a, , c] = v.part;
  const at = cursor.value;
  const step = STEPS[/** @type {keyof typeof STEPS} */ (event.key)];
  const factor = FACTORS[/** @type {keyof typeof FACTORS} */ (event.key)];
  const start = () => {
    const row = Math.min(v.layers - 1, Math.max(a, Math.min(layer.value, v.part[1])));
    return { layer: row, expert: expertAt(v, row, c) };
  };
  if (step && !at) put(start());
  else if (step) {
    const row = Math.min(v.layers - 1, Math.max(0, at.layer + step[0]));
    const column = Math.min(v.experts - 1, Math.max(0, columnOf(v, at.layer, at.expert) + step[1]));
    put({ layer: row, expert: expertAt(v, row, column) });
  } else if (event.key === "Home" || event.key === "End") {
    const row = (at ?? start()).layer;
    put({ layer: row, expert: expertAt(v, row, event.key === "Home" ? 0 : v.experts - 1) });
  } else if (event.key === "Enter") {
    const cell = at ?? start();
    cursor.value = cell;
    layer.value = cell.layer;
    chosen.value = cell;
  } else if (factor) zoomBy(factor);
  else if (event.key === "0") zoom.value = null;
  else if (event.key === "Escape" && at && !chosen.value) cursor.value = null;
  else return;
  event.preventDefault();
}

/** The chosen cell for screen readers: said once the hand has come to rest, not for each new window. */
function Spoken() {
  const line = useRef(/** @type {any} */ (null));
  useEffect(() => {
    let timer = 0;
    const stop = effect(() => {
      const cell = cursor.value;
      clearTimeout(timer);
      timer = setTimeout(() => { if (line.current) line.current.textContent = cell ? sayCell(frame.peek(), placement.peek(), cell) : ""; }, SAY_AFTER_MS);
    });
    return () => { clearTimeout(timer); stop(); };
  }, []);
  return html`<p class="spoken" aria-live="polite" ref=${line} data-figure="spoken"></p>`;
}

/** "/" puts the hand here, Enter goes there. */
function Jump(/** @type {any} */ { canvas }) {
  const go = (/** @type {Event} */ event) => {
    event.preventDefault();
    const input = /** @type {HTMLInputElement} */ (/** @type {HTMLFormElement} */ (event.target).elements.namedItem("cell"));
    const cell = readCell(input.value);
    if (!drawn) wrongJump.value = "Nothing is known yet.";
    else if (!cell) wrongJump.value = "Write layer and expert as L17 E203.";
    else if (cell.layer >= drawn.layers || cell.expert >= drawn.experts) wrongJump.value = `There are layers 0 to ${drawn.layers - 1} and experts 0 to ${drawn.experts - 1}.`;
    else {
      wrongJump.value = "";
      input.value = "";
      layer.value = cell.layer;
      canvas.current.focus();
      put(cell);
    }
  };
  return html`<form class="jump" onSubmit=${go}><label>go to <input id="jump" name="cell" placeholder="L17 E203" size="9" autocomplete="off" spellcheck=${false}
    aria-invalid=${wrongJump.value !== ""} aria-describedby="jump-wrong" title="Press / to come here"
    onKeyDown=${(/** @type {KeyboardEvent} */ e) => { if (e.key === "Escape") { wrongJump.value = ""; canvas.current.focus(); } }}/></label>
    <span id="jump-wrong" class="problem" role="alert">${wrongJump.value}</span></form>`;
}

function Zooms() {
  const z = zoom.value;
  return html`<div class="segments zooms" role="group" aria-label="Zoom">
    <button type="button" aria-label="Zoom in" title="Zoom in: drag on the map, or press +" onClick=${() => zoomBy(0.5)}>+</button>
    <button type="button" aria-label="Zoom out" title="Zoom out: press -" disabled=${!z} onClick=${() => zoomBy(2)}>−</button>
    <button type="button" aria-label="Show all" title="Show all: double click, or press 0" disabled=${!z} onClick=${() => { zoom.value = null; }}>${z ? `L${z[0]}–${z[1]} · ${sort.value === "id" ? "E" : "#"}${z[2]}–${z[3]} ✕` : "all"}</button></div>`;
}

/** Why there is no picture of the chosen kind, "" where there is one. */
function unseen() {
  if (!frame.value && !placement.value) return "No figures yet.";
  if (mode.value === "replicas") return placement.value ? "" : "No placement yet.";
  if (!frame.value) return "No window has closed yet: load is unknown.";
  if (mode.value !== "change" || before.value?.frame) return "";
  return before.value ? `Nothing to compare with: ${before.value.why}` : "Asking for the window before the last plan.";
}

export function HeatCard() {
  const canvas = useRef(/** @type {any} */ (null));
  useEffect(() => {
    const map = new HeatMap(canvas.current, {
      point: (cell) => { hovered.value = cell; },
      choose: (cell) => { canvas.current.focus(); cursor.value = cell; layer.value = cell.layer; chosen.value = cell; },
      zoom: (part) => { zoom.value = part; },
    });
    const stop = effect(() => {
      drawn = heatView({
        frame: newest.value, placement: placement.value, past: before.value?.frame, mode: mode.value, phase: phase.value,
        sort: sort.value, zoom: zoom.value, range: range.value, dark: dark.value,
      });
      if (drawn) drawn.stamp = newest.value?.window ?? "";
      map.show(drawn);
    });
    const mark = effect(() => map.mark({ cell: cursor.value ?? hovered.value, layer: layer.value, moving: moving.value }));
    return () => { stop(); mark(); map.close(); };
  }, []);
  const cell = hovered.value ?? cursor.value;
  const known = frame.value ?? placement.value;
  const why = unseen();
  const change = mode.value === "change" && drawn?.change ? drawn.change : null;
  return html`<section class="card heat" aria-label="Layers and experts">
    <div class="head"><h2>Layers × experts</h2><${Segments} name="Show" all=${MODES} picked=${mode} names=${MODE_NAMES}/>
      ${mode.value !== "replicas" && html`<${PhaseChoice}/>`}
      <span class="ordering"><span class="lead">columns by</span><${Segments} name="Order of columns" all=${SORTS} picked=${sort} names=${SORT_NAMES} titles=${SORT_SAYS}/></span></div>
    <div class="map" onPointerLeave=${() => { hovered.value = null; }}>
      <canvas ref=${canvas} id="map" tabindex="0" role="application" aria-roledescription="heat map" onKeyDown=${onKey} onBlur=${() => { if (!chosen.value) cursor.value = null; }}
        aria-describedby="map-keys" aria-label="Heat map, layers down, experts across"></canvas>
      ${why && html`<p class="none" data-figure="unseen">${why}</p>`}
      ${held.value && html`<p class="veil"><span>held: press p to go on</span></p>`}
      ${worth.value !== "live" && known && html`<p class="veil"><span>not live</span></p>`}</div>
    <p class="cell">${cell && known ? sayCell(frame.value, placement.value, cell, change) : html`<span class="muted">${KEYS}</span>`}</p>
    <p class="spoken" id="map-keys">${KEYS}</p>
    <${Spoken}/>
    <div class="foot"><${Legend}/><${Zooms}/><${Jump} canvas=${canvas}/>
      <button type="button" class="quiet" aria-pressed=${held.value} onClick=${() => { held.value = !held.value; }}>${held.value ? "Go on" : "Hold"}</button>
      <button type="button" class="quiet" aria-expanded=${hottest.value} aria-controls="hottest" onClick=${() => { hottest.value = !hottest.value; }}>50 hottest</button></div>
    <div id="hottest">${hottest.value && html`<${HottestTable}/>`}</div>
  </section>`;
}
