// The list of pods. Only rows that can be seen are in the page, however many pods there are.

import { h, svg, set, plain } from "./dom.js";
import { bytes, cpu } from "./format.js";
import { spark } from "./chart.js";
import { currentVm, listen, stateOf, store } from "./store.js";

const ROW = 60;
const MORE = 6;

const FILTERS = [
  ["all", "All", () => true],
  ["running", "Running", (pod) => stateOf(pod) === "running"],
  ["other", "Not running", (pod) => stateOf(pod) !== "running"],
];

export class PodList {
  constructor(frame, search, chips, opened) {
    this.frame = frame;
    this.search = search;
    this.opened = opened;
    this.filter = "all";
    this.rows = new Map();
    this.shown = [];
    this.current = "";
    this.space = h("div", { class: "space", role: "list", "aria-label": "Pods" });
    this.empty = h("p", { class: "empty" });
    frame.append(this.space, this.empty);
    this.chips = FILTERS.map(([name, title]) => {
      const count = h("span", { class: "count" });
      const chip = h("button", { type: "button", class: "chip", "aria-pressed": "false", onclick: () => this.choose(name) }, title, count);
      return { name, chip, count };
    });
    chips.append(...this.chips.map((one) => one.chip));
    search.addEventListener("input", () => this.refresh());
    search.addEventListener("keydown", (event) => this.searchKey(event));
    frame.addEventListener("scroll", () => this.draw(), { passive: true });
    frame.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(frame);
    listen((what) => {
      if (what === "pods" || what === "link") this.refresh();
      else if (what === "tick") this.numbers();
    });
    this.choose("all");
  }

  choose(name) {
    this.filter = name;
    for (const one of this.chips) one.chip.setAttribute("aria-pressed", String(one.name === name));
    this.refresh();
  }

  refresh() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = FILTERS.find(([name]) => name === this.filter)[2];
    for (const one of this.chips) set(one.count, String(store.pods.filter(FILTERS.find(([name]) => name === one.name)[2]).length));
    this.shown = store.pods.filter((pod) => matches(pod) && words.every((word) => haystack(pod).includes(word)));
    this.shown.sort((a, b) => compare(a.namespace, b.namespace) || compare(a.name, b.name) || b.created - a.created);
    this.space.style.height = `${this.shown.length * ROW}px`;
    this.empty.hidden = this.shown.length > 0;
    set(this.empty, store.pods.length ? "No pod fits." : store.link === "open" && store.node?.seen ? "No pods on this node." : "");
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.frame.scrollTop / ROW) - MORE);
    const end = Math.min(this.shown.length, Math.ceil((this.frame.scrollTop + this.frame.clientHeight) / ROW) + MORE);
    const wanted = new Map();
    for (let index = first; index < end; index += 1) wanted.set(this.shown[index].id, index);
    const focused = document.activeElement?.closest?.(".row")?.dataset.pod;
    for (const [id, row] of this.rows) {
      if (wanted.has(id) || id === focused) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    const tab = this.shown.some((pod) => pod.id === this.current) ? this.current : this.shown[0]?.id;
    for (const [id, index] of wanted) {
      const pod = this.shown[index];
      let row = this.rows.get(id);
      if (!row) {
        row = new Row(id);
        this.rows.set(id, row);
        this.space.append(row.element);
      }
      row.show(pod, index, this.shown.length, id === this.current, id === tab);
    }
    // In order, so that a screen reader meets them so.
    const sorted = [...this.rows.values()].sort((a, b) => a.index - b.index).map((row) => row.element);
    sorted.forEach((element, index) => {
      if (this.space.children[index] !== element) this.space.insertBefore(element, this.space.children[index] ?? null);
    });
  }

  numbers() {
    for (const row of this.rows.values()) row.numbers();
  }

  select(id) {
    this.current = id;
    const index = this.shown.findIndex((pod) => pod.id === id);
    if (index >= 0) this.reveal(index);
    this.draw();
  }

  reveal(index) {
    const top = index * ROW;
    if (top < this.frame.scrollTop) this.frame.scrollTop = top;
    else if (top + ROW > this.frame.scrollTop + this.frame.clientHeight) this.frame.scrollTop = top + ROW - this.frame.clientHeight;
  }

  // The next or the previous one: opens it.
  step(by) {
    if (!this.shown.length) return;
    const index = this.shown.findIndex((pod) => pod.id === this.current);
    const next = index < 0 ? (by > 0 ? 0 : this.shown.length - 1) : Math.min(this.shown.length - 1, Math.max(0, index + by));
    this.opened(this.shown[next].id);
  }

  searchKey(event) {
    if (event.key === "ArrowDown" || event.key === "Enter") {
      event.preventDefault();
      if (event.key === "Enter" && this.shown.length) this.opened(this.shown[0].id);
      else this.focus(0);
    } else if (event.key === "Escape") {
      this.search.value = "";
      this.refresh();
      this.search.blur();
    }
  }

  key(event) {
    const id = event.target.closest(".row")?.dataset.pod;
    const index = this.shown.findIndex((pod) => pod.id === id);
    const page = Math.max(1, Math.floor(this.frame.clientHeight / ROW) - 1);
    const next = { ArrowDown: index + 1, ArrowUp: index - 1, PageDown: index + page, PageUp: index - page, Home: 0, End: this.shown.length - 1 }[event.key];
    if (next === undefined || index < 0) return;
    event.preventDefault();
    if (next < 0) this.search.focus();
    else this.focus(Math.min(this.shown.length - 1, next));
  }

  focus(index) {
    if (!this.shown[index]) return;
    this.reveal(index);
    this.draw();
    this.rows.get(this.shown[index].id)?.element.focus();
  }
}

