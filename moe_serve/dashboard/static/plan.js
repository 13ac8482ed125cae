// One plan: where replicas were and where it brings them, what that costs, what it promised and did.
import { useEffect, useRef } from "./vendor/preact-hooks.js";
import { signal } from "./vendor/signals.js";
import { order, session, useAsked } from "./api.js";
import { confirm } from "./dialogs.js";
import { bytes } from "./figures.js";
import { HEAT } from "./lut.js";
import { DecisionHead, DecisionRows, MoveHead, MoveRows } from "./moves.js";
import { dark, html, marks, placement } from "./state.js";
import { plan } from "./url.js";
import { brief, clock, fixed, gain, mib, unevenness } from "./words.js";

const PLANS_SHOWN = 60;
/** The newest plan that this page computed; it is not among the marks until it runs. */
export const computed_plan = signal("");

/** Replicas of layers x experts as a small picture; what differs from `other` gets a ring. */
function paintReplicas(/** @type {HTMLCanvasElement} */ canvas, /** @type {any} */ { replicas, other, layers, experts }) {
  const dpr = devicePixelRatio || 1;
  const room = Math.max(120, /** @type {Element} */ (canvas.parentElement).clientWidth);
  const w = Math.max(1, Math.floor(Math.min(26, room / experts) * dpr));
  const h = Math.max(2, Math.floor(Math.min(20, Math.max(3, 300 / layers)) * dpr));
  canvas.width = w * experts;
  canvas.height = h * layers;
  canvas.style.width = `${canvas.width / dpr}px`;
  canvas.style.height = `${canvas.height / dpr}px`;
  const pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const style = getComputedStyle(canvas);
  const gap = w >= 8 * dpr && h >= 8 * dpr ? Math.round(dpr) : 0;
  let top = 4;
  for (let i = 0; i < replicas.length; i++) top = Math.max(top, replicas[i], other?.[i] ?? 0);
  pen.fillStyle = style.getPropertyValue("--cold");
  for (let i = 0; i < replicas.length; i++) {
    const t = 3 * Math.round(255 * Math.min(1, 0.12 + (replicas[i] - 1) / (top - 1)));
    pen.fillStyle = replicas[i] ? `rgb(${HEAT[t]},${HEAT[t + 1]},${HEAT[t + 2]})` : style.getPropertyValue("--cold");
    pen.fillRect((i % experts) * w, Math.floor(i / experts) * h, w - gap, h - gap);
  }
  if (!other) return;
  pen.lineWidth = Math.max(1, 1.5 * dpr);
  pen.strokeStyle = style.getPropertyValue("--mark");
  for (let i = 0; i < replicas.length; i++) {
    if (replicas[i] !== other[i]) pen.strokeRect((i % experts) * w - dpr, Math.floor(i / experts) * h - dpr, w - gap + 2 * dpr, h - gap + 2 * dpr);
  }
}

function Replicas(/** @type {any} */ { name, replicas, other, layers, experts }) {
  const canvas = useRef(/** @type {any} */ (null));
  const shade = dark.value;
  useEffect(() => {
    const draw = () => { if (canvas.current) paintReplicas(canvas.current, { replicas, other, layers, experts }); };
    draw();
    const observer = new ResizeObserver(draw);
    observer.observe(canvas.current.parentElement);
    return () => observer.disconnect();
  }, [replicas, other, layers, experts, shade]);
  let changed = 0;
  if (other) for (let i = 0; i < replicas.length; i++) changed += replicas[i] === other[i] ? 0 : 1;
  const total = replicas.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0);
  return html`<figure class="side"><figcaption><b>${name}</b> <span class="muted">${total} replicas${other ? `, ${changed} experts differ` : ""}</span></figcaption>
    <div class="mini"><canvas ref=${canvas} role="img" aria-label=${`Replicas ${name.toLowerCase()}: ${total} in all`}></canvas></div></figure>`;
}

