// Why requests are slow now: the controller's verdict, causes with evidence and next step, and where
// the time of requests goes by stage.
import { useAsked } from "./api.js";
import { ExpertLink } from "./hottest.js";
import { DecisionHead, DecisionRows } from "./moves.js";
import { frame, html, now_ms, problems, worth } from "./state.js";
import { BACKS, back, view } from "./url.js";
import { brief, mib, percent, short, span } from "./words.js";

const STAGES = ["queue", "split", "wire", "wait", "compute", "combine", "other"];
const STAGE_SAYS = {
  queue: "waiting for a permit", split: "choosing replicas", wire: "the way to the shard and back", wait: "waiting at the shard",
  compute: "computing at the shard", combine: "adding up", other: "second tries, waiting for the event loop, and the rest",
};
const VERDICTS = { nothing_slow: ["●", "Nothing is slow"], slow: ["▲", "Slow"], idle: ["◌", "Idle: no requests to look at"] };
const KINDS = {
  hot_expert: "Hot expert", imbalance: "Imbalance", slow_rank: "Slow rank", copy: "Copy in progress", overload: "Overload",
  cold_start: "Cold start", memory: "Memory pressure", controller_away: "Controller away",
};
const BACK_NAMES = { "0": "newest windows", "60": "minute", "300": "5 minutes" };

/** Asked once a window while it is looked at, and every few seconds where no window closes. */
function useExplanation() {
  const tick = worth.value === "live" ? `w${frame.value?.window}` : `t${Math.floor(now_ms.value / 3000)}`;
  return useAsked(`/api/v1/explain${back.value === "0" ? "" : `?seconds=${back.value}`}`, tick);
}

function verdictOf(/** @type {any} */ doc) {
  const [sign, words] = VERDICTS[/** @type {keyof typeof VERDICTS} */ (doc.verdict)] ?? ["?", doc.verdict];
  const names = doc.causes.map((/** @type {any} */ c) => (KINDS[/** @type {keyof typeof KINDS} */ (c.kind)] ?? c.kind).toLowerCase());
  return { sign, words: names.length ? `${words}: ${names.join(" and ")}` : words };
}

/** A number of the evidence by the unit that its name ends with, and the name without it. */
function sayNumber(/** @type {string} */ name, /** @type {number} */ n) {
  const plain = name.replaceAll("_", " ");
  if (n == null || !Number.isFinite(n)) return [plain, "–"];
  if (name.endsWith("_s_per_pair")) return [plain.replace(" s per pair", " a pair"), brief(n)];
  if (name.endsWith("_s")) return [plain.slice(0, -2), brief(n)];
  if (name.endsWith("_bytes")) return [plain.slice(0, -6), mib(n)];
  if (name.startsWith("times_")) return [plain.slice(6), `${Number(n.toPrecision(3))}×`];
  if (name.endsWith("share") && n >= 0 && n <= 1) return [plain, percent(n)];
  return [plain, Math.abs(n) >= 1000 ? short(n) : String(Number(n.toPrecision(3)))];
}

function Evidence(/** @type {any} */ { evidence }) {
  const all = Object.entries(evidence ?? {});
  if (!all.length) return null;
  return html`<table class="evidence"><caption class="spoken">Evidence</caption><tbody>${all.map(([name, n]) => {
    const [plain, words] = sayNumber(name, Number(n));
    return html`<tr key=${name}><th scope="row">${plain}</th><td class="r n" title=${`${name} ${n}`}>${words}</td></tr>`;
  })}</tbody></table>`;
}

function Cause(/** @type {any} */ { cause }) {
  return html`<li class="cause"><div class="cause-share"><b>${percent(cause.share)}</b><span class="bar"><span class="fill" style=${{ width: `${100 * Math.min(1, Math.max(0, cause.share))}%` }}></span></span><small>of requests' time</small></div>
    <div class="cause-words"><h3>${KINDS[/** @type {keyof typeof KINDS} */ (cause.kind)] ?? cause.kind}
        ${cause.rank >= 0 && html` <span class="tag calm">rank ${cause.rank}</span>`} ${cause.layer >= 0 && cause.expert >= 0 ? html`<${ExpertLink} at=${cause.layer} expert=${cause.expert}/>` : cause.layer >= 0 ? html`<span class="tag calm">layer ${cause.layer}</span>` : ""}</h3>
      <p>${cause.text}</p>${cause.next_step && html`<p class="next"><b>Next step</b> ${cause.next_step}</p>`}</div>
    <${Evidence} evidence=${cause.evidence}/></li>`;
}

