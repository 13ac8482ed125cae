// What the page knows, as signals. What the person chose is in `url`.
import { computed, effect, signal } from "./vendor/signals.js";
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);

const RECORDS_SHOWN = 300;
/** A move that ended so long ago is still "just moved". */
const JUST_S = 6;
/** States of moves that have not ended. */
export const UNFINISHED = ["running", "planned"];

export const status = signal(/** @type {any} */ (null));
/** The newest window, for the map; `frame` follows once the map is painted, for all the rest. */
export const newest = signal(/** @type {any} */ (null));
export const frame = signal(/** @type {any} */ (null));
export const placement = signal(/** @type {any} */ (null));
export const moves = signal(/** @type {any[]} */ ([]));
export const records = signal(/** @type {any[]} */ ([]));
export const points = signal(/** @type {any[]} */ ([]));
export const marks = signal(/** @type {any[]} */ ([]));
/** The frame just before the newest plan began: {frame} once asked, null before. */
export const before = signal(/** @type {any} */ (null));
/** open | lost: the connection from here to the page's own server. */
export const link = signal("open");
/** The cell that the keys are at: {layer, expert} or null. */
export const cursor = signal(/** @type {any} */ (null));
/** Ends of the load scale of the chosen phase. */
export const range = signal(/** @type {any} */ ({ low: 1, high: 2 }));
/** The map is held: windows that close meanwhile wait. */
export const held = signal(false);
export const now_ms = signal(performance.now());

const media = matchMedia("(prefers-color-scheme: dark)");
const system = signal(media.matches);
media.addEventListener("change", () => { system.value = media.matches; });

/** Storage may be forbidden; then the theme lasts as long as the page. */
function remembered() {
  try { return localStorage.getItem("theme") ?? ""; } catch { return ""; }
}
export const theme = signal(remembered());
export const dark = computed(() => (theme.value ? theme.value === "dark" : system.value));
effect(() => {
  document.documentElement.dataset.theme = dark.value ? "dark" : "light";
  try { if (theme.value) localStorage.setItem("theme", theme.value); } catch { /* see above */ }
});

/** Replace or add what is new, by key; keeps the order of first sight. */
export function merge(/** @type {any[]} */ old, /** @type {any[]} */ news, /** @type {(x: any) => string} */ key) {
  const all = new Map(old.map((x) => [key(x), x]));
  for (const x of news) all.set(key(x), x);
  return [...all.values()];
}

/** Newest decisions, runs of the same one folded: a service in balance says so every window. */
export const folded = computed(() => {
  /** @type {any[]} */
  const out = [];
  for (const r of records.value.slice(-RECORDS_SHOWN)) {
    const last = out[out.length - 1];
    if (last && r.outcome === "kept" && last.rule === r.rule && last.outcome === r.outcome) out[out.length - 1] = { ...r, times: last.times + 1 };
    else out.push({ ...r, times: 1 });
  }
  return out.reverse();
});

/** Seconds since the newest window closed, counted on by this page; null before the first. */
export const age_s = computed(() => {
  const s = status.value;
  return s?.data_age_s == null ? null : s.data_age_s + Math.max(0, now_ms.value - s.heard_ms) / 1000;
});

/** Now, by the clock of the page's server, counted on while it is silent; null before it spoke. */
export const wall_s = computed(() => (status.value ? status.value.wall_s + Math.max(0, now_ms.value - status.value.heard_ms) / 1000 : null));

/** What the figures are worth: live | waiting | stale | away | connecting | lost. */
export const worth = computed(() => {
  const s = status.value;
  if (link.value === "lost") return "lost";
  if (!s || s.connection === "connecting") return "connecting";
  if (s.connection === "away") return "away";
  if (age_s.value == null) return "waiting";
  return age_s.value > s.stale_after_s ? "stale" : "live";
});

/** What the controller says is wrong, in sentences; none while this page's own server is away. */
export const problems = computed(() => (placement.value && worth.value !== "lost" ? placement.value.problems : []));

const MEAN_WINDOWS = 10;
let ringed = /** @type {any[]} */ ([]);
/**
 * Moves that change something now, and those of the last moments, for the rings on the map. The same
 * list where nothing differs, so that a passing second draws nothing.
 */
export const moving = computed(() => {
  const wall = wall_s.value ?? 0;
  const now = moves.value.filter((/** @type {any} */ m) => m.state === "running" || (m.state === "done" && m.ended_wall_s && wall - m.ended_wall_s < JUST_S));
  if (now.length !== ringed.length || now.some((/** @type {any} */ m, /** @type {number} */ i) => m !== ringed[i])) ringed = now;
  return ringed;
});

/** Mean imbalance of the newest windows of some: single windows of a second differ by chance. Null without any. */
export const meanOf = (/** @type {any[]} */ windows) => {
  const newest = windows.slice(-MEAN_WINDOWS);
  return newest.length ? newest.reduce((sum, p) => sum + p.imbalance, 0) / newest.length : null;
};

/** Imbalance before the newest plan that the page has seen both sides of, and since it began: means of up to MEAN_WINDOWS windows. */
export const beforePlan = computed(() => {
  for (let i = marks.value.length - 1; i >= 0; i--) {
    const at = marks.value[i].wall_s;
    const earlier = points.value.filter((/** @type {any} */ p) => p.wall_s <= at);
    const since = points.value.filter((/** @type {any} */ p) => p.wall_s > at);
    if (earlier.length) return { mark: marks.value[i], imbalance: Number(meanOf(earlier)), since: meanOf(since) };
  }
  return null;
});

/** Ranks that are there, with their row in the arrays. */
export const ranks = computed(() => (placement.value?.ranks ?? []).map((/** @type {any} */ r, /** @type {number} */ row) => ({ ...r, row })).filter((/** @type {any} */ r) => r.state !== "removed"));
