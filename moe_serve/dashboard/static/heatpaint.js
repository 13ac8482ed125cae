// Drawing of the map. Small parts get cells with gaps; large ones are written one pixel a cell and
// scaled without smoothing, which is the only way that keeps up at 58 x 256.
import { at, css, ink } from "./lut.js";
import { UNKNOWN, ZERO, columnOf } from "./heatview.js";
import { short } from "./words.js";

/** Room for the number beside a bar. */
const NUMBER = 46;
const FONT = "px system-ui, sans-serif";
const GREY = css([128, 128, 128]);

/** @typedef {any} Job {pen, small, view, fit, marks, drag, colour} */

/** All that changes with a window; `axesToo` where the picture's frame has changed as well. */
export function paintCells(/** @type {Job} */ job, /** @type {boolean} */ axesToo) {
  const { colour, pen, fit } = job;
  const { width, height } = pen.canvas;
  if (axesToo) pen.clearRect(0, 0, width, height);
  else pen.clearRect(fit.left, fit.top, width, height);
  if (job.fit.roomy) cells(job, colour);
  else pixels(job, colour);
  missing(job, colour("--bad"));
  if (axesToo) axes(job, colour);
  layerBars(job, colour);
}

/** What changes with the pointer and with moves. */
export const paintMarks = (/** @type {Job} */ job) => marks(job, job.colour);

/** Visits every cell that is shown: (index of layer and expert, x, y). */
function each(/** @type {Job} */ { view, fit }, /** @type {(i: number, x: number, y: number) => void} */ visit) {
  for (let r = 0; r < fit.rows; r++) {
    const from = (fit.row0 + r) * view.experts;
    const y = fit.top + r * fit.h;
    for (let c = 0; c < fit.columns; c++) {
      const column = fit.column0 + c;
      visit(from + (view.order ? view.order[from + column] : column), fit.left + c * fit.w, y);
    }
  }
}

function cells(/** @type {Job} */ job, /** @type {(n: string) => string} */ colour) {
  const { view, pen, fit } = job;
  const [w, h, { dpr }] = [fit.w - fit.gap, fit.h - fit.gap, fit];
  const tall = h >= 30 * dpr && w >= 44 * dpr;
  const [cold, card] = [colour("--cold"), colour("--card")];
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  each(job, (i, x, y) => {
    const p = view.positions[i];
    const rgb = p >= 0 ? at(view.table, p) : null;
    pen.fillStyle = rgb ? css(rgb) : p === UNKNOWN ? card : cold;
    pen.beginPath();
    pen.roundRect(x, y, w, h, 3 * dpr);
    pen.fill();
    if (p === ZERO) {
      // A mark beside the colour: no tokens is not little load.
      pen.fillStyle = GREY;
      pen.fillRect(x + w / 2 - 4 * dpr, y + h - 5 * dpr, 8 * dpr, dpr);
    } else if (p === UNKNOWN) {
      pen.strokeStyle = GREY;
      pen.lineWidth = dpr;
      pen.setLineDash([2 * dpr, 2 * dpr]);
      pen.strokeRect(x + dpr, y + dpr, w - 2 * dpr, h - 2 * dpr);
      pen.setLineDash([]);
    }
    const [first, second] = said(view, i, tall);
    if (!first) return;
    pen.fillStyle = rgb ? ink(rgb) : colour("--muted");
    pen.font = `${11 * dpr}${FONT}`;
    pen.fillText(first, x + w / 2, y + h / 2 - (second ? 6 * dpr : 0), w - 2 * dpr);
    if (!second) return;
    pen.font = `${10 * dpr}${FONT}`;
    pen.fillText(second, x + w / 2, y + h / 2 + 7 * dpr, w - 2 * dpr);
  });
}

/** Text in a cell, one or two lines. */
function said(/** @type {any} */ view, /** @type {number} */ i, /** @type {boolean} */ tall) {
  const n = view.replicas?.[i] ?? 0;
  const name = `E${i % view.experts}${n > 1 && view.mode !== "replicas" ? ` ×${n}` : ""}`;
  if (tall) {
    if (view.mode === "replicas") return [name, view.replicas ? `${n}×` : "?"];
    return [name, view.positions[i] === UNKNOWN ? "?" : view.load && view.load[i] > 0 ? short(view.load[i]) : ""];
  }
  if (view.mode === "replicas" && view.sort === "id") return [n ? String(n) : "", ""];
  if (view.sort !== "id") return [String(i % view.experts), ""];
  return [n > 1 ? `×${n}` : view.positions[i] === UNKNOWN ? "?" : "", ""];
}

