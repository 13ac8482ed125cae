// One figure over time with a mark at each plan. Charts of one page share their cursor.
import uPlot from "./vendor/uplot.js";

const SPAN_S = 900;
const SPAN_MIN_S = 60;
/** @type {Intl.DateTimeFormatOptions} */
const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
const shared = uPlot.sync("time");

/** @returns {(name: string) => string} */
const inks = (/** @type {Element} */ element) => {
  const style = getComputedStyle(element);
  return (name) => style.getPropertyValue(name).trim();
};

/** Seconds since the epoch that the charts show, of the newest points. @returns {[number, number]} */
function spanOf(/** @type {any[]} */ points) {
  const last = points.length ? points[points.length - 1].wall_s : Date.now() / 1000;
  const first = points.length ? points[0].wall_s : last;
  return [Math.min(last - SPAN_MIN_S, Math.max(first, last - SPAN_S)), last];
}

/**
 * One chart in one element; charts of a page share the time under the pointer.
 * @typedef {{field: string, stroke: string, dash?: number[], filled?: boolean, line: string, word: string}} Series
 * @typedef {{name: string, height: number, tall: number, least: number, marked?: boolean, clock?: boolean, say: (n: number) => string, series: Series[]}} Chart
 */
export class Timeline {
  /** @param {HTMLElement} host @param {Chart} what @param {{near: (mark: any, point: any) => void, pick: (mark: any) => void}} on */
  constructor(host, what, on) {
    this.host = host;
    this.what = what;
    this.on = on;
    /** @type {any[]} */
    this.points = [];
    /** @type {any[]} */
    this.marks = [];
    /** @type {any} */
    this.plot = null;
    this.close_to = /** @type {any} */ (null);
    this.observer = new ResizeObserver(() => { if (this.plot && host.clientWidth) this.plot.setSize({ width: host.clientWidth, height: what.height }); });
    this.observer.observe(host);
    host.addEventListener("click", () => { if (this.close_to) on.pick(this.close_to); });
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  /** Draw anew in the theme's colours. */
  build() {
    const colour = inks(this.host);
    const { what } = this;
    this.plot?.destroy();
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot({
      width: this.host.clientWidth || 600,
      height: what.height,
      padding: [what.clock ? 12 : 8, 12, what.clock ? 0 : 6, 0],
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, y: false, sync: { key: shared.key, setSeries: false } },
      scales: {
        x: { time: true, range: () => spanOf(this.points) },
        y: { range: (/** @type {any} */ _u, /** @type {number} */ _min, /** @type {number} */ max) => [0, Math.max(what.least, (max || 0) * 1.15)] },
      },
      axes: [
        { ...axis, space: 80, size: what.clock ? 26 : 0, values: (/** @type {any} */ _u, /** @type {number[]} */ ticks) => ticks.map((t) => (what.clock ? new Date(1000 * t).toLocaleTimeString([], CLOCK) : "")) },
        { ...axis, size: 62, space: 26, values: (/** @type {any} */ _u, /** @type {number[]} */ ticks) => ticks.map((t) => what.say(t)) },
      ],
      series: [{}, ...what.series.map((s) => ({
        label: s.word, stroke: colour(s.stroke), width: s.dash ? 1.25 : 1.75, dash: s.dash, fill: s.filled ? colour("--accent-wash") : undefined, points: { show: false },
      }))],
      hooks: { draw: [(/** @type {any} */ u) => this.drawMarks(u, colour("--mark"))], setCursor: [(/** @type {any} */ u) => this.hover(u)] },
    }, this.data(), this.host);
  }

  data() {
    const from = spanOf(this.points)[0] - 5;
    const some = this.points.filter((p) => p.wall_s >= from);
    return [some.map((p) => p.wall_s), ...this.what.series.map(({ field }) => some.map((p) => p[field] ?? null))];
  }

  /** @param {any[]} points @param {any[]} marks */
  update(points, marks) {
    this.points = points;
    this.marks = marks;
    if (!this.plot) this.build();
    else this.plot.setData(this.data());
  }

  /** @param {any} u @param {string} colour */
  drawMarks(u, colour) {
    const [from, to] = spanOf(this.points);
    const { ctx, bbox } = u;
    const dpr = devicePixelRatio || 1;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.lineWidth = dpr;
    ctx.setLineDash([2 * dpr, 3 * dpr]);
    for (const mark of this.marks) {
      if (mark.wall_s < from || mark.wall_s > to) continue;
      const x = Math.round(u.valToPos(mark.wall_s, "x", true)) + 0.5;
      ctx.globalAlpha = 0.55;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (!this.what.marked) continue;
      ctx.globalAlpha = 1;
      ctx.beginPath();
      ctx.moveTo(x - 4 * dpr, bbox.top - 7 * dpr);
      ctx.lineTo(x + 4 * dpr, bbox.top - 7 * dpr);
      ctx.lineTo(x, bbox.top);
      ctx.fill();
    }
    ctx.restore();
  }

  /** @param {any} u */
  hover(u) {
    const x = u.cursor.left;
    const near = x == null || x < 0 ? [] : this.marks
      .map((mark) => ({ mark, far: Math.abs(u.valToPos(mark.wall_s, "x") - x) }))
      .filter((m) => m.far < 10)
      .sort((a, b) => a.far - b.far);
    this.close_to = near.length ? near[0].mark : null;
    this.host.classList.toggle("near", this.close_to !== null);
    const point = x == null || x < 0 || u.cursor.idx == null ? null : this.points.filter((p) => p.wall_s >= spanOf(this.points)[0] - 5)[u.cursor.idx];
    this.on.near(this.close_to, point ?? null);
  }
}
