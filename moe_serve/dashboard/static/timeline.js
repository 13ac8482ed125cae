// Imbalance over time with a mark at each plan.
import uPlot from "./vendor/uplot.js";

const SPAN_S = 900;
const SPAN_MIN_S = 60;
const HEIGHT = 210;
/** @type {Intl.DateTimeFormatOptions} */
const CLOCK = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };

/** @returns {(name: string) => string} */
const paint = (/** @type {Element} */ element) => {
  const style = getComputedStyle(element);
  return (name) => style.getPropertyValue(name).trim();
};

/** One chart in one element. */
export class Timeline {
  /** @param {HTMLElement} host @param {(mark: any) => void} onMark nearest plan under the pointer, or null */
  constructor(host, onMark) {
    this.host = host;
    this.onMark = onMark;
    /** @type {any[]} */
    this.points = [];
    /** @type {any[]} */
    this.marks = [];
    /** @type {any} */
    this.plot = null;
    new ResizeObserver(() => this.plot?.setSize({ width: host.clientWidth, height: HEIGHT })).observe(host);
  }

  /** Draw anew in the theme's colours. */
  build() {
    const colour = paint(this.host);
    this.plot?.destroy();
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    this.plot = new uPlot({
      width: this.host.clientWidth || 600,
      height: HEIGHT,
      padding: [14, 12, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, y: false },
      scales: {
        x: { time: true, range: () => this.range() },
        y: { range: (/** @type {any} */ _u, /** @type {number} */ _min, /** @type {number} */ max) => [0, Math.max(0.1, (max || 0) * 1.12)] },
      },
      axes: [{ ...axis, space: 80, size: 26, values: (/** @type {any} */ _u, /** @type {number[]} */ ticks) => ticks.map((t) => new Date(1000 * t).toLocaleTimeString([], CLOCK)) }, { ...axis, size: 46, values: (/** @type {any} */ _u, /** @type {number[]} */ ticks) => ticks.map((t) => t.toFixed(t < 1 ? 2 : 1)) }],
      series: [
        {},
        { label: "imbalance", stroke: colour("--accent"), width: 2, fill: colour("--accent-wash"), points: { show: false } },
        { label: "worst layer", stroke: colour("--muted"), width: 1, dash: [3, 3], points: { show: false } },
      ],
      hooks: { draw: [(/** @type {any} */ u) => this.drawMarks(u, colour("--mark"))], setCursor: [(/** @type {any} */ u) => this.hover(u)] },
    }, this.data(), this.host);
  }

  range() {
    const last = this.points.length ? this.points[this.points.length - 1].wall_s : Date.now() / 1000;
    const first = this.points.length ? this.points[0].wall_s : last;
    return [Math.min(last - SPAN_MIN_S, Math.max(first, last - SPAN_S)), last];
  }

  data() {
    const from = this.range()[0] - 5;
    const some = this.points.filter((p) => p.wall_s >= from);
    return [some.map((p) => p.wall_s), some.map((p) => p.imbalance), some.map((p) => p.worst_layer)];
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
    const [from, to] = this.range();
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
    const near = x < 0 ? [] : this.marks
      .map((mark) => ({ mark, far: Math.abs(u.valToPos(mark.wall_s, "x") - x) }))
      .filter((m) => m.far < 10)
      .sort((a, b) => a.far - b.far);
    this.onMark(near.length ? near[0].mark : null);
  }
}