/** Mean seconds a request by stage, one bar a phase, on one scale. */
function StageBars(/** @type {any} */ { stages, small = false }) {
  const phases = [...new Set(stages.map((/** @type {any} */ s) => s.phase))].map((phase) => {
    const parts = STAGES.map((stage) => {
      const found = stages.find((/** @type {any} */ s) => s.phase === phase && s.stage === stage);
      return { stage, mean: found?.requests ? found.seconds / found.requests : 0, p50_s: found?.p50_s, p99_s: found?.p99_s, requests: found?.requests ?? 0 };
    });
    return { phase, parts, sum: parts.reduce((a, p) => a + p.mean, 0), requests: Math.max(0, ...parts.map((p) => p.requests)) };
  }).filter((p) => p.requests > 0);
  const most = Math.max(1e-12, ...phases.map((p) => p.sum));
  if (!phases.length) return html`<p class="muted">No answered requests to look at.</p>`;
  return html`<div class=${`stages ${small ? "small" : ""}`}>${phases.map(({ phase, parts, sum, requests }) => html`<div class="stage-row" key=${phase}><span class="name">${phase}<small>${short(requests)} requests</small></span>
      <span class="stage-bar" role="img" aria-label=${`${phase}: ${parts.map((p) => `${p.stage} ${brief(p.mean)}`).join(", ")}`}>${parts.map((p) => p.mean > 0 && html`<span class=${`stage st-${p.stage}`} style=${{ width: `${(100 * p.mean) / most}%` }} title=${`${p.stage}: ${brief(p.mean)} mean, ${percent(p.mean / sum)}`}>${p.mean / most > 0.07 ? p.stage : ""}</span>`)}</span>
      <span class="num">${brief(sum)}</span></div>`)}
    ${!small && html`<table data-figure="stages"><thead><tr><th scope="col">Stage</th><th scope="col">What it is</th>${phases.map(({ phase }) => html`<th scope="col" class="r">${phase} mean</th><th scope="col" class="r">p50</th><th scope="col" class="r">p99</th>`)}</tr></thead>
      <tbody>${STAGES.map((stage, n) => html`<tr key=${stage}><td><i class=${`dot st-${stage}`}></i>${stage}</td><td class="muted">${STAGE_SAYS[/** @type {keyof typeof STAGE_SAYS} */ (stage)]}</td>${phases.map(({ parts }) => html`<td class="r n">${brief(parts[n].mean)}</td><td class="r n">${brief(parts[n].p50_s)}</td><td class="r n">${brief(parts[n].p99_s)}</td>`)}</tr>`)}</tbody></table>`}</div>`;
}

function Ranks(/** @type {any} */ { ranks }) {
  if (!ranks?.length) return null;
  const each = (/** @type {number} */ s, /** @type {number} */ n) => (n ? brief(s / n) : "–");
  return html`<h3>Ranks</h3><div class="scroll"><table data-figure="rank-parts"><thead><tr><th scope="col">Rank</th><th scope="col" class="r">Sub-calls</th><th scope="col" class="r" title="Of those of several, the last to come back">Came last</th><th scope="col" class="r">Late by</th><th scope="col" class="r">Wire</th><th scope="col" class="r">Wait</th><th scope="col" class="r">Compute</th><th scope="col" class="r" title="Compute against its cost model, over the same of all ranks; 1 = as the others">Slowness</th></tr></thead>
    <tbody>${ranks.map((/** @type {any} */ r) => html`<tr key=${r.rank}><td>rank ${r.rank}</td><td class="r n">${short(r.sub_calls)}</td><td class="r n">${r.sub_calls ? percent(r.last / r.sub_calls) : "–"}</td><td class="r n">${each(r.late_s, r.last)}</td><td class="r n">${each(r.wire_s, r.sub_calls)}</td><td class="r n">${each(r.wait_s, r.sub_calls)}</td><td class="r n">${each(r.compute_s, r.sub_calls)}</td><td class="r n">${r.slowness ? `${r.slowness.toFixed(2)}×` : "–"}</td></tr>`)}</tbody></table></div>`;
}

