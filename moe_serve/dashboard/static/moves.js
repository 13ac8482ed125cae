// Moves and decisions: what, from where to where, how many bytes, how far, why, and what it gained.
import { ExpertLink } from "./hottest.js";
import { Lately, lately, spanWords } from "./lately.js";
import { UNFINISHED, folded, html, moves, wall_s } from "./state.js";
import { LISTS, MOVE_FILTERS, filter, list, showPlan, since, view } from "./url.js";
import { gain, mib, short, span } from "./words.js";

const SHOWN = 200;
const SHOWN_FEW = 8;
export const KINDS = { replicate: "+", migrate: "→", evict: "−" };
const STATES = { planned: "◌", running: "⇄", done: "✓", aborted: "✕", dropped: "✕" };
/** States that a choice of the filter means. */
const MEANS = { all: null, running: UNFINISHED, done: ["done"], aborted: ["aborted", "dropped"] };
const LIST_NAMES = { moves: "Moves", decisions: "Decisions" };

const ago = (/** @type {number | null} */ at_s) => (at_s && wall_s.value ? `${span(Math.max(0, wall_s.value - at_s))} ago` : "–");

function When(/** @type {any} */ { move }) {
  if (move.ended_wall_s) return html`${ago(move.ended_wall_s)}<small> took ${span(move.ended_at_s - move.started_at_s)}</small>`;
  return move.started_wall_s ? html`since ${ago(move.started_wall_s).replace(" ago", "")}` : "–";
}

/** What a move removes so that what it adds fits: "in place of L1 E3", "" where nothing. */
export const inPlaceOf = (/** @type {any} */ m) => (m.room?.length ? `in place of ${m.room.map((/** @type {any} */ r) => `L${r.layer} E${r.expert}`).join(", ")}` : "");

/** Rows of moves; the plan view shows its own with `timed` off. */
export function MoveRows(/** @type {any} */ { all, timed = true }) {
  return all.map((/** @type {any} */ m) => html`<tr key=${`${m.plan_id}/${m.move_id}`} class=${`is-${m.state}`}>
    <td><span class=${`kind k-${m.kind}`}><span aria-hidden="true">${KINDS[/** @type {keyof typeof KINDS} */ (m.kind)] ?? "?"}</span> ${m.kind}</span></td>
    <td><${ExpertLink} at=${m.layer} expert=${m.expert}/></td>
    <td class="n">${m.kind === "evict" ? `off ${m.source_rank}` : `${m.source_rank < 0 ? "checkpoint" : m.source_rank} → ${m.target_rank}`}${m.cross_node && m.source_rank >= 0 && html` <small>cross-node</small>`}${m.room?.length > 0 && html` <small>${inPlaceOf(m)}</small>`}</td>
    <td class="r n">${mib(m.copy_bytes)}</td>
    <td><span class=${`state s-${m.state}`}><span aria-hidden="true">${STATES[/** @type {keyof typeof STATES} */ (m.state)] ?? "?"}</span> ${m.state}</span></td>
    ${timed && html`<td class="n"><${When} move=${m}/></td>`}
    <td class="r n">${gain(m.gain_s_per_s)}</td>
    ${timed && html`<td class="r n">${gain(m.realised_gain_s_per_s)}${m.realised_gain_s_per_s != null && m.plan_expected_gain_s_per_s != null ? html` <small>of ${gain(m.plan_expected_gain_s_per_s)}</small>` : ""}</td>`}
    <td class="why">${m.reason}</td>
    ${timed && html`<td>${m.plan_id && html`<button type="button" class="link" onClick=${() => showPlan(m.plan_id)}>${m.plan_id}</button>`}</td>`}</tr>`);
}

export const MoveHead = (/** @type {any} */ { timed = true }) => html`<thead><tr><th scope="col">Kind</th><th scope="col">Expert</th><th scope="col">Rank</th><th scope="col" class="r">Bytes</th><th scope="col">State</th>${timed && html`<th scope="col">When</th>`}
  <th scope="col" class="r" title="Seconds of the busiest ranks that the plan said this move saves a second">Predicted</th>${timed && html`<th scope="col" class="r" title="Measured after its plan, of what the whole plan said">Plan realised</th>`}<th scope="col">Reason</th>${timed && html`<th scope="col">Plan</th>`}</tr></thead>`;

