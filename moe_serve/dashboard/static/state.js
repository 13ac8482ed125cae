// What the page knows, as signals, and what the person chose (kept in the URL, so a link shows the
// same view).
import { computed, effect, signal } from "./vendor/signals.js";
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);

export const MODES = ["load", "share", "replicas"];
export const PHASES = ["all", "prefill", "decode"];
const RECORDS_SHOWN = 300;
/** A move that ended so long ago is still "just moved". */
const JUST_S = 6;

/** @type {import("./vendor/signals.js").Signal<any>} */
export const status = signal(null);
export const frame = signal(/** @type {any} */ (null));
export const placement = signal(/** @type {any} */ (null));
export const moves = signal(/** @type {any[]} */ ([]));
export const records = signal(/** @type {any[]} */ ([]));
export const points = signal(/** @type {any[]} */ ([]));
export const marks = signal(/** @type {any[]} */ ([]));
/** open | lost: the connection from here to the page's own server. */
export const link = signal("open");
export const cursor = signal(/** @type {any} */ (null));
export const now_ms = signal(performance.now());

const media = matchMedia("(prefers-color-scheme: dark)");
const system = signal(media.matches);
media.addEventListener("change", () => { system.value = media.matches; });
export const theme = signal(localStorage.getItem("theme") ?? "");
export const dark = computed(() => (theme.value ? theme.value === "dark" : system.value));
effect(() => {
  document.documentElement.dataset.theme = dark.value ? "dark" : "light";
  if (theme.value) localStorage.setItem("theme", theme.value);
});

const hash = new URLSearchParams(location.hash.slice(1));
const oneOf = (/** @type {string[]} */ all, /** @type {string | null} */ chosen) => (chosen && all.includes(chosen) ? chosen : all[0]);
export const mode = signal(oneOf(MODES, hash.get("mode")));
export const phase = signal(oneOf(PHASES, hash.get("phase")));
export const layer = signal(Math.max(0, Number.parseInt(hash.get("layer") ?? "0", 10) || 0));
effect(() => { history.replaceState(null, "", `#mode=${mode.value}&phase=${phase.value}&layer=${layer.value}`); });

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

/** Moves that change something now, and those of the last moments, for the rings on the map. */
export const moving = computed(() => {
  const wall = wall_s.value ?? 0;
  return moves.value.filter((m) => m.state === "running" || (m.state === "done" && m.ended_wall_s && wall - m.ended_wall_s < JUST_S));
});

/** Imbalance just before the newest plan that the page has seen both sides of. */
export const beforePlan = computed(() => {
  for (let i = marks.value.length - 1; i >= 0; i--) {
    const before = points.value.filter((p) => p.wall_s <= marks.value[i].wall_s);
    if (before.length) return { mark: marks.value[i], imbalance: before[before.length - 1].imbalance };
  }
  return null;
});
