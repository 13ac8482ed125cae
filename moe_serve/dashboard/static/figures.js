// From documents to figures: typed arrays, what a cell means, how it is said in words.

/** Bytes of base64. */
function bytes(/** @type {string} */ text) {
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

/** Packed counts (u16 with a scale) as numbers. @returns {Float64Array} */
function counts(/** @type {{scale: number, data: string}} */ packed) {
  const units = new Uint16Array(bytes(packed.data).buffer);
  return Float64Array.from(units, (n) => n * packed.scale);
}

/** A frame with its arrays ready: `load` [phases][layers * experts], `rankPairs` [ranks * layers], pairs a second. */
export function readFrame(/** @type {any} */ doc) {
  const cells = doc.layers * doc.experts;
  const window_s = Math.max(1e-9, doc.end_s - doc.start_s);
  const all = counts(doc.load).map((n) => n / window_s);
  const load = Array.from({ length: doc.phases }, (_, p) => all.subarray(p * cells, (p + 1) * cells));
  return { ...doc, window_s, load, rankPairs: counts(doc.rank_pairs).map((n) => n / window_s) };
}

/** A placement with its arrays ready: `replicas` [layers * experts], `pair` and `slotState` [ranks * width]. */
export function readPlacement(/** @type {any} */ doc) {
  return {
    ...doc,
    replicas: bytes(doc.replicas),
    width: doc.slots.width,
    pair: new Int32Array(bytes(doc.slots.pair).buffer),
    slotState: bytes(doc.slots.state),
    states: doc.slots.states,
    missing: new Set(doc.missing),
  };
}

/** Load of every cell for a phase filter, and the sum of each layer: pairs a second. */
export function loadOf(/** @type {any} */ frame, /** @type {string} */ phase) {
  const cells = frame.layers * frame.experts;
  const chosen = phase === "all" ? frame.load : [frame.load[phase === "prefill" ? 0 : 1]];
  const load = new Float64Array(cells);
  for (const part of chosen) for (let i = 0; i < cells; i++) load[i] += part[i];
  const layerSum = new Float64Array(frame.layers);
  for (let i = 0; i < cells; i++) layerSum[Math.floor(i / frame.experts)] += load[i];
  return { load, layerSum };
}

/** A cell's load as a multiple of its layer's fair share; 1 = fair, NaN for a layer without load. */
export const fairShare = (/** @type {number} */ load, /** @type {number} */ layerSum, /** @type {number} */ experts) => (load * experts) / layerSum;

/**
 * Ends of the load scale: they follow the 1st and the 99.5th percentile of what is not zero, but only
 * in steps, so that one window does not recolour the whole map and a hot spot is not hidden by its
 * own maximum.
 */
export class SlowRange {
  constructor() {
    this.low = 0;
    this.high = 0;
    this.away = 0;
  }

  /** Take a window in. */
  next(/** @type {Float64Array} */ load) {
    const some = load.filter((n) => n > 0).sort();
    if (!some.length) return;
    const at = (/** @type {number} */ share) => some[Math.min(some.length - 1, Math.max(0, Math.ceil(some.length * share) - 1))];
    const [low, high] = [at(0.01), at(0.995)];
    const loose = high < this.high * 0.5 || low > this.low * 4;
    this.away = loose ? this.away + 1 : 0;
    if (high > this.high || low < this.low || this.away >= 5) {
      this.high = high * 1.2;
      this.low = Math.min(low * 0.7, this.high / 4);
      this.away = 0;
    }
  }
}

/** Position 0..1 of a load on a log scale. */
export const onScale = (/** @type {number} */ n, /** @type {SlowRange} */ range) => Math.log(Math.max(n, range.low) / range.low) / Math.log(range.high / range.low);

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
  return `${n.toFixed(i && n < 1000 ? 1 : 0)} ${names[i]}`;
}

/** Seconds for people: "0.4 s", "12 s", "3 min", "2 h". */
export function span(/** @type {number} */ s) {
  if (s < 10) return `${Math.max(0, s).toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return `${Math.round(s / 3600)} h`;
}

/** One cell in a sentence, for eyes and for screen readers. */
export function sayCell(/** @type {any} */ frame, /** @type {any} */ placement, /** @type {any} */ cell) {
  const { layer, expert } = cell;
  const i = layer * (frame ?? placement).experts + expert;
  const words = [`Layer ${layer}, expert ${expert}`];
  if (frame) {
    const { load, layerSum } = loadOf(frame, "all");
    if (load[i] > 0) {
      const row = load.subarray(layer * frame.experts, (layer + 1) * frame.experts);
      const rank = 1 + row.filter((n) => n > load[i]).length;
      words.push(`${short(load[i])} pairs/s (prefill ${short(frame.load[0][i])}, decode ${short(frame.load[1]?.[i] ?? 0)})`);
      words.push(`${fairShare(load[i], layerSum[layer], frame.experts).toFixed(2)}× fair share, number ${rank} of ${frame.experts} in its layer`);
    } else words.push("no tokens in this window");
  }
  if (placement) {
    const ranks = [];
    for (let r = 0; r < placement.ranks.length; r++) {
      for (let s = 0; s < placement.width; s++) {
        const at = r * placement.width + s;
        if (placement.pair[at] === i && placement.states[placement.slotState[at]] === "LISTED") ranks.push(placement.ranks[r].rank);
      }
    }
    const n = placement.replicas[i];
    words.push(n === 0 ? "no listed replica" : `${n === 1 ? "1 replica on rank" : `${n} replicas on ranks`} ${ranks.join(", ")}`);
  }
  return words.join(" · ");
}
