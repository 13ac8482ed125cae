// What the map shows, worked out once a change: a position on the scale for every cell, the order of
// the columns, the part that is zoomed to. Drawing is in `heatmap` and `heatpaint`.
import { HEAT, share } from "./lut.js";
import { fairShare, loadOf, onScale } from "./figures.js";

export const SHARE_CLAMP = 8;
/** Marks that are not on the scale. */
export const ZERO = -1;
export const UNKNOWN = -2;

const fold = (/** @type {number} */ x) => 0.5 + Math.log2(x) / (2 * Math.log2(SHARE_CLAMP));

/** Load a replica, now and before: how a plan and the traffic together changed what a rank feels. */
function changeOf(/** @type {any} */ frame, /** @type {any} */ past, /** @type {string} */ phase, /** @type {Uint8Array | null} */ replicas) {
  if (!frame || !past || !replicas || !past.replicasThen || past.layers !== frame.layers || past.experts !== frame.experts) return null;
  const now = loadOf(frame, phase).load;
  const then = loadOf(past, phase).load;
  return (/** @type {number} */ i) => {
    if (!(now[i] > 0)) return { ratio: 0, now: 0, then: then[i] / Math.max(1, past.replicasThen[i]) };
    const a = now[i] / Math.max(1, replicas[i]);
    const b = then[i] / Math.max(1, past.replicasThen[i]);
    return { ratio: b > 0 ? a / b : Infinity, now: a, then: b };
  };
}

/** Position 0..1 of every cell, or ZERO or UNKNOWN. */
function positionsOf(/** @type {any} */ v) {
  const cells = v.layers * v.experts;
  const out = new Float32Array(cells).fill(UNKNOWN);
  if (v.mode === "replicas") {
    if (v.replicas) for (let i = 0; i < cells; i++) out[i] = v.replicas[i] === 0 ? ZERO : Math.min(1, 0.12 + (v.replicas[i] - 1) / Math.max(3, v.replicasTop - 1));
  } else if (v.mode === "change") {
    if (v.change) for (let i = 0; i < cells; i++) { const { ratio } = v.change(i); out[i] = ratio > 0 ? Math.min(1, Math.max(0, fold(ratio))) : ZERO; }
  } else if (v.load && v.mode === "share") {
    for (let i = 0; i < cells; i++) out[i] = v.load[i] > 0 ? Math.min(1, Math.max(0, fold(fairShare(v.load[i], v.layerSum[Math.floor(i / v.experts)], v.experts)))) : ZERO;
  } else if (v.load) {
    for (let i = 0; i < cells; i++) out[i] = v.load[i] > 0 ? Math.min(1, Math.max(0, onScale(v.load[i], v.range))) : ZERO;
  }
  return out;
}

/** Lowest rank that lists each expert, layers x experts; 65535 = none. */
function holders(/** @type {any} */ placement) {
  const out = new Uint16Array(placement.layers * placement.experts).fill(65535);
  for (let r = placement.ranks.length - 1; r >= 0; r--) {
    for (let s = r * placement.width; s < (r + 1) * placement.width; s++) {
      if (placement.pair[s] >= 0 && placement.states[placement.slotState[s]] === "LISTED") out[placement.pair[s]] = placement.ranks[r].rank;
    }
  }
  return out;
}

/** Column of the map -> expert, layer by layer; null where both are the same. */
function orderOf(/** @type {any} */ v, /** @type {string} */ sort) {
  const key = sort === "load" ? v.load : sort === "device" ? v.holder : null;
  if (!key) return null;
  const order = new Uint16Array(v.layers * v.experts);
  const row = Array.from({ length: v.experts }, (_, e) => e);
  const sign = sort === "load" ? -1 : 1;
  for (let layer = 0; layer < v.layers; layer++) {
    const from = layer * v.experts;
    row.sort((a, b) => sign * (key[from + a] - key[from + b]) || a - b);
    order.set(row, from);
  }
  return order;
}

