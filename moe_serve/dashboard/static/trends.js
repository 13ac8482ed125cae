// The timeline card: imbalance, latency and rows a second under each other, plans as marks.
import { useEffect, useRef } from "./vendor/preact-hooks.js";
import { effect, signal } from "./vendor/signals.js";
import { beforePlan, dark, html, marks, points } from "./state.js";
import { Timeline } from "./timeline.js";
import { showPlan } from "./url.js";
import { brief, clock, fixed, short } from "./words.js";

const PLANS_SHOWN = 12;
/** @type {import("./timeline.js").Chart[]} */
const CHARTS = [
  {
    name: "Imbalance", marked: true, least: 0.1, height: 132, tall: 210, say: (n) => n.toFixed(n < 10 ? 2 : 1),
    series: [{ field: "imbalance", stroke: "--accent", filled: true, line: "solid", word: "all layers" }, { field: "worst_layer", stroke: "--muted", dash: [3, 3], line: "dashed", word: "worst layer" }],
  },
  {
    name: "Dispatch", least: 0.001, height: 104, tall: 170, say: brief,
    series: [{ field: "p50_s", stroke: "--accent", filled: true, line: "solid", word: "p50" }, { field: "p99_s", stroke: "--second", dash: [5, 2], line: "long", word: "p99" }],
  },
  {
    // A row is a token of one layer's call, so a token counts once a layer.
    name: "Rows/s", clock: true, least: 10, height: 120, tall: 190, say: short,
    series: [{ field: "rows_per_s", stroke: "--accent", filled: true, line: "solid", word: "rows/s" }],
  },
];

/** Values of a chart at one point, in words. */
const sayPoint = (/** @type {import("./timeline.js").Chart} */ chart, /** @type {any} */ point) => chart.series.map(({ field, word }) => `${word} ${point?.[field] == null ? "–" : chart.say(point[field])}`).join(", ");

function Plot(/** @type {{chart: import("./timeline.js").Chart, near: any, at: any, full: boolean}} */ { chart, near, at, full }) {
  const host = useRef(/** @type {any} */ (null));
  useEffect(() => {
    const made = new Timeline(host.current, { ...chart, height: full ? chart.tall : chart.height }, {
      near: (mark, point) => { if (near.peek() !== mark) near.value = mark; if (at.peek() !== point) at.value = point; },
      pick: (mark) => showPlan(mark.plan_id),
    });
    let wasDark = dark.peek();
    const stop = effect(() => {
      const rebuilt = wasDark !== dark.value;
      wasDark = dark.value;
      made.update(points.value, marks.value);
      if (rebuilt) made.build();
    });
    return () => { stop(); made.close(); };
  }, []);
  // Latency may come later than the window's own figures.
  const newest = points.value.findLast((/** @type {any} */ p) => p[chart.series[0].field] != null);
  const empty = points.value.every((/** @type {any} */ p) => chart.series.every(({ field }) => p[field] == null));
  return html`<div class="chart"><p class="chart-name"><b>${chart.name}</b>${chart.series.map(({ line, word }) => html` <span class="key"><i class=${line}></i>${word}</span>`)}
      <span class="at">${sayPoint(chart, at.value ?? newest)}</span></p>
    <div class="plot" ref=${host} role="img" aria-label=${`${chart.name} over time. Now: ${sayPoint(chart, newest)}`}></div>
    ${empty && html`<p class="no-data">${chart.name === "Imbalance" ? "No window yet." : "Routers have not reported this yet."}</p>`}</div>`;
}

/** Plans as buttons: the marks' way for the keyboard. */
function Plans() {
  const all = [...marks.value].reverse().slice(0, PLANS_SHOWN);
  if (!all.length) return null;
  return html`<div class="scroll"><table data-figure="plans"><thead><tr><th scope="col">Began</th><th scope="col">Plan</th><th scope="col" class="r">Moves</th><th scope="col">Rule</th><th scope="col">What it saw</th></tr></thead>
    <tbody>${all.map((m) => html`<tr key=${m.plan_id}><td class="n">${clock(m.wall_s)}</td><td><button type="button" class="link" onClick=${() => showPlan(m.plan_id)}>${m.plan_id}</button></td><td class="r n">${m.moves || "–"}</td><td>${m.rule}</td><td class="why">${m.detail}</td></tr>`)}</tbody></table></div>`;
}

export function TimelineCard(/** @type {any} */ { full = false }) {
  const near = useRef(signal(/** @type {any} */ (null))).current;
  const at = useRef(signal(/** @type {any} */ (null))).current;
  const last = marks.value.at(-1);
  const shown = near.value ?? last;
  const earlier = beforePlan.value;
  return html`<section class=${`card timeline ${full ? "full" : ""}`} aria-label="Timeline"><div class="head"><h2>Timeline</h2>
      <span class="key"><i class="tri">▼</i>plan begins, click to open</span>${at.value && html`<span class="note">${clock(at.value.wall_s)}</span>`}</div>
    ${CHARTS.map((chart) => html`<${Plot} key=${chart.name} chart=${chart} near=${near} at=${at} full=${full}/>`)}
    <p class="cell">${shown ? html`<b>${near.value ? "Plan" : "Last plan"} <button type="button" class="link" onClick=${() => showPlan(shown.plan_id)}>${shown.plan_id}</button></b> ${shown.detail} <span class="muted">(${shown.rule}, ${clock(shown.wall_s)})</span>${!near.value && earlier && html`<span class="muted"> · imbalance ${fixed(earlier.imbalance)} before it</span>`}`
      : html`<span class="muted">No plan has begun since the page started.</span>`}</p>
    ${full && html`<${Plans}/>`}
  </section>`;
}