/** Slots each rank holds before and after, of the whole model. */
function countSlots(/** @type {any} */ side) {
  if (!side?.slots) return null;
  const { width, states } = side.slots;
  const pair = new Int32Array(bytes(side.slots.pair).buffer);
  const state = bytes(side.slots.state);
  return Array.from({ length: Math.floor(pair.length / Math.max(1, width)) }, (_, r) => {
    const out = { held: 0, marked: 0, room: 0 };
    for (let s = r * width; s < (r + 1) * width; s++) {
      if (pair[s] >= 0) { out.held += 1; if (states[state[s]] !== "LISTED") out.marked += 1; } else if (pair[s] === -1) out.room += 1;
    }
    return out;
  });
}

function RankSlots(/** @type {any} */ { doc }) {
  const [was, is] = [countSlots(doc.before), countSlots(doc.after)];
  if (!was || !is) return null;
  return html`<div class="scroll"><table data-figure="rank-slots"><thead><tr><th scope="col">Rank</th><th scope="col" class="r">Slots before</th><th scope="col" class="r">leave</th><th scope="col" class="r">come</th><th scope="col" class="r">after</th><th scope="col" class="r">empty after</th></tr></thead>
    <tbody>${was.map((a, r) => html`<tr key=${r}><td>rank ${placement.value?.ranks[r]?.rank ?? r}</td><td class="r n">${a.held}</td><td class="r n">${a.marked || "–"}</td><td class="r n">${is[r]?.marked || "–"}</td><td class="r n">${is[r]?.held ?? "–"}</td><td class="r n">${is[r]?.room ?? "–"}</td></tr>`)}</tbody></table></div>`;
}

const arrow = (/** @type {any} */ a, /** @type {any} */ b) => html`<b>${fixed(unevenness(a))} → ${fixed(unevenness(b))}</b>`;

/** "20 replicas" that the moves of a plan remove so that theirs fit, "" where none. */
function replaced(/** @type {any} */ p) {
  const n = p.moves.reduce((/** @type {number} */ total, /** @type {any} */ m) => total + (m.room?.length ?? 0), 0);
  return n ? `${n} ${n === 1 ? "replica" : "replicas"}` : "";
}

function Sums(/** @type {any} */ { doc }) {
  const p = doc.plan;
  const copied = doc.copy_bytes ?? p.copy_bytes;
  const gone = replaced(p);
  const crossing = doc.cross_node_bytes ?? p.cross_node_bytes;
  return html`<dl class="figures sums">
    <div class="figure"><dt>Moves</dt><dd><b>${p.moves.length}</b> <small>${p.state ?? ""}${gone ? `, in place of ${gone}` : ""}</small></dd></div>
    <div class="figure"><dt>Bytes to copy</dt><dd><b>${mib(copied)}</b> <small>${crossing ? mib(crossing) : "none"} between nodes or from the checkpoint</small></dd></div>
    <div class="figure"><dt>Imbalance, predicted</dt><dd>${arrow(doc.balancedness_before ?? p.balancedness_before, doc.balancedness_after ?? p.balancedness_after)}</dd></div>
    <div class="figure" title="One window before and one after, in each the traffic of that window; the realised gain prices both layouts on the same counts."><dt>Imbalance, measured</dt><dd>${arrow(doc.measured_before, doc.measured_after)}</dd></div>
    <div class="figure"><dt>Gain, predicted</dt><dd><b>${gain(p.gain_s_per_s)}</b> <small>of a rank's time</small></dd></div>
    <div class="figure"><dt>Gain, realised</dt><dd><b>${gain(doc.realised_gain_s_per_s ?? p.realised_gain_s_per_s ?? p.moves.find((/** @type {any} */ m) => m.realised_gain_s_per_s != null)?.realised_gain_s_per_s)}</b></dd></div>
    <div class="figure"><dt>Cost</dt><dd><b>${brief(p.cost_s)}</b></dd></div></dl>`;
}

