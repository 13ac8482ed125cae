// The canvas of the map: its size, what is under the pointer, a rectangle dragged to zoom.
import { paintCells, paintMarks } from "./heatpaint.js";
import { expertAt } from "./heatview.js";

const LEFT = 44;
const TOP = 20;
const RIGHT = 96;
const BARS_MAX = 240;
const BOTTOM = 4;
const CELL_MAX = 44;
/** Of a part that is zoomed to. */
const ZOOM_CELL_MAX = 84;
const ROW_MAX = 36;
const ROWS_HEIGHT = 470;
/** Cells of at least this size have gaps and may hold a number. */
const ROOMY = 12;
const DRAG_PX = 6;

export class HeatMap {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {{point: (cell: any) => void, choose: (cell: any) => void, zoom: (part: number[] | null) => void}} on
   */
  constructor(canvas, on) {
    this.canvas = canvas;
    this.pen = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    this.small = document.createElement("canvas");
    this.on = on;
    /** @type {any} */
    this.view = null;
    /** @type {any} */
    this.marks = { cell: null, layer: 0, moving: [] };
    /** @type {any} where a drag began and is, in cells */
    this.drag = null;
    this.queued = false;
    /** @type {string | null} what `under` holds, null = nothing of use */
    this.base = null;
    this.under = document.createElement("canvas");
    /** What its axes say. */
    this.axes = "";
    this.room = 0;
    /** @type {Map<string, string>} of the theme */
    this.colours = new Map();
    // Its width is told, not asked for: asking would lay out the whole page before each picture.
    this.observer = new ResizeObserver(([entry]) => { this.room = entry.contentRect.width; this.ask(); });
    this.observer.observe(/** @type {Element} */ (canvas.parentElement));
    canvas.addEventListener("pointerdown", (e) => this.pressed(e));
    canvas.addEventListener("pointermove", (e) => this.moved(e));
    canvas.addEventListener("pointerup", (e) => this.released(e));
    canvas.addEventListener("pointercancel", () => { this.drag = null; this.ask(); });
    canvas.addEventListener("dblclick", () => on.zoom(null));
  }

  close() {
    this.observer.disconnect();
  }

  /** @param {any} view from heatView */
  show(view) {
    if (view?.dark !== this.view?.dark) this.colours.clear();
    this.view = view;
    this.base = null;
    this.ask();
  }

  /** @param {any} marks {cell, layer, moving: [{layer, expert, kind}]} */
  mark(marks) {
    if (marks.layer !== this.marks.layer) this.base = null;
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
    const [a, b, c, d] = this.view.part;
    const [rows, columns] = [b - a + 1, d - c + 1];
    const whole = rows === this.view.layers && columns === this.view.experts;
    const room = (this.room || /** @type {Element} */ (this.canvas.parentElement).clientWidth) - LEFT - RIGHT;
    const w = Math.max(1, Math.floor(Math.min(whole ? CELL_MAX : ZOOM_CELL_MAX, room / columns) * dpr));
    const h = Math.max(2, Math.floor(Math.min(whole ? ROW_MAX : ROW_MAX * 1.25, Math.max(3, ROWS_HEIGHT / rows)) * dpr));
    // What whole cells leave over goes to the bars of the layers.
    const right = Math.min(BARS_MAX, RIGHT + Math.max(0, room - (columns * w) / dpr));
    const roomy = w / dpr >= ROOMY && h / dpr >= ROOMY;
    return { dpr, w, h, rows, columns, row0: a, column0: c, roomy, right, left: LEFT * dpr, top: TOP * dpr, gap: roomy ? Math.round(2 * dpr) : 0 };
  }

  /** Row and column under the pointer, held inside the map; `inside` says whether it is there. */
  placeAt(/** @type {MouseEvent} */ event) {
    if (!this.view || !this.at) return null;
    const { dpr, w, h, left, top, rows, columns, row0, column0 } = this.at;
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) * dpr - left) / w);
    const y = Math.floor(((event.clientY - box.top) * dpr - top) / h);
    const inside = x >= 0 && x < columns && y >= 0 && y < rows;
    return { inside, layer: row0 + Math.min(rows - 1, Math.max(0, y)), column: column0 + Math.min(columns - 1, Math.max(0, x)) };
  }

  cellAt(/** @type {MouseEvent} */ event) {
    const place = this.placeAt(event);
    return place?.inside ? { layer: place.layer, expert: expertAt(this.view, place.layer, place.column) } : null;
  }

  pressed(/** @type {PointerEvent} */ event) {
    const place = event.button === 0 && event.pointerType !== "touch" ? this.placeAt(event) : null;
    this.drag = { from: place?.inside ? place : null, to: place, x: event.clientX, y: event.clientY, far: false };
  }

  moved(/** @type {PointerEvent} */ event) {
    const cell = this.cellAt(event);
    if (cell) this.on.point(cell);
    if (!this.drag?.from) return;
    this.drag.to = this.placeAt(event);
    if (!this.drag.far && Math.hypot(event.clientX - this.drag.x, event.clientY - this.drag.y) > DRAG_PX) {
      this.drag.far = true;
      // From here on the pointer may leave the canvas.
      this.canvas.setPointerCapture(event.pointerId);
    }
    if (this.drag.far) this.ask();
  }

  released(/** @type {PointerEvent} */ event) {
    const { drag } = this;
    this.drag = null;
    if (drag?.far && drag.to) {
      const [a, b] = [drag.from.layer, drag.to.layer].sort((p, q) => p - q);
      const [c, d] = [drag.from.column, drag.to.column].sort((p, q) => p - q);
      this.on.zoom([a, b, c, d]);
    } else if (drag) {
      const cell = this.cellAt(event);
      if (cell) this.on.choose(cell);
    }
    this.ask();
  }

  colour(/** @type {string} */ name) {
    let known = this.colours.get(name);
    if (known === undefined) this.colours.set(name, known = getComputedStyle(this.canvas).getPropertyValue(name).trim());
    return known;
  }

  draw() {
    const { view, canvas } = this;
    if (!view) { canvas.height = 0; return; }
    const fit = (this.at = this.fit());
    const width = Math.floor(fit.left + fit.columns * fit.w + fit.right * fit.dpr);
    const height = fit.top + fit.rows * fit.h + BOTTOM * fit.dpr;
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = this.under.width = width;
      canvas.height = this.under.height = height;
      this.base = null;
      this.axes = "";
      canvas.style.width = `${width / fit.dpr}px`;
      canvas.style.height = `${height / fit.dpr}px`;
    }
    const job = { small: this.small, view, fit, marks: this.marks, drag: this.drag?.far ? this.drag : null, colour: (/** @type {string} */ name) => this.colour(name) };
    const base = `${fit.w}/${fit.h}/${fit.dpr}`;
    if (this.base !== base) {
      // Cells and axes are kept: pointing at a cell draws a cross only.
      const under = /** @type {CanvasRenderingContext2D} */ (this.under.getContext("2d"));
      const axes = `${base}/${fit.row0}/${fit.column0}/${fit.rows}/${fit.columns}/${view.sort}/${view.dark}/${this.marks.layer}/${view.layerImbalance.length}`;
      paintCells({ ...job, pen: under }, axes !== this.axes || view.sort === "device");
      this.base = base;
      this.axes = axes;
    }
    this.pen.clearRect(0, 0, width, height);
    this.pen.drawImage(this.under, 0, 0);
    paintMarks({ ...job, pen: this.pen });
    if (view.stamp !== undefined) canvas.dataset.window = view.stamp;
  }
}