/** The part to draw, inside what there is. */
function clip(/** @type {number[] | null} */ zoom, /** @type {number} */ layers, /** @type {number} */ experts) {
  if (!zoom) return [0, layers - 1, 0, experts - 1];
  const [a, b, c, d] = zoom;
  return a >= layers || c >= experts ? [0, layers - 1, 0, experts - 1] : [a, Math.min(b, layers - 1), c, Math.min(d, experts - 1)];
}

/** @returns {any} null while not even the size is known */
export function heatView(/** @type {any} */ { frame, placement, past, mode, phase, sort, zoom, range, dark }) {
  const source = frame ?? placement;
  if (!source?.layers || !source.experts) return null;
  const { layers, experts } = source;
  const fits = placement && placement.experts === experts && placement.layers === layers;
  const replicas = fits ? placement.replicas : null;
  const figures = frame ? loadOf(frame, phase) : { load: null, layerSum: null };
  const v = {
    ...figures, mode, range, dark, replicas, layers, experts, sort,
    layerImbalance: frame?.layer_imbalance ?? [],
    missing: fits ? placement.missing : new Set(),
    replicasTop: replicas ? replicas.reduce((/** @type {number} */ a, /** @type {number} */ b) => Math.max(a, b), 1) : 1,
    table: mode === "share" || mode === "change" ? share(dark) : HEAT,
    change: mode === "change" ? changeOf(frame, past, phase, replicas) : null,
    holder: sort === "device" && fits ? holders(placement) : null,
  };
  const order = orderOf(v, sort);
  return { ...v, order, part: clip(zoom, layers, experts), positions: positionsOf(v) };
}

/** Expert shown in a column of a layer. */
export const expertAt = (/** @type {any} */ v, /** @type {number} */ layer, /** @type {number} */ column) => (v.order ? v.order[layer * v.experts + column] : column);

/** Column in which a layer shows an expert. */
export function columnOf(/** @type {any} */ v, /** @type {number} */ layer, /** @type {number} */ expert) {
  if (!v.order) return expert;
  const from = layer * v.experts;
  return v.order.subarray(from, from + v.experts).indexOf(expert);
}

/** Zoom by a factor about a cell; null where that shows everything. */
export function zoomed(/** @type {any} */ v, /** @type {{layer: number, column: number} | null} */ about, /** @type {number} */ factor) {
  const [a, b, c, d] = v.part;
  const span = (/** @type {number} */ from, /** @type {number} */ to, /** @type {number} */ all, /** @type {number} */ least, /** @type {number} */ at) => {
    const size = Math.min(all, Math.max(Math.min(least, all), Math.round((to - from + 1) * factor)));
    const share = (at - from + 0.5) / (to - from + 1);
    const first = Math.min(all - size, Math.max(0, Math.round(at + 0.5 - share * size)));
    return [first, first + size - 1];
  };
  const rows = span(a, b, v.layers, 2, about ? about.layer : (a + b) / 2);
  const columns = span(c, d, v.experts, 4, about ? about.column : (c + d) / 2);
  const whole = rows[0] === 0 && rows[1] === v.layers - 1 && columns[0] === 0 && columns[1] === v.experts - 1;
  return whole ? null : [...rows, ...columns];
}

/** The zoom moved so far that it shows a cell; null stays null. */
export function showing(/** @type {number[] | null} */ zoom, /** @type {number} */ layer, /** @type {number} */ column) {
  if (!zoom) return null;
  const [a, b, c, d] = zoom;
  const by = (/** @type {number} */ at, /** @type {number} */ from, /** @type {number} */ to) => (at < from ? at - from : at > to ? at - to : 0);
  const [y, x] = [by(layer, a, b), by(column, c, d)];
  return y || x ? [a + y, b + y, c + x, d + x] : zoom;
}

/** Cells with most load, most first: [[index, load], ...]. Ties by lowest index. */
export function hottest(/** @type {Float64Array} */ load, /** @type {number} */ wanted) {
  const some = load.slice().sort();
  const least = some[Math.max(0, some.length - wanted)];
  const out = [];
  for (let i = 0; i < load.length; i++) if (load[i] >= least && load[i] > 0) out.push(i);
  return out.sort((a, b) => load[b] - load[a] || a - b).slice(0, wanted);
}
