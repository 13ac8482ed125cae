// The canvas: layers x experts. Small maps get cells with gaps; large ones are written one pixel a
// cell and scaled without smoothing, which is the only way that keeps up at 58 x 256.
import { HEAT, at, css, ink, share } from "./lut.js";
import { fairShare, loadOf, onScale } from "./figures.js";

const LEFT = 40;
const TOP = 20;
const RIGHT = 96;
const BARS_MAX = 240;
/** Room for the number beside a bar. */
const NUMBER = 46;
const BOTTOM = 4;
const CELL_MAX = 44;
const ROW_MAX = 36;
const ROWS_HEIGHT = 470;
/** Cells of at least this size have gaps and may hold a number. */
const ROOMY = 12;
export const SHARE_CLAMP = 8;

/** Position 0..1 in the table, or -1 for "no tokens". */
function position(/** @type {any} */ view, /** @type {number} */ i) {
  if (view.mode === "replicas") return view.replicas[i] === 0 ? -1 : Math.min(1, 0.12 + (view.replicas[i] - 1) / Math.max(3, view.replicasTop - 1));
  const n = view.load[i];
  if (!(n > 0)) return -1;
  if (view.mode === "share") return 0.5 + Math.log2(fairShare(n, view.layerSum[Math.floor(i / view.experts)], view.experts)) / (2 * Math.log2(SHARE_CLAMP));
  return onScale(n, view.range);
}

/** What is drawn, worked out once a change. @returns {any} null while nothing is known */
export function heatView(/** @type {any} */ { frame, placement, mode, phase, range, dark }) {
  const source = frame ?? placement;
  if (!source || (mode !== "replicas" && !frame) || (mode === "replicas" && !placement)) return null;
  const replicas = placement && placement.experts === source.experts && placement.layers === source.layers ? placement.replicas : null;
  if (mode === "replicas" && !replicas) return null;
  const figures = frame ? loadOf(frame, phase) : { load: null, layerSum: null };
  return {
    ...figures, mode, range, dark, replicas,
    layers: source.layers, experts: source.experts,
    layerImbalance: frame?.layer_imbalance ?? [],
    missing: placement?.missing ?? new Set(),
    replicasTop: replicas ? replicas.reduce((a, b) => Math.max(a, b), 1) : 1,
    table: mode === "share" ? share(dark) : HEAT,
  };
}

export class HeatMap {
  /** @param {HTMLCanvasElement} canvas @param {(cell: any, chosen: boolean) => void} onCell */
  constructor(canvas, onCell) {
    this.canvas = canvas;
    this.pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    this.small = document.createElement("canvas");
    /** @type {any} */
    this.view = null;
    /** @type {any} */
    this.marks = { cell: null, layer: 0, moving: [] };
    this.queued = false;
    new ResizeObserver(() => this.ask()).observe(/** @type {Element} */ (canvas.parentElement));
    canvas.addEventListener("pointermove", (e) => { const cell = this.cellAt(e); if (cell) onCell(cell, false); });
    canvas.addEventListener("click", (e) => { const cell = this.cellAt(e); if (cell) onCell(cell, true); });
  }

  /** @param {any} view from heatView @param {any} marks {cell, layer, moving: [{layer, expert, kind}]} */
  update(view, marks) {
    this.view = view;
    this.marks = marks;
    this.ask();
  }

