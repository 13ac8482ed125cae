// Moves and decisions: what, from where to where, how many bytes, how far, and why.
import { signal } from "./vendor/signals.js";
import { folded, frame, html, layer, moves, phase, placement, wall_s } from "./state.js";
import { fairShare, loadOf, mib, short, span } from "./figures.js";

const SHOWN = 100;
const HOTTEST = 20;
export const KINDS = { replicate: "+", migrate: "→", evict: "−" };
const STATES = { planned: "◌", running: "⇄", done: "✓", aborted: "✕", dropped: "✕" };
const TABS = [["moves", "Moves"], ["decisions", "Decisions"], ["hottest", "Hottest experts"]];
const tab = signal("moves");

const ago = (/** @type {number | null} */ at_s) => (at_s && wall_s.value ? `${span(Math.max(0, wall_s.value - at_s))} ago` : "–");

function When(/** @type {any} */ { move }) {
  if (move.ended_wall_s) return html`${ago(move.ended_wall_s)}<small> took ${span(move.ended_at_s - move.started_at_s)}</small>`;
  return move.started_wall_s ? html`since ${ago(move.started_wall_s).replace(" ago", "")}` : "–";
}

function Moves() {
  const all = [...moves.value].reverse();
  if (!all.length) return html`<p class="none">Nothing has moved yet. A move appears here with its reason as soon as a plan begins.</p>`;
  return html`<table data-figure="moves"><thead><tr><th>Kind</th><th>Expert</th><th>Rank</th><th class="r">Bytes</th><th>State</th><th>When</th><th>Reason</th></tr></thead>
    <tbody>${all.slice(0, SHOWN).map((m) => html`<tr key=${`${m.plan_id}/${m.move_id}`} class=${`is-${m.state}`}>
      <td><span class=${`kind k-${m.kind}`}><span aria-hidden="true">${KINDS[/** @type {keyof typeof KINDS} */ (m.kind)] ?? "?"}</span> ${m.kind}</span></td>
      <td><button type="button" class="link" onClick=${() => { layer.value = m.layer; }}>L${m.layer} E${m.expert}</button></td>
      <td class="n">${m.kind === "evict" ? `off ${m.source_rank}` : `${m.source_rank} → ${m.target_rank}`}${m.cross_node && html` <small>cross-node</small>`}</td>
      <td class="r n">${mib(m.copy_bytes)}</td>
      <td><span class=${`state s-${m.state}`}><span aria-hidden="true">${STATES[/** @type {keyof typeof STATES} */ (m.state)] ?? "?"}</span> ${m.state}</span></td>
      <td class="n"><${When} move=${m}/></td>
      <td class="why">${m.reason}</td></tr>`)}</tbody></table>`;
}

const number = (/** @type {[string, number]} */ [name, n]) => `${name} ${Math.abs(n) >= 1000 ? short(n) : Number(n.toPrecision(3))}`;

function Decisions() {
  if (!folded.value.length) return html`<p class="none">No decision yet.</p>`;
  return html`<table><thead><tr><th>When</th><th>Rule</th><th>Outcome</th><th>What it saw</th></tr></thead>
    <tbody>${folded.value.slice(0, SHOWN).map((r) => html`<tr key=${r.n}>
      <td class="n">${ago(r.wall_s)}</td><td>${r.rule}${r.times > 1 && html` <small>×${r.times}</small>`}</td><td><span class=${`state s-${r.outcome}`}>${r.outcome}</span></td>
      <td class="why">${r.detail}${r.detail && Object.keys(r.numbers).length ? " · " : ""}<small>${Object.entries(r.numbers).filter(([, n]) => n != null).map((x) => number(/** @type {any} */ (x))).join(", ")}</small></td></tr>`)}</tbody></table>`;
}

/** The map as words: the hottest cells. */
function Hottest() {
  const f = frame.value;
  if (!f) return html`<p class="none">No window yet.</p>`;
  const { load, layerSum } = loadOf(f, phase.value);
  const order = Array.from(load.keys()).sort((a, b) => load[b] - load[a] || a - b).slice(0, HOTTEST);
  return html`<table><thead><tr><th>Expert</th><th class="r">Pairs/s</th><th class="r">Fair share</th><th class="r">Replicas</th></tr></thead>
    <tbody>${order.map((i) => html`<tr key=${i}><td>L${Math.floor(i / f.experts)} E${i % f.experts}</td><td class="r n">${short(load[i])}</td>
      <td class="r n">${layerSum[Math.floor(i / f.experts)] > 0 ? `${fairShare(load[i], layerSum[Math.floor(i / f.experts)], f.experts).toFixed(2)}×` : "–"}</td>
      <td class="r n">${placement.value?.replicas[i] ?? "–"}</td></tr>`)}</tbody></table>`;
}

export function MovesCard() {
  return html`<section class="card moves">
    <div class="head"><div class="segments" role="tablist" aria-label="Lists">${TABS.map(([key, name]) => html`
      <button type="button" role="tab" aria-selected=${tab.value === key} onClick=${() => { tab.value = key; }}>${name}</button>`)}</div></div>
    <div class="scroll" role="tabpanel" tabindex="0" aria-label=${tab.value}>${tab.value === "moves" ? html`<${Moves}/>` : tab.value === "decisions" ? html`<${Decisions}/>` : html`<${Hottest}/>`}</div>
  </section>`;
}
