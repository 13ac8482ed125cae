// What the person chose, as signals that are kept in the URL: a link shows the same view.
import { batch, effect, signal } from "./vendor/signals.js";

export const VIEWS = ["overview", "devices", "timeline", "moves", "plan", "why"];
export const MODES = ["load", "share", "replicas", "change"];
export const PHASES = ["all", "prefill", "decode"];
export const SORTS = ["id", "load", "device"];
export const MOVE_FILTERS = ["all", "running", "done", "aborted"];
export const LISTS = ["moves", "decisions"];
export const SINCES = ["1m", "10m", "all"];
/** Seconds that the causes are looked for in; 0 = the newest windows. */
export const BACKS = ["0", "60", "300"];

const oneOf = (/** @type {string[]} */ all, /** @type {string | null} */ chosen) => (chosen && all.includes(chosen) ? chosen : all[0]);

/** "2-9,0-63" as [first layer, last layer, first column, last column]; null where it is not that. */
function readZoom(/** @type {string | null} */ text) {
  const found = /^(\d{1,5})-(\d{1,5}),(\d{1,5})-(\d{1,5})$/.exec(text ?? "");
  if (!found) return null;
  const ends = found.slice(1).map(Number);
  return ends[0] <= ends[1] && ends[2] <= ends[3] ? ends : null;
}

/** "3.17" or "L3 E17" in any case as {layer, expert}; null where it is not that. */
export function readCell(/** @type {string | null} */ text) {
  const found = /^\s*(?:L(?:ayer)?\s*)?(\d{1,5})[\s.,:/]+(?:E(?:xpert)?\s*)?(\d{1,5})\s*$/i.exec(text ?? "") ?? /^\s*L(\d{1,5})E(\d{1,5})\s*$/i.exec(text ?? "");
  return found ? { layer: Number(found[1]), expert: Number(found[2]) } : null;
}

export const view = signal(VIEWS[0]);
export const mode = signal(MODES[0]);
export const phase = signal(PHASES[0]);
export const sort = signal(SORTS[0]);
export const layer = signal(0);
/** [first layer, last layer, first column, last column] of the map, null = all of it. */
export const zoom = signal(/** @type {number[] | null} */ (null));
/** The expert whose panel is open, null = none. */
export const chosen = signal(/** @type {{layer: number, expert: number} | null} */ (null));
/** Id of the plan to show, "" = the newest. */
export const plan = signal("");
export const filter = signal(MOVE_FILTERS[0]);
/** How far back moves are shown and added up. */
export const since = signal(SINCES[0]);
/** Which list stands below the moves' tabs. */
export const list = signal(LISTS[0]);
export const back = signal(BACKS[0]);
/** Whether the 50 hottest are listed below the map. */
export const hottest = signal(false);

function read() {
  const hash = new URLSearchParams(location.hash.slice(1));
  batch(() => {
    view.value = oneOf(VIEWS, hash.get("view"));
    mode.value = oneOf(MODES, hash.get("mode"));
    phase.value = oneOf(PHASES, hash.get("phase"));
    sort.value = oneOf(SORTS, hash.get("sort"));
    layer.value = Math.max(0, Number.parseInt(hash.get("layer") ?? "0", 10) || 0);
    zoom.value = readZoom(hash.get("zoom"));
    chosen.value = readCell(hash.get("expert"));
    plan.value = (hash.get("plan") ?? "").slice(0, 80);
    filter.value = oneOf(MOVE_FILTERS, hash.get("moves"));
    since.value = oneOf(SINCES, hash.get("since"));
    list.value = oneOf(LISTS, hash.get("list"));
    back.value = oneOf(BACKS, hash.get("back"));
    hottest.value = hash.get("hottest") === "1";
  });
}

/** The view as a fragment; what is at its default stays out, but for the first three. */
function fragment() {
  const parts = [`view=${view.value}`, `mode=${mode.value}`, `phase=${phase.value}`, `layer=${layer.value}`];
  if (sort.value !== SORTS[0]) parts.push(`sort=${sort.value}`);
  if (zoom.value) parts.push(`zoom=${zoom.value[0]}-${zoom.value[1]},${zoom.value[2]}-${zoom.value[3]}`);
  if (chosen.value) parts.push(`expert=${chosen.value.layer}.${chosen.value.expert}`);
  if (plan.value) parts.push(`plan=${encodeURIComponent(plan.value)}`);
  if (filter.value !== MOVE_FILTERS[0]) parts.push(`moves=${filter.value}`);
  if (since.value !== SINCES[0]) parts.push(`since=${since.value}`);
  if (list.value !== LISTS[0]) parts.push(`list=${list.value}`);
  if (back.value !== BACKS[0]) parts.push(`back=${back.value}`);
  if (hottest.value) parts.push("hottest=1");
  return `#${parts.join("&")}`;
}

read();
// A link of the same page, pasted or followed, changes the fragment only.
addEventListener("hashchange", read);
effect(() => {
  const now = fragment();
  if (location.hash !== now) history.replaceState(null, "", now);
});

/** Show a plan: from a mark, a move or a decision. */
export function showPlan(/** @type {string} */ id) {
  batch(() => { plan.value = id; view.value = "plan"; });
}
