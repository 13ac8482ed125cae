// From documents to figures: typed arrays, what a cell means, how it is said in words.

/** Bytes of base64. */
export function bytes(/** @type {string} */ text) {
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

/** Packed counts (u16 with a scale) as numbers a second. @returns {Float64Array} */
function counts(/** @type {{scale: number, data: string}} */ packed, /** @type {number} */ window_s) {
  const by = packed.scale / window_s;
  const units = new Uint16Array(bytes(packed.data).buffer);
  const out = new Float64Array(units.length);
  for (let i = 0; i < units.length; i++) out[i] = units[i] * by;
  return out;
}

/** A frame with its arrays ready: `load` [phases][layers * experts], `rankPairs` [ranks * layers], pairs a second. */
export function readFrame(/** @type {any} */ doc) {
  const cells = doc.layers * doc.experts;
  const window_s = Math.max(1e-9, doc.end_s - doc.start_s);
  const all = counts(doc.load, window_s);
  const load = Array.from({ length: doc.phases }, (_, p) => all.subarray(p * cells, (p + 1) * cells));
  const replicasThen = doc.replicas ? bytes(doc.replicas) : null;
  return { ...doc, window_s, load, replicasThen, rankPairs: counts(doc.rank_pairs, window_s) };
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
  for (let layer = 0, i = 0; layer < frame.layers; layer++) for (let e = 0; e < frame.experts; e++, i++) layerSum[layer] += load[i];
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
