// What moved in the last minute (or ten, or of all that is kept), what it cost and what it brought.
import { Segments } from "./segments.js";
import { UNFINISHED, html, meanOf, points, wall_s } from "./state.js";
import { SINCES, since } from "./url.js";
import { fixed, gain, mib } from "./words.js";

const SPANS = { "1m": [60, "minute", "In the last minute"], "10m": [600, "10 minutes", "In the last 10 minutes"], all: [Infinity, "all that is kept", "Of all that is kept"] };
/** Means of imbalance that differ by less than this, or by less than this share, are about the same. */
const SAME = 0.01;
const SAME_SHARE = 0.05;

const SPAN_NAMES = Object.fromEntries(Object.entries(SPANS).map(([key, [, name]]) => [key, name]));

const chosenSpan = () => SPANS[/** @type {keyof typeof SPANS} */ (since.value)];
/** The choice in words: "In the last minute". */
export const spanWords = () => String(chosenSpan()[2]);

/** Since when moves count, by the clock of the page's server; before it spoke all do. */
const from = () => (wall_s.value == null ? -Infinity : wall_s.value - Number(chosenSpan()[0]));
const after = (/** @type {number | null} */ date, /** @type {number} */ start) => start === -Infinity || (date != null && date >= start);

/**
 * Moves that began or ended in the time chosen, and all that are planned or under way: what `since_s` of /api/v1/moves means.
 * All moves of a plan begin with it, so one of a long plan may have begun long before the time chosen and still go on in it.
 */
export function lately(/** @type {any[]} */ moves) {
  const start = from();
  return moves.filter((m) => UNFINISHED.includes(m.state) || after(m.started_wall_s, start) || after(m.ended_wall_s, start));
}

const sum = (/** @type {any[]} */ all, /** @type {string} */ field) => all.reduce((total, m) => total + m[field], 0);

/** Promised and measured gain of the plans, of these moves, that were measured; each plan once. */
function measured(/** @type {any[]} */ moves) {
  const plans = new Map(moves.filter((m) => m.realised_gain_s_per_s != null).map((m) => [m.plan_id, m]));
  const all = [...plans.values()];
  return { plans: all.length, promised: sum(all, "plan_expected_gain_s_per_s"), realised: sum(all, "realised_gain_s_per_s") };
}

/** Imbalance before the first of the moves and now: means of windows with load; null where no window is known. */
function turned(/** @type {any[]} */ moves) {
  const loaded = points.value.filter((p) => p.worst_layer > 0 || p.rows_per_s > 0);
  const first = Math.min(...moves.filter((m) => m.state !== "planned" && m.started_wall_s).map((m) => m.started_wall_s));
  return { before: meanOf(loaded.filter((p) => p.wall_s <= first)), now: meanOf(loaded.filter((p) => p.wall_s > first)) };
}

/** The moves of the time chosen, added up. */
function addUp(/** @type {any[]} */ all) {
  const start = from();
  const moves = lately(all);
  const done = moves.filter((m) => m.state === "done" && after(m.ended_wall_s, start));
  return {
    moves,
    planned: moves.filter((m) => m.state === "planned").length,
    running: moves.filter((m) => m.state === "running").length,
    begun: moves.filter((m) => m.state !== "planned" && after(m.started_wall_s, start)).length,
    done: done.length,
    // One that was dropped has no end that is known.
    aborted: moves.filter((m) => m.state === "dropped" || (m.state === "aborted" && after(m.ended_wall_s, start))).length,
    bytes: sum(done, "copy_bytes"),
    across: sum(done.filter((m) => m.cross_node), "copy_bytes"),
    predicted: sum(done, "gain_s_per_s"),
    ...measured(moves),
    ...turned(moves),
  };
}

const perSecond = (/** @type {number} */ x) => `${Number(x.toPrecision(3))} s/s`;

function better(/** @type {number} */ before, /** @type {number} */ now) {
  if (Math.abs(now - before) < Math.max(SAME, SAME_SHARE * before)) return "about the same";
  return now < before ? "better" : "worse";
}

function Turned(/** @type {any} */ { of }) {
  if (of.now == null) return of.before == null ? "" : html`imbalance <b>${fixed(of.before)}</b> before the first of them; no window with load since`;
  if (of.before == null) return html`imbalance <b>${fixed(of.now)}</b> now; before the first of them it was not seen`;
  return html`imbalance <b aria-hidden="true">${fixed(of.before)} → ${fixed(of.now)}</b><span class="spoken">from ${fixed(of.before)} before the first of them to ${fixed(of.now)} now</span>, <b data-figure="better">${better(of.before, of.now)}</b>`;
}

function Sums(/** @type {any} */ { of }) {
  if (!of.moves.length) return html`nothing moved.`;
  const across = of.across ? html`, <b>${mib(of.across)}</b> of it between nodes or from the checkpoint` : ", none between nodes or from the checkpoint";
  const parts = [
    html`<b>${of.begun}</b> ${of.begun === 1 ? "move" : "moves"} begun, <b>${of.done}</b> completed, <b>${of.aborted}</b> aborted${of.running ? html`, <b>${of.running}</b> under way` : ""}${of.planned ? `, ${of.planned} still planned` : ""}`,
    html`<b>${of.bytes ? mib(of.bytes) : "nothing"}</b> copied${of.bytes ? across : ""}`,
    html`predicted gain of the completed <b>${gain(of.predicted)}</b> (${perSecond(of.predicted)})`,
    of.plans ? html`realised <b>${gain(of.realised)}</b> (${perSecond(of.realised)}) of ${gain(of.promised)} predicted, ${of.plans} ${of.plans === 1 ? "plan" : "plans"} measured` : "nothing measured yet",
    html`<${Turned} of=${of}/>`,
  ];
  return parts.map((part) => html`<span>${part}</span>`);
}

/** The choice of the time, and the sums of it in one line. */
export function Lately(/** @type {any} */ { all }) {
  return html`<div class="lately"><${Segments} name="Look back" all=${SINCES} picked=${since} names=${SPAN_NAMES}/>
    <p data-figure="lately" data-since=${since.value}><span class="since">${spanWords()}:</span> <${Sums} of=${addUp(all)}/></p></div>`;
}
