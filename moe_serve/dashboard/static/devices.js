// Devices x slots of one layer: who holds what, what is on its way, which rank carries most, and
// what each rank's memory is used for.
import { SHARE_CLAMP } from "./heatview.js";
import { fairShare, loadOf, onScale } from "./figures.js";
import { HEAT, at, css, ink, share } from "./lut.js";
import { MemoryBar, memoryOf, sayMemory } from "./memory.js";
import { PhaseChoice } from "./segments.js";
import { cursor, dark, frame, html, placement, range, ranks } from "./state.js";
import { chosen, layer, mode, phase } from "./url.js";
import { mib, short, span } from "./words.js";

/** Words and signs of a slot's state; state is never said by colour alone. */
const SAY = {
  LISTED: ["", "", ""],
  PLANNED: ["planned", "◌", "in"],
  RESERVED: ["reserved", "◌", "in"],
  COPYING: ["copying", "↓", "in"],
  VERIFIED: ["verified", "✓", "in"],
  ABORTING: ["aborting", "✕", "in"],
  UNLISTED: ["unlisted", "↑", "out"],
  ACKED: ["draining", "↑", "out"],
  DRAINED: ["drained", "↑", "out"],
  RECALLED: ["recalled", "↺", "out"],
};

/** Slots of one rank that hold the layer, by expert, and its empty ones. */
function slotsOf(/** @type {any} */ p, /** @type {number} */ row, /** @type {number} */ wanted) {
  const held = [];
  let empty = 0;
  for (let s = 0; s < p.width; s++) {
    const i = row * p.width + s;
    const pair = p.pair[i];
    if (pair === -1) empty += 1;
    else if (pair >= 0 && Math.floor(pair / p.experts) === wanted) held.push({ slot: s, pair, expert: pair % p.experts, state: p.states[p.slotState[i]] });
  }
  return { held: held.sort((a, b) => a.expert - b.expert), empty };
}

/** What the colour of a slot is, by the mode of the map. */
const COLOURS = {
  load: "load a replica", share: "load a replica ÷ fair share", replicas: "listed replicas",
  change: "load a replica (the change since the last plan is on the map only)",
};
const PHASE_SAYS = { all: "both phases", prefill: "prefill", decode: "decode" };
const phaseWords = () => PHASE_SAYS[/** @type {keyof typeof PHASE_SAYS} */ (phase.value)];

/** Colour of an expert: its load spread over its replicas, or the mode's own figure, as COLOURS says. */
function colourOf(/** @type {any} */ figures, /** @type {any} */ p, /** @type {number} */ pair) {
  const n = Math.max(1, p.replicas[pair]);
  if (mode.value === "replicas") return at(HEAT, Math.min(1, 0.12 + (n - 1) / 3));
  if (!figures || !(figures.load[pair] > 0)) return null;
  if (mode.value === "share") {
    const x = fairShare(figures.load[pair] / n, figures.layerSum[Math.floor(pair / p.experts)], p.experts);
    return at(share(dark.value), 0.5 + Math.log2(x) / (2 * Math.log2(SHARE_CLAMP)));
  }
  return at(HEAT, onScale(figures.load[pair] / n, range.value));
}

function Slot(/** @type {any} */ { slot, p, figures, at: wanted }) {
  const [word, sign, way] = SAY[/** @type {keyof typeof SAY} */ (slot.state)] ?? [slot.state.toLowerCase(), "?", "in"];
  const rgb = colourOf(figures, p, slot.pair);
  const n = p.replicas[slot.pair];
  const listed = way === "";
  const load = figures ? `${short(figures.load[slot.pair])} pairs/s of ${phaseWords()} over ${n} listed replica${n === 1 ? "" : "s"}` : "load unknown";
  const cell = { layer: wanted, expert: slot.expert };
  const says = `expert ${slot.expert}, slot ${slot.slot}${word ? `, ${word}` : ""}. ${load}`;
  return html`<li class=${`slot ${way} ${listed && n > 1 ? "many" : ""}`} style=${listed ? { background: rgb ? css(rgb) : "var(--cold)", color: rgb ? ink(rgb) : "var(--ink)" } : {}}>
    <button type="button" title=${says} onClick=${() => { cursor.value = cell; chosen.value = cell; }}>${sign && html`<i aria-hidden="true">${sign}</i>`}E${slot.expert}${listed && n > 1 ? html`<sub>×${n}</sub>` : ""}${word && html`<em>${word}</em>`}</button></li>`;
}