  ask() {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => { this.queued = false; this.draw(); });
  }

  /** Sizes in device pixels: whole cells, so that no column is wider than its neighbour. */
  fit() {
    const dpr = devicePixelRatio || 1;
    const { layers, experts } = this.view;
    const room = /** @type {Element} */ (this.canvas.parentElement).clientWidth - LEFT - RIGHT;
    const w = Math.max(1, Math.floor(Math.min(CELL_MAX, room / experts) * dpr));
    const h = Math.max(2, Math.floor(Math.min(ROW_MAX, Math.max(3, ROWS_HEIGHT / layers)) * dpr));
    // What whole cells leave over goes to the bars of the layers.
    const right = Math.min(BARS_MAX, RIGHT + Math.max(0, room - (experts * w) / dpr));
    const roomy = w / dpr >= ROOMY && h / dpr >= ROOMY;
    return { dpr, w, h, roomy, right, left: LEFT * dpr, top: TOP * dpr, gap: roomy ? Math.round(2 * dpr) : 0 };
  }

  cellAt(/** @type {MouseEvent} */ event) {
    if (!this.view || !this.at) return null;
    const { dpr, w, h, left, top } = this.at;
    const box = this.canvas.getBoundingClientRect();
    const expert = Math.floor(((event.clientX - box.left) * dpr - left) / w);
    const layer = Math.floor(((event.clientY - box.top) * dpr - top) / h);
    return expert >= 0 && expert < this.view.experts && layer >= 0 && layer < this.view.layers ? { layer, expert } : null;
  }

  draw() {
    const { view, canvas, pen } = this;
    if (!view) { canvas.height = 0; return; }
    const fit = (this.at = this.fit());
    const { dpr, w, h, left, top, right } = fit;
    const width = Math.floor(left + view.experts * w + right * dpr);
    const height = top + view.layers * h + BOTTOM * dpr;
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
      canvas.style.width = `${width / dpr}px`;
      canvas.style.height = `${height / dpr}px`;
    }
    const style = getComputedStyle(canvas);
    const colour = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
    pen.clearRect(0, 0, width, height);
    if (fit.roomy) this.drawCells(fit, colour("--cold"));
    else this.drawPixels(fit, colour("--cold-rgb").split(" ").map(Number));
    this.drawMissing(fit, colour("--bad"));
    this.drawAxes(fit, colour);
    this.drawMarks(fit, colour);
  }

  drawCells(/** @type {any} */ { w, h, left, top, gap, dpr }, /** @type {string} */ cold) {
    const { view, pen } = this;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.font = `${11 * dpr}px system-ui, sans-serif`;
    for (let i = 0; i < view.layers * view.experts; i++) {
      const x = left + (i % view.experts) * w;
      const y = top + Math.floor(i / view.experts) * h;
      const p = position(view, i);
      const rgb = p < 0 ? null : at(view.table, p);
      pen.fillStyle = rgb ? css(rgb) : cold;
      pen.beginPath();
      pen.roundRect(x, y, w - gap, h - gap, 3 * dpr);
      pen.fill();
      if (!rgb) {
        // A mark beside the colour: no tokens is not little load.
        pen.fillStyle = css([128, 128, 128]);
        pen.fillRect(x + (w - gap) / 2 - 4 * dpr, y + (h - gap) - 5 * dpr, 8 * dpr, dpr);
      }
      const n = view.replicas?.[i] ?? 0;
      if (n > 1 || (view.mode === "replicas" && n > 0)) {
        pen.fillStyle = rgb ? ink(rgb) : css([128, 128, 128]);
        pen.fillText(view.mode === "replicas" ? String(n) : `×${n}`, x + (w - gap) / 2, y + (h - gap) / 2);
      }
    }
  }

  drawPixels(/** @type {any} */ { w, h, left, top }, /** @type {number[]} */ cold) {
    const { view, pen, small } = this;
    small.width = view.experts;
    small.height = view.layers;
    const to = /** @type {CanvasRenderingContext2D} */ (small.getContext("2d"));
    const image = to.createImageData(view.experts, view.layers);
    for (let i = 0; i < view.layers * view.experts; i++) {
      const p = position(view, i);
      const rgb = p < 0 ? cold : at(view.table, p);
      image.data.set(rgb, 4 * i);
      image.data[4 * i + 3] = 255;
    }
    to.putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, left, top, view.experts * w, view.layers * h);
  }

  drawMissing(/** @type {any} */ { w, h, left, top, gap, dpr }, /** @type {string} */ bad) {
    const { view, pen } = this;
    pen.strokeStyle = bad;
    pen.lineWidth = Math.max(1, 1.5 * dpr);
    for (const i of view.missing) {
      const x = left + (i % view.experts) * w;
      const y = top + Math.floor(i / view.experts) * h;
      pen.beginPath();
      pen.moveTo(x, y);
      pen.lineTo(x + w - gap, y + h - gap);
      pen.moveTo(x + w - gap, y);
      pen.lineTo(x, y + h - gap);
      pen.stroke();
    }
  }

  drawAxes(/** @type {any} */ { w, h, left, top, gap, dpr, right }, /** @type {(n: string) => string} */ colour) {
    const { view, pen, marks } = this;
    pen.font = `${11 * dpr}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const everyRow = [1, 2, 5, 10, 20, 50].find((n) => (n * h) / dpr >= 13) ?? 100;
    for (let layer = 0; layer < view.layers; layer++) {
      const chosen = layer === marks.layer;
      if (layer % everyRow && !chosen) continue;
      if (!chosen && Math.abs(layer - marks.layer) * h < 13 * dpr) continue;
      pen.fillStyle = colour(chosen ? "--ink" : "--muted");
      pen.fillText(`${chosen ? "▸ " : ""}L${layer}`, left - 6 * dpr, top + layer * h + (h - gap) / 2);
    }
    pen.textAlign = "center";
    pen.fillStyle = colour("--muted");
    const everyColumn = [1, 2, 4, 8, 16, 32, 64].find((n) => (n * w) / dpr >= 26) ?? 128;
    for (let e = 0; e < view.experts; e += everyColumn) pen.fillText(`${e ? "" : "E"}${e}`, left + e * w + (w - gap) / 2, top - 10 * dpr);
    this.drawLayerBars({ w, h, left, top, gap, dpr, right, everyRow }, colour);
  }

  /** Imbalance of each layer at the right edge. */
  drawLayerBars(/** @type {any} */ { w, h, left, top, gap, dpr, right, everyRow }, /** @type {(n: string) => string} */ colour) {
    const { view, pen } = this;
    if (!view.layerImbalance.length) return;
    const x = left + view.experts * w + 10 * dpr;
    const long = (right - 10 - NUMBER) * dpr;
    const most = Math.max(0.25, ...view.layerImbalance);
    pen.textAlign = "left";
    pen.fillStyle = colour("--muted");
    pen.fillText("layer imbalance", x, top - 10 * dpr);
    view.layerImbalance.forEach((/** @type {number} */ n, /** @type {number} */ layer) => {
      const y = top + layer * h;
      pen.fillStyle = colour("--accent");
      pen.globalAlpha = 0.75;
      pen.fillRect(x, y + Math.max(0, (h - gap) / 2 - 3 * dpr), Math.max(dpr, (n / most) * long), Math.min(6 * dpr, Math.max(1, h - gap - 1)));
      pen.globalAlpha = 1;
      if (layer % everyRow) return;
      pen.fillStyle = colour("--muted");
      pen.fillText(n.toFixed(2), x + (n / most) * long + 6 * dpr, y + (h - gap) / 2);
    });
  }

  drawMarks(/** @type {any} */ fit, /** @type {(n: string) => string} */ colour) {
    const { w, h, left, top, gap, dpr } = fit;
    const { pen, marks, view } = this;
    const ring = (/** @type {any} */ cell, /** @type {string} */ stroke, /** @type {number} */ grow, /** @type {number[]} */ dash) => {
      const x = left + cell.expert * w;
      const y = top + cell.layer * h;
      for (const [line, width] of [[colour("--halo"), 3.5], [stroke, 1.75]]) {
        pen.strokeStyle = String(line);
        pen.lineWidth = Number(width) * dpr;
        pen.setLineDash(line === stroke ? dash.map((d) => d * dpr) : []);
        pen.strokeRect(x - grow * dpr, y - grow * dpr, w - gap + 2 * grow * dpr, h - gap + 2 * grow * dpr);
      }
      pen.setLineDash([]);
    };
    for (const move of marks.moving) {
      if (move.layer < view.layers && move.expert < view.experts) ring(move, colour("--mark"), 1, move.state === "running" ? [3, 2] : []);
    }
    if (marks.cell) {
      pen.fillStyle = colour("--cross");
      pen.fillRect(left, top + marks.cell.layer * h, view.experts * w - gap, h - gap);
      pen.fillRect(left + marks.cell.expert * w, top, w - gap, view.layers * h - gap);
      ring(marks.cell, colour("--ink"), 1, []);
    }
  }
}
