// Figures in words and in three digits, the same everywhere on the page.
import { fairShare, loadOf } from "./figures.js";

const UNITS = ["", "k", "M", "G", "T"];

/** Three digits and a unit: 1234 -> "1.23k". */
export function short(/** @type {number} */ n) {
  if (!Number.isFinite(n)) return "–";
  let i = 0;
  while (Math.abs(n) >= 999.5 && i < UNITS.length - 1) { n /= 1000; i++; }
  return (n >= 100 || (i === 0 && Number.isInteger(n)) ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2)) + UNITS[i];
}

/** Bytes in binary units: "42.0 MiB". */
export function mib(/** @type {number} */ n) {
  if (!n) return "–";
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (n >= 1024 && i < names.length - 1) { n /= 1024; i++; }
  return `${n.toFixed(i && n < 100 ? 1 : 0)} ${names[i]}`;
}

/** Seconds for people: "0.4 s", "12 s", "3 min", "2 h". */
export function span(/** @type {number} */ s) {
  if (s < 10) return `${Math.max(0, s).toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return `${Math.round(s / 3600)} h`;
}

/** Seconds of a stage or a call: "0.42 ms", "18 ms", "1.2 s". */
export function brief(/** @type {number | null | undefined} */ s) {
  if (s == null || !Number.isFinite(s)) return "–";
  if (s === 0) return "0";
  if (s < 0.001) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 0.01) return `${(s * 1000).toFixed(2)} ms`;
  if (s < 1) return `${(s * 1000).toFixed(s < 0.1 ? 1 : 0)} ms`;
  return `${s.toFixed(s < 10 ? 2 : 1)} s`;
}

/** A share 0..1 as per cent. */
export const percent = (/** @type {number} */ x) => (Number.isFinite(x) ? `${(100 * x).toFixed(x < 0.1 ? 1 : 0)}%` : "–");

/** Seconds gained a second, as per cent of the time of one rank; "–" where unknown. */
export const gain = (/** @type {number | null | undefined} */ x) => (x == null || !Number.isFinite(x) ? "–" : `${x > 0 ? "+" : ""}${(100 * x).toFixed(Math.abs(x) < 0.1 ? 2 : 1)}%`);

/** Imbalance of a balancedness in (0, 1]; null where there is none. */
export const unevenness = (/** @type {number | null | undefined} */ even) => (even ? 1 / even - 1 : null);

export const fixed = (/** @type {number | null | undefined} */ x, digits = 2) => (x == null || !Number.isFinite(x) ? "–" : x.toFixed(digits));

/** Time of day of seconds since the Unix epoch. */
export const clock = (/** @type {number} */ wall_s) => new Date(1000 * wall_s).toLocaleTimeString([], { hourCycle: "h23" });

/** Ranks that list an expert. */
export function listedOn(/** @type {any} */ placement, /** @type {number} */ i) {
  const out = [];
  for (let r = 0; r < placement.ranks.length; r++) {
    for (let s = r * placement.width; s < (r + 1) * placement.width; s++) {
      if (placement.pair[s] === i && placement.states[placement.slotState[s]] === "LISTED") out.push(placement.ranks[r].rank);
    }
  }
  return out;
}

/** One cell in a sentence, for eyes and for screen readers. `change`: of the view, where it compares. */
export function sayCell(/** @type {any} */ frame, /** @type {any} */ placement, /** @type {any} */ cell, /** @type {any} */ change = null) {
  const { layer, expert } = cell;
  const i = layer * (frame ?? placement).experts + expert;
  const words = [`Layer ${layer}, expert ${expert}`];
  if (frame) {
    const { load, layerSum } = loadOf(frame, "all");
    if (load[i] > 0) {
      const row = load.subarray(layer * frame.experts, (layer + 1) * frame.experts);
      const rank = 1 + row.filter((/** @type {number} */ n) => n > load[i]).length;
      words.push(`${short(load[i])} pairs/s (prefill ${short(frame.load[0][i])}, decode ${short(frame.load[1]?.[i] ?? 0)})`);
      words.push(`${fairShare(load[i], layerSum[layer], frame.experts).toFixed(2)}× fair share, number ${rank} of ${frame.experts} in its layer`);
    } else words.push("no tokens in this window");
  } else words.push("load not known yet");
  if (placement) {
    const ranks = listedOn(placement, i);
    const n = placement.replicas[i];
    words.push(n === 0 ? "no listed replica" : `${n === 1 ? "1 replica on rank" : `${n} replicas on ranks`} ${ranks.join(", ")}`);
  }
  if (change) {
    const { now, then, ratio } = change(i);
    words.push(`a replica carries ${short(now)} pairs/s, ${short(then)} before the last plan${Number.isFinite(ratio) && ratio > 0 ? ` (${ratio.toFixed(2)}×)` : ""}`);
  }
  return words.join(" · ");
}
