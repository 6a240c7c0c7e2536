// A graph of lines over time, drawn as SVG. Gaps are where nothing is known.

import { h, svg, set } from "./dom.js";
import { clock } from "./format.js";

// By seconds shown: the marks below a graph, those of a narrow one, and how a mark is written.
const MARKS = {
  600: [[600, 480, 360, 240, 120, 0], [600, 300, 0], (at) => `−${at / 60} min`],
  3600: [[3600, 2700, 1800, 900, 0], [3600, 1800, 0], (at) => `−${at / 60} min`],
  86400: [[86400, 64800, 43200, 21600, 0], [86400, 43200, 0], (at) => `−${at / 3600} h`],
};
const HEIGHT = 132;
const LEFT = 58;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 20;
let count = 0;

// `series`: [{ name, column, tone }]; `show`: a number for people; `ceiling`: what a full graph would be, if that is known.
export class Chart {
  constructor({ title, series, show, ceiling = () => 0, step = "binary", least = 1 }) {
    Object.assign(this, { series, show, ceiling, step, least });
    this.samples = [];
    this.picked = null;
    this.span = 600;
    this.id = `chart-${(count += 1)}`;
    this.value = h("span", { class: "value" });
    this.lines = series.map((one) => svg("path", { class: `line ${one.tone}` }));
    this.areas = series.map((one) => svg("path", { class: `area ${one.tone}` }));
    this.grid = svg("g", { class: "grid" });
    this.cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM });
    this.dots = series.map((one) => svg("circle", { class: `dot ${one.tone}`, r: 3.5 }));
    this.picture = svg("svg", { class: "plot", height: HEIGHT, "aria-hidden": "true" }, this.grid, this.areas, this.lines, this.cross, this.dots);
    this.frame = h("div", {
      class: "frame", tabindex: "0", role: "img", "aria-labelledby": this.id,
      onpointermove: (event) => this.pick(event.clientX - this.frame.getBoundingClientRect().left),
      onpointerleave: () => this.pick(null),
      onkeydown: (event) => this.key(event),
      onblur: () => this.pick(null),
    }, this.picture);
    const legend = series.length < 2 ? null
      : h("span", { class: "legend" }, series.map((one) => h("span", { class: `key ${one.tone}` }, one.name)));
    this.element = h("figure", { class: "card chart" },
      h("figcaption", { id: this.id }, h("span", { class: "title" }, title), legend, this.value), this.frame);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.frame);
  }

  update(samples) {
    this.samples = samples;
    this.draw();
  }

  close() {
    this.observer.disconnect();
  }

  draw() {
    const width = this.frame.clientWidth;
    if (!width) return;
    const newest = this.samples.at(-1)?.[0] ?? Date.now() / 1000;
    this.from = newest - this.span;
    const shown = this.samples.filter((sample) => sample[0] >= this.from);
    const highest = Math.max(0, ...shown.flatMap((sample) => this.series.map((one) => sample[one.column] ?? 0)));
    const top = nice(Math.max(highest * 1.08, this.ceiling() || 0, this.least), this.step);
    this.x = (at) => LEFT + ((at - this.from) / this.span) * (width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.setAttribute("width", width);
    this.drawGrid(width, top);
    this.series.forEach((one, index) => {
      const runs = this.runs(shown, one.column);
      const path = runs.map((run) => `M${run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`).join("");
      const floor = HEIGHT - BOTTOM;
      const area = runs.filter((run) => run.length > 1).map((run) =>
        `M${run[0][0].toFixed(1)} ${floor}L${run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}L${run.at(-1)[0].toFixed(1)} ${floor}Z`);
      this.lines[index].setAttribute("d", path || "M0 0");
      this.areas[index].setAttribute("d", area.join("") || "M0 0");
    });
    this.mark();
  }

  runs(samples, column) {
    const runs = [];
    let run = null;
    let before = null;
    for (const sample of samples) {
      const value = sample[column];
      const gap = before !== null && sample[0] - before > Math.max(40, this.span / 100);
      before = sample[0];
      if (value === null || value === undefined) {
        run = null;
        continue;
      }
      if (!run || gap) runs.push((run = []));
      run.push([this.x(sample[0]), this.y(value)]);
    }
    return runs;
  }

  drawGrid(width, top) {
    const key = `${width} ${top} ${this.show(top)} ${this.span}`;
    if (key === this.gridKey) return;
    this.gridKey = key;
    const rows = [0, 0.5, 1].map((part) => {
      const y = this.y(top * part);
      return [svg("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        svg("text", { x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, part ? this.show(top * part) : "0")];
    });
    const [all, few, written] = MARKS[this.span];
    const marks = (width < 540 ? few : all).map((at) => svg("text", {
      x: LEFT + (1 - at / this.span) * (width - LEFT - RIGHT), y: HEIGHT - 5,
      "text-anchor": at === this.span ? "start" : at ? "middle" : "end" }, at ? written(at) : "now"));
    this.grid.replaceChildren(...rows.flat(), ...marks);
  }

  pick(x) {
    if (x === null) this.picked = null;
    else {
      const at = this.from + ((x - LEFT) / (this.frame.clientWidth - LEFT - RIGHT)) * this.span;
      const near = this.samples.reduce((best, one) => (best && Math.abs(best[0] - at) <= Math.abs(one[0] - at) ? best : one), null);
      this.picked = near && near[0] >= this.from ? near[0] : null;
    }
    this.mark();
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.samples.length) return;
    event.preventDefault();
    const index = this.picked === null ? this.samples.length : this.samples.findIndex((one) => one[0] === this.picked);
    this.picked = this.samples[Math.min(this.samples.length - 1, Math.max(0, index + step))][0];
    this.mark();
  }

  mark() {
    const sample = this.picked === null ? null : this.samples.find((one) => one[0] === this.picked);
    const said = sample ?? this.samples.at(-1);
    const values = said ? this.series.map((one) => this.show(said[one.column] ?? null)) : ["–"];
    set(this.value, (sample ? `${clock(sample[0])}   ` : "") + values.join("   "));
    this.cross.classList.toggle("on", Boolean(sample));
    if (sample) {
      this.cross.setAttribute("x1", this.x(sample[0]));
      this.cross.setAttribute("x2", this.x(sample[0]));
    }
    this.dots.forEach((dot, index) => {
      const value = sample?.[this.series[index].column];
      dot.classList.toggle("on", value !== null && value !== undefined);
      if (value === null || value === undefined) return;
      dot.setAttribute("cx", this.x(sample[0]));
      dot.setAttribute("cy", this.y(value));
    });
  }
}

// The next number that is easy to read: of bytes, powers of two.
function nice(value, step) {
  if (step === "binary") {
    const power = 2 ** Math.floor(Math.log2(value));
    return [1, 1.25, 1.5, 2].map((part) => power * part).find((one) => one >= value);
  }
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 4, 5, 10].map((part) => power * part).find((one) => one >= value * 0.9999);
}

