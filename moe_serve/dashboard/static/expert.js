// The panel of one expert: its share, where it is, the last minutes, its last moves.
import { useEffect, useRef } from "./vendor/preact-hooks.js";
import { useAsked } from "./api.js";
import { fairShare, loadOf } from "./figures.js";
import { KINDS, inPlaceOf } from "./moves.js";
import { cursor, frame, html, moves, placement } from "./state.js";
import { chosen, layer, showPlan, view } from "./url.js";
import { fixed, gain, percent, short, span } from "./words.js";

const WIDTH = 340;
const HEIGHT = 64;

/** Load over time as one line; its ends in words, so that it needs no axis. */
function Sparkline(/** @type {any} */ { history }) {
  const load = history?.pairs_per_s ?? [];
  const at = history?.wall_s ?? [];
  if (load.length < 2) return html`<p class="muted">Not two windows of history yet.</p>`;
  const top = Math.max(1e-9, ...load);
  const [from, to] = [at[0], at[at.length - 1]];
  const points = load.map((/** @type {number} */ n, /** @type {number} */ i) => `${((WIDTH * (at[i] - from)) / Math.max(1e-9, to - from)).toFixed(1)},${(HEIGHT - 2 - ((HEIGHT - 6) * n) / top).toFixed(1)}`);
  return html`<figure class="spark"><svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} role="img" preserveAspectRatio="none" aria-label=${`Load of the last ${span(to - from)}: lowest ${short(Math.min(...load))}, highest ${short(top)}, now ${short(load[load.length - 1])} pairs a second`}>
      <polygon class="under" points=${`0,${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`}></polygon><polyline points=${points.join(" ")}></polyline></svg>
    <figcaption><span>${span(to - from)} ago</span><span>highest ${short(top)}</span><span>now ${short(load[load.length - 1])} pairs/s</span></figcaption></figure>`;
}

/** What the page knows by itself, for the time before the server's answer and without it. */
function known(/** @type {any} */ cell) {
  const [f, p] = [frame.value, placement.value];
  const size = f ?? p;
  if (!size || cell.layer >= size.layers || cell.expert >= size.experts) return null;
  const i = cell.layer * size.experts + cell.expert;
  const out = /** @type {any} */ ({ i, replicas: [] });
  if (f) {
    const { load, layerSum } = loadOf(f, "all");
    const row = load.subarray(cell.layer * f.experts, (cell.layer + 1) * f.experts);
    Object.assign(out, {
      load: load[i], share: layerSum[cell.layer] > 0 ? load[i] / layerSum[cell.layer] : 0, fair: fairShare(load[i], layerSum[cell.layer], f.experts),
      rank: 1 + row.filter((/** @type {number} */ n) => n > load[i]).length, prefill: f.load[0][i], decode: f.load[1]?.[i] ?? 0, experts: f.experts,
    });
  }
  if (p && p.experts === size.experts) {
    p.ranks.forEach((/** @type {any} */ r, /** @type {number} */ row) => {
      for (let s = 0; s < p.width; s++) {
        if (p.pair[row * p.width + s] === i) out.replicas.push({ rank: r.rank, node: r.node, slot: s, state: p.states[p.slotState[row * p.width + s]] });
      }
    });
  }
  return out;
}

function Facts(/** @type {any} */ { now }) {
  if (now.load === undefined) return html`<p class="none">No window has closed yet: load is unknown.</p>`;
  return html`<dl class="facts">
    <div><dt>Share of its layer</dt><dd><b>${percent(now.share)}</b></dd></div>
    <div><dt>Of fair share</dt><dd><b>${Number.isFinite(now.fair) ? `${now.fair.toFixed(2)}×` : "–"}</b></dd></div>
    <div><dt>Rank in layer</dt><dd><b>${now.load > 0 ? now.rank : "–"}</b> <small>of ${now.experts}</small></dd></div>
    <div><dt>Pairs/s</dt><dd><b>${short(now.load)}</b></dd></div>
    <div><dt>Prefill</dt><dd><b>${short(now.prefill)}</b></dd></div>
    <div><dt>Decode</dt><dd><b>${short(now.decode)}</b></dd></div></dl>`;
}

function Replicas(/** @type {any} */ { now, mean }) {
  if (!now.replicas.length) return html`<p class="problem">▲ On no rank.</p>`;
  const listed = now.replicas.filter((/** @type {any} */ r) => r.state === "LISTED").length;
  return html`<table data-figure="replicas"><thead><tr><th scope="col">Rank</th><th scope="col">Node</th><th scope="col" class="r">Slot</th><th scope="col">State</th><th scope="col" class="r">Share</th></tr></thead>
    <tbody>${now.replicas.map((/** @type {any} */ r) => html`<tr key=${`${r.rank}/${r.slot}`}><td>rank ${r.rank}</td><td>${r.node}</td><td class="r n">${r.slot}</td><td>${r.state === "LISTED" ? "● listed" : `◌ ${r.state.toLowerCase()}`}</td><td class="r n">${r.state === "LISTED" && mean != null ? fixed(mean / Math.max(1, listed), 2) : "–"}${r.state === "LISTED" && mean != null ? "×" : ""}</td></tr>`)}</tbody></table>`;
}

/** Where the hand was before the panel took the focus; null while it has not. */
let origin = /** @type {any} */ (null);

/** Close the panel and give the focus back; where it has not moved yet, it stays. */
export function closeExpert() {
  const moved = origin !== null || document.activeElement === document.body;
  const back = origin?.isConnected ? origin : document.getElementById("map");
  origin = null;
  chosen.value = null;
  if (moved) back?.focus();
}

/** By state of a move: what a replica that it removes does, and why. Of one that ended early it is not known how far that came. */
const LEAVING = {
  planned: ["leaves", "makes room"], running: ["leaves", "makes room"], done: ["left", "made room"],
  aborted: ["was to leave", "to make room"], dropped: ["was to leave", "to make room"],
};

/** What a move was to this expert: its own, or one that it left a rank for. */
function Way(/** @type {any} */ { m, cell }) {
  const gone = m.layer === cell.layer && m.expert === cell.expert ? null : m.room?.find((/** @type {any} */ r) => r.layer === cell.layer && r.expert === cell.expert);
  if (gone) {
    const [leaves, room] = LEAVING[/** @type {keyof typeof LEAVING} */ (m.state)] ?? LEAVING.dropped;
    return html`<span class="kind k-evict">${KINDS.evict} ${leaves}</span> rank ${gone.rank}, ${room} for L${m.layer} E${m.expert}`;
  }
  const from = m.source_rank < 0 ? "checkpoint" : `rank ${m.source_rank}`;
  return html`<span class=${`kind k-${m.kind}`}>${KINDS[/** @type {keyof typeof KINDS} */ (m.kind)] ?? "?"} ${m.kind}</span> ${m.kind === "evict" ? `off ${from}` : `${from} → ${m.target_rank}${m.room?.length ? ` ${inPlaceOf(m)}` : ""}`}`;
}

export function ExpertPanel() {
  const cell = chosen.value;
  const sheet = useRef(/** @type {any} */ (null));
  const asked = cell && frame.value ? `/api/v1/expert?layer=${cell.layer}&expert=${cell.expert}` : "";
  const answer = useAsked(asked, frame.value?.window);
  const key = cell ? `${cell.layer}/${cell.expert}` : "";
  useEffect(() => {
    // It may have been closed before this ran.
    if (!key || !chosen.peek()) return;
    if (!sheet.current.contains(document.activeElement)) {
      origin = document.activeElement === document.body ? document.getElementById("map") : document.activeElement;
      sheet.current.focus();
    }
  }, [key]);
  if (!cell) return null;
  const now = known(cell);
  const mine = answer?.ok ? answer.data.moves : moves.value.filter((m) => [m, ...(m.room ?? [])].some((one) => one.layer === cell.layer && one.expert === cell.expert)).slice(-20);
  return html`<aside class="sheet" role="dialog" aria-labelledby="expert-name" tabindex="-1" ref=${sheet}>
    <div class="head"><h2 id="expert-name">Layer ${cell.layer}, expert ${cell.expert} <small>L${cell.layer} E${cell.expert}</small></h2><button type="button" class="quiet" onClick=${closeExpert}>Close</button></div>
    ${!now ? html`<p class="none">${frame.value || placement.value ? "There is no such expert." : "No figures yet."}</p>` : html`
      <${Facts} now=${now}/>
      <h3>Last 15 minutes</h3>
      ${answer?.ok ? html`<${Sparkline} history=${answer.data.history}/>` : html`<p class="muted">${answer ? answer.error.message : "Asking."}</p>`}
      <h3>Replicas</h3><${Replicas} now=${now} mean=${Number.isFinite(now.fair) ? now.fair : null}/>
      <h3>Last moves</h3>${mine?.length ? html`<ul class="last-moves" data-figure="expert-moves">${[...mine].reverse().map((/** @type {any} */ m) => html`<li key=${`${m.plan_id}/${m.move_id}`}><p><${Way} m=${m} cell=${cell}/> · <span class=${`state s-${m.state}`}>${m.state}</span> · ${gain(m.gain_s_per_s)} predicted · <button type="button" class="link" onClick=${() => showPlan(m.plan_id)}>plan ${m.plan_id}</button></p><p class="muted">${m.reason}</p></li>`)}</ul>` : html`<p class="muted">It has not moved since the page started.</p>`}
      <p class="links"><button type="button" class="link" onClick=${() => { layer.value = cell.layer; view.value = "devices"; }}>Devices of layer ${cell.layer}</button>
        <button type="button" class="link" onClick=${() => { view.value = "overview"; cursor.value = cell; }}>Show on the map</button></p>`}
  </aside>`;
}