function Moves(/** @type {any} */ { most }) {
  const full = most === SHOWN;
  const means = MEANS[/** @type {keyof typeof MEANS} */ (full ? filter.value : "all")];
  const found = lately(moves.value);
  // The overview is not left empty: its few rows are then the newest of all.
  const all = [...(found.length || full ? found : moves.value)].reverse().filter((m) => !means || means.includes(m.state));
  if (!moves.value.length) return html`<p class="none">Nothing has moved yet. A move appears here with its reason as soon as a plan begins.</p>`;
  if (!found.length && full) return html`<p class="none">${spanWords()} no move began, ended or was under way. <button type="button" class="link" onClick=${() => { since.value = "all"; }}>Show all that is kept</button></p>`;
  if (!all.length) return html`<p class="none">No move is ${filter.value}.</p>`;
  return html`<table data-figure="moves">${!found.length && html`<caption>${spanWords()} no move began, ended or was under way. The newest before that:</caption>`}<${MoveHead}/><tbody><${MoveRows} all=${all.slice(0, most)}/></tbody></table>`;
}

const number = (/** @type {[string, number]} */ [name, n]) => `${name} ${Math.abs(n) >= 1000 ? short(n) : Number(n.toPrecision(3))}`;

export function DecisionRows(/** @type {any} */ { all }) {
  return all.map((/** @type {any} */ r) => html`<tr key=${r.n}>
    <td class="n">${ago(r.wall_s)}</td><td>${r.rule}${r.times > 1 && html` <small>×${r.times}</small>`}</td><td><span class=${`state s-${r.outcome}`}>${r.outcome}</span></td>
    <td class="why">${r.detail}${r.detail && Object.keys(r.numbers).length ? " · " : ""}<small>${Object.entries(r.numbers).filter(([, n]) => n != null).map((x) => number(/** @type {any} */ (x))).join(", ")}</small>
      ${r.refused?.length ? html`<small class="refused">looked at and left: ${r.refused.join("; ")}</small>` : ""}</td>
    <td>${r.plan_id && html`<button type="button" class="link" onClick=${() => showPlan(r.plan_id)}>${r.plan_id}</button>`}</td></tr>`);
}

export const DecisionHead = () => html`<thead><tr><th scope="col">When</th><th scope="col">Rule</th><th scope="col">Outcome</th><th scope="col">What it saw</th><th scope="col">Plan</th></tr></thead>`;

function Decisions(/** @type {any} */ { most }) {
  if (!folded.value.length) return html`<p class="none">No decision yet.</p>`;
  return html`<table><${DecisionHead}/><tbody><${DecisionRows} all=${folded.value.slice(0, most)}/></tbody></table>`;
}

function Filter() {
  const count = (/** @type {string} */ key) => lately(moves.value).filter((m) => !MEANS[/** @type {keyof typeof MEANS} */ (key)] || /** @type {any} */ (MEANS[/** @type {keyof typeof MEANS} */ (key)]).includes(m.state)).length;
  return html`<div class="segments" role="group" aria-label="State of moves">${MOVE_FILTERS.map((key) => html`
    <button type="button" aria-pressed=${filter.value === key} onClick=${() => { filter.value = key; }}>${key} <small>${count(key)}</small></button>`)}</div>`;
}

/** Left and right go through tabs, as tabs do. */
export function onTabKey(/** @type {KeyboardEvent} */ event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const all = [.../** @type {HTMLElement} */ (event.currentTarget).querySelectorAll('[role="tab"]')];
  const next = /** @type {HTMLElement} */ (all[(all.indexOf(/** @type {Element} */ (document.activeElement)) + by + all.length) % all.length]);
  next.focus();
  next.click();
}

export function MovesCard(/** @type {any} */ { full = false }) {
  const most = full ? SHOWN : SHOWN_FEW;
  return html`<section class=${`card moves ${full ? "full" : ""}`} aria-label="Moves and decisions">
    <div class="head"><div class="segments" role="tablist" aria-label="Lists" onKeyDown=${onTabKey}>${LISTS.map((key) => html`
      <button type="button" role="tab" id=${`list-${key}`} aria-controls="lists" tabindex=${list.value === key ? 0 : -1} aria-selected=${list.value === key} onClick=${() => { list.value = key; }}>${LIST_NAMES[/** @type {keyof typeof LIST_NAMES} */ (key)]}</button>`)}</div>
      ${full && list.value === "moves" && html`<${Filter}/>`}
      ${!full && html`<button type="button" class="quiet last" onClick=${() => { view.value = "moves"; }}>All moves</button>`}</div>
    ${list.value === "moves" && moves.value.length > 0 && html`<${Lately} all=${moves.value}/>`}
    <div class="scroll" id="lists" role="tabpanel" tabindex="0" aria-labelledby=${`list-${list.value}`}>${list.value === "moves" ? html`<${Moves} most=${most}/>` : html`<${Decisions} most=${most}/>`}</div>
  </section>`;
}
