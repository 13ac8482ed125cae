// Devices x slots of one layer: who holds what, what is on its way, and which rank carries most.
import { dark, frame, html, layer, mode, phase, placement } from "./state.js";
import { fairShare, loadOf, mib, onScale, short } from "./figures.js";
import { HEAT, at, css, ink, share } from "./lut.js";
import { SHARE_CLAMP } from "./heatmap.js";

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
function slotsOf(/** @type {any} */ p, /** @type {number} */ row, /** @type {number} */ chosen) {
  const held = [];
  let empty = 0;
  for (let s = 0; s < p.width; s++) {
    const i = row * p.width + s;
    const pair = p.pair[i];
    if (pair === -1) empty += 1;
    else if (pair >= 0 && Math.floor(pair / p.experts) === chosen) held.push({ slot: s, pair, expert: pair % p.experts, state: p.states[p.slotState[i]] });
  }
  return { held: held.sort((a, b) => a.expert - b.expert), empty };
}

/** Colour of an expert: its load spread over its replicas, or the mode's own figure. */
function colourOf(/** @type {any} */ figures, /** @type {any} */ p, /** @type {number} */ pair, /** @type {any} */ range) {
  const n = Math.max(1, p.replicas[pair]);
  if (mode.value === "replicas") return at(HEAT, Math.min(1, 0.12 + (n - 1) / 3));
  if (!figures || !(figures.load[pair] > 0)) return null;
  if (mode.value === "share") {
    const x = fairShare(figures.load[pair] / n, figures.layerSum[Math.floor(pair / p.experts)], p.experts);
    return at(share(dark.value), 0.5 + Math.log2(x) / (2 * Math.log2(SHARE_CLAMP)));
  }
  return at(HEAT, onScale(figures.load[pair] / n, range));
}

function Slot(/** @type {any} */ { slot, p, figures, range }) {
  const [word, sign, way] = SAY[/** @type {keyof typeof SAY} */ (slot.state)] ?? [slot.state.toLowerCase(), "?", "in"];
  const rgb = colourOf(figures, p, slot.pair, range);
  const n = p.replicas[slot.pair];
  const listed = way === "";
  const load = figures ? `${short(figures.load[slot.pair])} pairs/s over ${n} listed replica${n === 1 ? "" : "s"}` : "";
  return html`<li class=${`slot ${way}`} style=${listed ? { background: rgb ? css(rgb) : "var(--cold)", color: rgb ? ink(rgb) : "var(--muted)" } : {}}
    title=${`expert ${slot.expert}, slot ${slot.slot}${word ? `, ${word}` : ""}. ${load}`}>
    ${sign && html`<i aria-hidden="true">${sign}</i>`}E${slot.expert}${listed && n > 1 ? html`<sub>×${n}</sub>` : ""}${word && html`<em>${word}</em>`}</li>`;
}

function Bar(/** @type {any} */ { n, mean, most }) {
  return html`<span class="bar" title=${`${short(n)} pairs/s executed, ${mean > 0 ? (n / mean).toFixed(2) : "–"}× the mean of the ranks`}>
    <span class="fill" style=${{ width: `${(100 * n) / most}%` }}></span><span class="mean" style=${{ left: `${(100 * mean) / most}%` }}></span></span>
    <span class="num">${short(n)}</span>`;
}

export function Devices(/** @type {any} */ { range }) {
  const p = placement.value;
  if (!p) return html`<section class="card devices"><h2>Devices</h2><p class="none">No placement yet.</p></section>`;
  const chosen = Math.min(layer.value, p.layers - 1);
  const f = frame.value && frame.value.experts === p.experts ? frame.value : null;
  const figures = f ? loadOf(f, phase.value) : null;
  const pairs = p.ranks.map((/** @type {any} */ _r, /** @type {number} */ i) => (f && i < f.ranks ? f.rankPairs[i * f.layers + chosen] : 0));
  const there = p.ranks.filter((/** @type {any} */ r) => r.state !== "removed").length;
  const mean = pairs.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0) / Math.max(1, there);
  const most = Math.max(1e-9, ...pairs);
  return html`<section class="card devices" aria-label="Devices and slots">
    <div class="head"><h2>Devices × slots</h2>
      <label>layer <select value=${chosen} onChange=${(/** @type {any} */ e) => { layer.value = Number(e.target.value); }}>
        ${Array.from({ length: p.layers }, (_, n) => html`<option value=${n} selected=${n === chosen}>L${n}</option>`)}</select></label>
      <span class="note">${mode.value === "replicas" ? "colour: replicas" : "colour: demand ÷ replicas"} · bar: pairs/s executed, tick: mean of the ranks</span></div>
    <div class="scroll" tabindex="0" role="group" aria-label="Ranks"><ol class="ranks">
    ${p.ranks.map((/** @type {any} */ r, /** @type {number} */ i) => {
      if (r.state === "removed") return null; // it has left; its number only is kept
      const { held, empty } = slotsOf(p, i, chosen);
      return html`<li class=${`rank is-${r.state}`}>
        <span class="name" title=${`${r.node} · ${r.profile} · ${mib(r.resident_bytes)} of ${mib(r.budget_bytes)}`}>rank ${r.rank}<small>${r.state === "up" ? r.node : r.state}</small></span>
        <${Bar} n=${pairs[i]} mean=${mean} most=${most}/>
        <ul class="slots">${held.map((slot) => html`<${Slot} key=${slot.slot} slot=${slot} p=${p} figures=${figures} range=${range}/>`)}
          ${empty > 0 && html`<li class="slot free" title="empty slots of this rank, for any layer">${empty} free</li>`}</ul></li>`;
    })}</ol></div>
  </section>`;
}