const ageOf = (/** @type {any} */ doc) => doc.last_answer_age_s ?? doc.age_s;

/** What else is wrong: the verdict is about requests only, and must not stand alone where something is. */
function Wrong(/** @type {any} */ { most = Infinity }) {
  const left = problems.value.length - most;
  return problems.value.slice(0, most).map((/** @type {string} */ text, /** @type {number} */ n) => html`<p class="problem" data-figure="wrong" key=${n}><span aria-hidden="true">▲</span> ${n ? "" : "But something is wrong: "}${text}${n === most - 1 && left > 0 ? ` (and ${left} more)` : ""}</p>`);
}

/** One line for the overview. */
export function WhyStrip() {
  const answer = useExplanation();
  const doc = answer?.ok ? answer.data : null;
  const says = doc ? verdictOf(doc) : null;
  return html`<section class="card strip" aria-label="Why slow">
    <div><p class="verdict">${says ? html`<span class=${`verdict-sign v-${doc.verdict}`}><span aria-hidden="true">${says.sign}</span> ${says.words}</span>` : html`<span class="muted">${answer ? `No explanation: ${answer.error.message}` : "Asking why requests take as long as they do."}</span>`}
      ${doc?.causes[0] && html` <span>${doc.causes[0].text}</span>`}</p><${Wrong} most=${1}/></div>
    ${doc?.stages?.length ? html`<${StageBars} stages=${doc.stages} small=${true}/>` : html`<span></span>`}
    <button type="button" class="quiet" onClick=${() => { view.value = "why"; }}>Why slow?</button></section>`;
}

export function WhyView() {
  const answer = useExplanation();
  const doc = answer?.ok ? answer.data : null;
  const says = doc ? verdictOf(doc) : null;
  return html`<section class="card why-view full" aria-label="Why slow">
    <div class="head"><h2>Why slow?</h2><label>look at the last <select data-figure="back" value=${back.value} onChange=${(/** @type {any} */ e) => { back.value = e.target.value; }}>${BACKS.map((s) => html`<option value=${s} selected=${back.value === s}>${BACK_NAMES[/** @type {"0"} */ (s)]}</option>`)}</select></label>
      ${doc && html`<span class="note">${short(doc.requests ?? 0)} requests in ${span(doc.seconds ?? 0)}, mean ${brief(doc.mean_s)}, p99 ${brief(doc.p99_s)}${ageOf(doc) != null ? ` · ${span(ageOf(doc))} old` : ""}</span>`}</div>
    ${!doc && html`<p class="none" role="status">${answer ? `${answer.error.message} ${answer.error.next_step ?? ""}` : "Asking."}</p>`}
    ${doc && html`<p class="verdict large"><span class=${`verdict-sign v-${doc.verdict}`} data-figure="verdict"><span aria-hidden="true">${says?.sign}</span> ${says?.words}</span></p><${Wrong}/>
      ${doc.causes.length > 0 && html`<ul class="causes">${doc.causes.map((/** @type {any} */ c, /** @type {number} */ n) => html`<${Cause} key=${`${c.kind}/${n}`} cause=${c}/>`)}</ul>`}
      <h3>Where the time goes</h3><${StageBars} stages=${doc.stages ?? []}/><${Ranks} ranks=${doc.ranks}/>
      ${doc.newest && html`<h3>The newest decision</h3><div class="scroll"><table><${DecisionHead}/><tbody><${DecisionRows} all=${[{ n: 0, times: 1, ...doc.newest }]}/></tbody></table></div>`}`}
  </section>`;
}