function TokensBar(/** @type {any} */ { n, mean, most }) {
  return html`<span class="bar" title=${`${short(n)} pairs/s of both phases executed, ${mean > 0 ? (n / mean).toFixed(2) : "–"}× the mean of the ranks`}>
    <span class="fill" style=${{ width: `${(100 * n) / most}%` }}></span><span class="mean" style=${{ left: `${(100 * mean) / most}%` }}></span></span>`;
}

/** Copies that run into a rank now. */
function Copies(/** @type {any} */ { copies }) {
  if (!copies?.length) return null;
  return html`<span class="copies">${copies.map((/** @type {any} */ c) => html`<span key=${c.step_id}>↓ L${c.layer} E${c.expert} from ${c.source || "?"}
    <progress max=${Math.max(1, c.total_bytes)} value=${c.done_bytes} aria-label=${`copy of layer ${c.layer} expert ${c.expert}`}></progress> ${c.done_bytes ? mib(c.done_bytes) : "0"} of ${mib(c.total_bytes)}, ${span(c.seconds)}</span>`)}</span>`;
}

function RankRow(/** @type {any} */ { r, p, wanted, figures, pairs, mean, most, full }) {
  const { held, empty } = slotsOf(p, r.row, wanted);
  const memory = memoryOf(r, p);
  return html`<li class=${`rank is-${r.state}`}>
    <span class="name" title=${`${r.node} · ${r.profile}`}>rank ${r.rank}<small>${r.state === "up" ? r.node : html`<b>${r.state}</b>`}</small></span>
    <span class="bars"><${TokensBar} n=${pairs} mean=${mean} most=${most}/><${MemoryBar} memory=${memory}/></span>
    <span class="num">${short(pairs)}<small>${memory.free ? mib(memory.free) : "none"} free</small></span>
    <span class="body"><ul class="slots" aria-label=${`Slots of rank ${r.rank}`}>${held.map((slot) => html`<${Slot} key=${slot.slot} slot=${slot} p=${p} figures=${figures} at=${wanted}/>`)}
      ${empty > 0 && html`<li class="slot free" title="empty slots of this rank, for any layer">${empty} free</li>`}</ul>
      ${full && html`<p class="memory-words">${sayMemory(memory, r)}</p>`}<${Copies} copies=${r.copies}/></span></li>`;
}

export function Devices(/** @type {any} */ { full = false }) {
  const p = placement.value;
  if (!p) return html`<section class="card devices"><h2>Devices</h2><p class="none">No placement yet.</p></section>`;
  const wanted = Math.min(layer.value, Math.max(0, p.layers - 1));
  const f = frame.value && frame.value.experts === p.experts ? frame.value : null;
  const figures = f ? loadOf(f, phase.value) : null;
  const pairs = new Map(ranks.value.map((/** @type {any} */ r) => [r.rank, f && r.row < f.ranks ? f.rankPairs[r.row * f.layers + wanted] : 0]));
  const all = [...pairs.values()];
  const mean = all.reduce((a, b) => a + b, 0) / Math.max(1, all.length);
  const most = Math.max(1e-9, ...all);
  const uneven = f?.layer_imbalance?.[wanted];
  return html`<section class=${`card devices ${full ? "full" : ""}`} aria-label="Devices and slots">
    <div class="head"><h2>Devices × slots</h2>
      <label>layer <select value=${String(wanted)} onChange=${(/** @type {any} */ e) => { layer.value = Number(e.target.value); }}>
        ${Array.from({ length: p.layers }, (_, n) => html`<option value=${String(n)} selected=${n === wanted}>L${n}</option>`)}</select></label>
      ${full && html`<${PhaseChoice}/>`}
      ${uneven != null && html`<span class="muted">imbalance ${uneven.toFixed(2)}</span>`}
      <span class="legend"><span class="chip" data-figure="colour" title="The figure is chosen above the map of the overview">colour: ${COLOURS[/** @type {keyof typeof COLOURS} */ (mode.value)]}${mode.value === "replicas" ? "" : `, ${phaseWords()}`}</span>
        <span class="chip"><i class="k-tokens"></i>bar: pairs/s of both phases, tick: mean</span><span class="chip"><i class="k-experts"></i>experts</span><span class="chip"><i class="k-staging"></i>staging</span><span class="chip"><i class="k-room"></i>free</span><span class="chip"><i class="k-many"></i>one of several</span></span></div>
    <div class="scroll" tabindex="0" role="group" aria-label="Ranks"><ol class="ranks">
    ${ranks.value.map((/** @type {any} */ r) => html`<${RankRow} key=${r.rank} r=${r} p=${p} wanted=${wanted} figures=${figures} pairs=${pairs.get(r.rank)} mean=${mean} most=${most} full=${full}/>`)}</ol></div>
  </section>`;
}