export function spark(values, width = 64, height = 20) {
  const known = values.filter((value) => value !== null);
  const top = Math.max(0.1, ...known);
  const step = width / 39;
  const first = width - (values.length - 1) * step;
  let path = "";
  let pen = false;
  values.forEach((value, index) => {
    if (value === null) {
      pen = false;
      return;
    }
    path += `${pen ? "L" : "M"}${(first + index * step).toFixed(1)} ${(height - 1.5 - (value / top) * (height - 3)).toFixed(1)}`;
    pen = true;
  });
  return path || "M0 0";
}

// The four graphs of a pod, or of the node.
export function fourCharts({ cpus, memory, show }) {
  return [
    new Chart({ title: "CPU", series: [{ name: "CPU", column: 1, tone: "blue" }], show: show.cpu, ceiling: cpus, step: "decimal", least: 0.1 }),
    new Chart({ title: "Memory", series: [{ name: "memory", column: 2, tone: "violet" }], show: show.bytes, ceiling: memory, least: 1 << 20 }),
    new Chart({ title: "Disk", series: [{ name: "read", column: 3, tone: "teal" }, { name: "written", column: 4, tone: "amber" }], show: show.rate, least: 1024 }),
    new Chart({ title: "Network", series: [{ name: "received", column: 5, tone: "teal" }, { name: "sent", column: 6, tone: "amber" }], show: show.rate, least: 1024 }),
  ];
}