function pixels(/** @type {Job} */ job, /** @type {(n: string) => string} */ colour) {
  const { view, pen, small, fit } = job;
  small.width = fit.columns;
  small.height = fit.rows;
  const to = /** @type {CanvasRenderingContext2D} */ (small.getContext("2d"));
  const image = to.createImageData(fit.columns, fit.rows);
  const { data } = image;
  const cold = colour("--cold-rgb").split(" ").map(Number);
  const unknown = colour("--unknown-rgb").split(" ").map(Number);
  const { table, positions } = view;
  const zeros = new Path2D();
  const strange = new Path2D();
  const dot = Math.max(1, Math.round(fit.dpr));
  let k = 0;
  each(job, (i, x, y) => {
    const p = positions[i];
    if (p >= 0) {
      const t = 3 * Math.round(p * 255);
      data[k] = table[t];
      data[k + 1] = table[t + 1];
      data[k + 2] = table[t + 2];
    } else {
      data.set(p === ZERO ? cold : unknown, k);
      if (p === ZERO) zeros.rect(x + Math.floor((fit.w - dot) / 2), y + Math.floor((fit.h - dot) / 2), dot, dot);
      else { strange.moveTo(x, y + fit.h); strange.lineTo(x + fit.w, y); }
    }
    data[k + 3] = 255;
    k += 4;
  });
  to.putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, fit.left, fit.top, fit.columns * fit.w, fit.rows * fit.h);
  if (fit.w < 4 || fit.h < 4) return;
  pen.fillStyle = pen.strokeStyle = GREY;
  pen.lineWidth = fit.dpr;
  pen.fill(zeros);
  pen.stroke(strange);
}

function missing(/** @type {Job} */ { view, pen, fit }, /** @type {string} */ bad) {
  const { w, h, left, top, gap, dpr } = fit;
  pen.strokeStyle = bad;
  pen.lineWidth = Math.max(1, 1.5 * dpr);
  for (const i of view.missing) {
    const layer = Math.floor(i / view.experts);
    const [r, c] = [layer - fit.row0, columnOf(view, layer, i % view.experts) - fit.column0];
    if (r < 0 || r >= fit.rows || c < 0 || c >= fit.columns) continue;
    const [x, y] = [left + c * w, top + r * h];
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(x + w - gap, y + h - gap);
    pen.moveTo(x + w - gap, y);
    pen.lineTo(x, y + h - gap);
    pen.stroke();
  }
}

const everyRow = (/** @type {any} */ fit) => [1, 2, 5, 10, 20, 50].find((n) => (n * fit.h) / fit.dpr >= 13) ?? 100;

function axes(/** @type {Job} */ { view, pen, fit, marks: chosen }, /** @type {(n: string) => string} */ colour) {
  const { w, h, left, top, gap, dpr } = fit;
  pen.font = `${11 * dpr}${FONT}`;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  for (let r = 0; r < fit.rows; r++) {
    const layer = fit.row0 + r;
    const own = layer === chosen.layer;
    if (layer % everyRow(fit) && !own) continue;
    if (!own && Math.abs(layer - chosen.layer) * h < 13 * dpr) continue;
    pen.fillStyle = colour(own ? "--ink" : "--muted");
    pen.fillText(`${own ? "▸ " : ""}L${layer}`, left - 6 * dpr, top + r * h + (h - gap) / 2);
  }
  pen.fillStyle = colour("--muted");
  const y = top - 10 * dpr;
  pen.textAlign = "left";
  if (view.layerImbalance.length) pen.fillText("layer imbalance", left + fit.columns * w + 10 * dpr, y);
  if (view.sort === "device" && view.holder) {
    deviceAxis(view, pen, fit, chosen.layer, y);
    return;
  }
  pen.textAlign = "center";
  const every = [1, 2, 4, 8, 16, 32, 64].find((n) => (n * w) / dpr >= 26) ?? 128;
  const first = Math.ceil(fit.column0 / every) * every;
  for (let c = first; c < fit.column0 + fit.columns; c += every) {
    const name = view.sort === "load" && view.load ? `#${c + 1}` : `${c ? "" : "E"}${c}`;
    pen.fillText(name, left + (c - fit.column0) * w + (w - gap) / 2, y);
  }
}