class Row {
  constructor(id) {
    this.id = id;
    this.dot = h("span", { class: "state", "aria-hidden": "true" });
    this.name = h("span", { class: "name" });
    this.under = h("span", { class: "under" });
    this.cpu = h("span", { class: "cpu" });
    this.memory = h("span", { class: "mem" });
    this.line = svg("path", { class: "line blue" });
    this.element = h("a", { class: "row", role: "listitem", "data-pod": id, href: `#/pods/${encodeURIComponent(id)}` },
      this.dot,
      h("span", { class: "who" }, this.name, this.under),
      svg("svg", { class: "spark", viewBox: "0 0 64 20", "aria-hidden": "true" }, this.line),
      h("span", { class: "use" }, this.cpu, this.memory));
  }

  show(pod, index, all, current, tab) {
    this.index = index;
    this.element.style.transform = `translateY(${index * ROW}px)`;
    this.element.setAttribute("aria-setsize", all);
    this.element.setAttribute("aria-posinset", index + 1);
    this.element.tabIndex = tab ? 0 : -1;
    if (current) this.element.setAttribute("aria-current", "page");
    else this.element.removeAttribute("aria-current");
    const state = stateOf(pod);
    this.dot.dataset.state = state;
    set(this.name, plain(pod.name));
    this.element.title = plain(`${pod.namespace}/${pod.name}`);
    const vm = currentVm(pod);
    set(this.under, [plain(pod.namespace), state === "running" ? pod.addresses[0] ?? "no address" : state, vm ? null : "no VM"].filter(Boolean).join(" · "));
    this.numbers();
  }

  numbers() {
    const last = store.last.get(this.id);
    set(this.cpu, cpu(last?.[0]));
    set(this.memory, bytes(last?.[1]));
    this.line.setAttribute("d", spark(store.sparks.get(this.id) ?? []));
  }
}

function haystack(pod) {
  return `${pod.namespace}/${pod.name} ${pod.id} ${pod.addresses.join(" ")} ${stateOf(pod)} ${pod.vms.map((vm) => `${vm.image} ${vm.id}`).join(" ")}`.toLowerCase();
}

function compare(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}
