// The four graphs of a pod or of the node, and the choice of the time that they show.

import { fourCharts } from "./chart.js";
import { h } from "./dom.js";
import { bytes, cpu, rate } from "./format.js";
import { push, store } from "./store.js";

const SAMPLES = 300;
const RECENT = 600;
const SPANS = [[RECENT, "10 min"], [3600, "1 hour"], [86400, "1 day"]];
// The choice holds for all pods.
let span = RECENT;

export class Graphs {
  // `id`: a pod's, or "node".
  constructor(id, ceilings) {
    this.id = id;
    this.samples = [];
    this.charts = fourCharts({ ...ceilings, show: { cpu, bytes, rate } });
    this.chips = SPANS.map(([seconds, title]) => h("button", { type: "button", class: "chip", "data-span": seconds, onclick: () => this.choose(seconds) }, title));
    this.element = h("div", { class: "graphs" },
      h("div", { class: "chips", role: "group", "aria-label": "Time of the graphs" }, this.chips),
      h("div", { class: "charts" }, this.charts.map((one) => one.element)));
    this.choose(span);
  }

  get known() {
    return this.samples.some(([, ...values]) => values.some((one) => one !== null));
  }

  choose(seconds) {
    span = seconds;
    for (const chip of this.chips) chip.setAttribute("aria-pressed", String(Number(chip.dataset.span) === span));
    this.load();
  }

  async load() {
    // Otherwise the state that comes first loads them.
    if (store.link !== "open") return;
    const wanted = span;
    this.asked = Date.now();
    try {
      const found = await (await fetch(`pods/${encodeURIComponent(this.id)}/graph?span=${wanted}`)).json();
      if (this.closed || wanted !== span) return;
      const newest = found.at(-1)?.[0] ?? 0;
      const since = this.span === span ? this.samples.filter((one) => one[0] > newest + 0.01) : [];
      this.span = span;
      this.samples = span === RECENT ? [...found, ...since] : found;
      for (const chart of this.charts) chart.span = span;
      this.draw();
    } catch {
      // The connection's state is shown above.
    }
  }

  draw() {
    for (const chart of this.charts) chart.update(this.samples);
  }

  changed(what, detail) {
    const values = what === "tick" && detail?.samples?.[this.id];
    if (values && this.span === RECENT) {
      push(this.samples, [detail.at, ...values], SAMPLES);
      this.draw();
    }
    if (values && span !== RECENT && Date.now() - this.asked > Math.min(span / SAMPLES, 60) * 1000) this.load();
    if (what === "state") {
      this.samples = [];
      this.load();
    }
  }

  close() {
    this.closed = true;
    for (const chart of this.charts) chart.close();
  }
}