/** Names of ranks where the chosen layer's columns begin to be theirs. */
function deviceAxis(/** @type {any} */ view, /** @type {any} */ pen, /** @type {any} */ fit, /** @type {number} */ layer, /** @type {number} */ y) {
  pen.textAlign = "left";
  let before = -1;
  let end = -Infinity;
  for (let c = 0; c < fit.columns; c++) {
    const holder = view.holder[layer * view.experts + view.order[layer * view.experts + fit.column0 + c]];
    if (holder === before) continue;
    before = holder;
    const x = fit.left + c * fit.w;
    if (x < end) continue;
    const name = holder === 65535 ? "none" : `rank ${holder}`;
    pen.fillText(name, x, y);
    pen.fillRect(x, y + 6 * fit.dpr, fit.dpr, 4 * fit.dpr);
    end = x + pen.measureText(name).width + 8 * fit.dpr;
  }
}

/** Imbalance of each layer at the right edge. */
function layerBars(/** @type {Job} */ { view, pen, fit }, /** @type {(n: string) => string} */ colour) {
  const { w, h, left, top, gap, dpr, right } = fit;
  if (!view.layerImbalance.length) return;
  const x = left + fit.columns * w + 10 * dpr;
  const long = (right - 10 - NUMBER) * dpr;
  const most = Math.max(0.25, ...view.layerImbalance);
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.font = `${11 * dpr}${FONT}`;
  const [accent, muted, every] = [colour("--accent"), colour("--muted"), everyRow(fit)];
  for (let r = 0; r < fit.rows; r++) {
    const n = view.layerImbalance[fit.row0 + r] ?? 0;
    const y = top + r * h;
    pen.fillStyle = accent;
    pen.globalAlpha = 0.75;
    pen.fillRect(x, y + Math.max(0, (h - gap) / 2 - 3 * dpr), Math.max(dpr, (n / most) * long), Math.min(6 * dpr, Math.max(1, h - gap - 1)));
    pen.globalAlpha = 1;
    if ((fit.row0 + r) % every) continue;
    pen.fillStyle = muted;
    pen.fillText(n.toFixed(2), x + (n / most) * long + 6 * dpr, y + (h - gap) / 2);
  }
}

function marks(/** @type {Job} */ { view, pen, fit, marks: shown, drag }, /** @type {(n: string) => string} */ colour) {
  const { w, h, left, top, gap, dpr } = fit;
  const [halo, mark, inkColour] = [colour("--halo"), colour("--mark"), colour("--ink")];
  const box = (/** @type {any} */ cell) => {
    const [r, c] = [cell.layer - fit.row0, columnOf(view, cell.layer, cell.expert) - fit.column0];
    return r < 0 || r >= fit.rows || c < 0 || c >= fit.columns ? null : { x: left + c * w, y: top + r * h };
  };
  const ring = (/** @type {any} */ cell, /** @type {string} */ stroke, /** @type {number[]} */ dash) => {
    const at = cell.layer < view.layers && cell.expert < view.experts ? box(cell) : null;
    if (!at) return;
    for (const [line, width] of [[halo, 3.5], [stroke, 1.75]]) {
      pen.strokeStyle = String(line);
      pen.lineWidth = Number(width) * dpr;
      pen.setLineDash(line === stroke ? dash.map((d) => d * dpr) : []);
      pen.strokeRect(at.x - dpr, at.y - dpr, w - gap + 2 * dpr, h - gap + 2 * dpr);
    }
    pen.setLineDash([]);
  };
  for (const move of shown.moving) ring(move, mark, move.state === "running" ? [3, 2] : []);
  const at = shown.cell && box(shown.cell);
  if (at) {
    pen.fillStyle = colour("--cross");
    pen.fillRect(left, at.y, fit.columns * w - gap, h - gap);
    pen.fillRect(at.x, top, w - gap, fit.rows * h - gap);
    ring(shown.cell, inkColour, []);
  }
  if (!drag) return;
  const [y0, y1] = [drag.from.layer, drag.to.layer].sort((a, b) => a - b).map((n) => n - fit.row0);
  const [x0, x1] = [drag.from.column, drag.to.column].sort((a, b) => a - b).map((n) => n - fit.column0);
  pen.fillStyle = colour("--accent-wash");
  pen.strokeStyle = colour("--accent");
  pen.lineWidth = 1.5 * dpr;
  const area = [left + x0 * w, top + y0 * h, (x1 - x0 + 1) * w - gap, (y1 - y0 + 1) * h - gap];
  pen.fillRect(area[0], area[1], area[2], area[3]);
  pen.strokeRect(area[0], area[1], area[2], area[3]);
}
