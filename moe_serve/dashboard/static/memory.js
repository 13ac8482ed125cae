// What the memory of a rank is used for: experts, staging, free, and whether the free part is in one piece.
import { html } from "./state.js";
import { mib, percent } from "./words.js";

/** States of a slot whose bytes are on their way in or out. */
const STAGING = new Set(["RESERVED", "COPYING", "VERIFIED", "ABORTING", "UNLISTED", "ACKED", "DRAINED", "RECALLED"]);

/** Parts of a rank's budget in bytes. Staging: slots that are being filled or emptied. */
export function memoryOf(/** @type {any} */ r, /** @type {any} */ p) {
  let staged = 0;
  for (let s = r.row * p.width; s < (r.row + 1) * p.width; s++) {
    if (p.pair[s] >= 0 && STAGING.has(p.states[p.slotState[s]])) staged += 1;
  }
  const budget = Math.max(r.budget_bytes, r.resident_bytes);
  const staging = Math.min(budget, Math.max(r.reserved_bytes, staged * p.slot_bytes));
  const experts = Math.max(0, Math.min(r.resident_bytes, budget - staging));
  return { budget, staging, experts, free: Math.max(0, budget - experts - staging), slots: r.num_slots };
}

/** How the free places of the slot pool lie, in words; "" where the rank does not say. */
function sayPieces(/** @type {any} */ memory) {
  if (!memory?.slab_bytes) return "";
  const { free_bytes: free, largest_free_run_bytes: run } = memory;
  if (!free) return "the slot pool is full";
  if (run >= free) return "free places lie in one piece";
  return `free places are scattered: the largest piece has ${percent(run / free)} of them`;
}

export function sayMemory(/** @type {any} */ memory, /** @type {any} */ r) {
  const words = [`experts ${mib(memory.experts)}`, `staging ${memory.staging ? mib(memory.staging) : "none"}`, `free ${memory.free ? mib(memory.free) : "none"} of ${mib(memory.budget)}`];
  const pieces = sayPieces(r.memory);
  if (pieces) words.push(pieces);
  if (r.memory?.loaded_bytes) words.push(`backend ${mib(r.memory.loaded_bytes)}`);
  if (r.memory?.host_cache_bytes) words.push(`host cache of the node, as this rank saw it last, ${mib(r.memory.host_cache_bytes)}`);
  if (r.memory?.process_bytes) words.push(`process ${mib(r.memory.process_bytes)}`);
  return words.join(" · ");
}

export function MemoryBar(/** @type {any} */ { memory }) {
  const part = (/** @type {number} */ n) => ({ width: `${(100 * n) / Math.max(1, memory.budget)}%` });
  return html`<span class="bar memory" title=${`experts ${mib(memory.experts)}, staging ${mib(memory.staging)}, free ${mib(memory.free)} of ${mib(memory.budget)}`}>
    <span class="m-experts" style=${part(memory.experts)}></span><span class="m-staging" style=${part(memory.staging)}></span></span>`;
}