/** Apply a computed plan; the server refuses one that is out of date, in its own words. */
async function apply(/** @type {any} */ doc) {
  const p = doc.plan;
  const gone = replaced(p);
  await confirm({
    title: `Apply plan ${p.plan_id}`,
    says: [`${p.moves.length} moves begin now${gone ? `, in place of ${gone}` : ""}; ${mib(p.copy_bytes)} are copied, ${p.cross_node_bytes ? mib(p.cross_node_bytes) : "none"} of them between nodes or from the checkpoint.`, "Requests are served meanwhile. The plan is refused where the placement has changed since it was computed."],
    yes: "Apply",
    act: () => order("apply", { plan_id: p.plan_id }),
  });
}

function Body(/** @type {any} */ { doc }) {
  const p = doc.plan;
  const { layers, experts } = doc.layers ? doc : placement.value ?? { layers: 0, experts: 0 };
  const was = doc.replicas_before ? bytes(doc.replicas_before) : null;
  const is = doc.replicas_after ? bytes(doc.replicas_after) : null;
  const drawn = was && is && layers * experts === was.length && is.length === was.length;
  const shown = p.state ?? (p.plan_id === computed_plan.value ? "computed" : "");
  return html`<${Sums} doc=${doc}/>
    ${shown === "computed" && html`<p class="notice">Computed only: nothing has moved.${session.value.operator ? html` <button type="button" class="act" onClick=${() => apply(doc)}>Apply this plan</button>` : ""}</p>`}
    ${drawn ? html`<div class="sides"><${Replicas} name="Before" replicas=${was} layers=${layers} experts=${experts}/><${Replicas} name="After" replicas=${is} other=${was} layers=${layers} experts=${experts}/></div>`
      : html`<p class="none">This page did not see the placement before this plan: its moves are all there is to show.</p>`}
    <div class="pair moved"><div><h3>Moves</h3><div class="scroll"><table data-figure="plan-moves"><${MoveHead} timed=${false}/><tbody><${MoveRows} all=${p.moves} timed=${false}/></tbody></table></div></div>
      <div><h3>Ranks</h3><${RankSlots} doc=${doc}/>
        ${p.refused?.length > 0 && html`<h3>Looked at and left</h3><ul class="plain">${p.refused.map((/** @type {string} */ text) => html`<li>${text}</li>`)}</ul>`}</div></div>
    ${(doc.records ?? p.records)?.length > 0 && html`<h3>Decisions about it</h3><div class="scroll"><table><${DecisionHead}/><tbody><${DecisionRows} all=${doc.records ?? p.records}/></tbody></table></div>`}`;
}

export function PlanView() {
  const all = [...marks.value].reverse().slice(0, PLANS_SHOWN);
  const tick = `${marks.value.length}/${placement.value?.epoch}/${placement.value?.state}`;
  const answer = useAsked(`/api/v1/plan${plan.value ? `?id=${encodeURIComponent(plan.value)}` : ""}`, tick);
  const shown = answer?.ok ? answer.data : null;
  const known = new Set(all.map((m) => m.plan_id));
  return html`<section class="card plan full" aria-label="Plan">
    <div class="head"><h2>Plan ${shown?.plan ? shown.plan.plan_id : ""}</h2>
      <label>show <select value=${plan.value} onChange=${(/** @type {any} */ e) => { plan.value = e.target.value; }}>
        <option value="" selected=${plan.value === ""}>newest</option>
        ${plan.value && !known.has(plan.value) && html`<option value=${plan.value} selected>${plan.value}</option>`}
        ${all.map((m) => html`<option key=${m.plan_id} value=${m.plan_id} selected=${plan.value === m.plan_id}>${m.plan_id} · ${clock(m.wall_s)} · ${m.moves} moves</option>`)}</select></label></div>
    ${!answer && html`<p class="none">Asking for the plan.</p>`}
    ${answer && !answer.ok && html`<p class="none" role="status">${answer.error.message} ${answer.error.next_step ?? ""}</p>`}
    ${shown && (shown.plan ? html`<${Body} doc=${shown}/>` : html`<p class="none">No plan has been computed since the page started.</p>`)}
  </section>`;
}
