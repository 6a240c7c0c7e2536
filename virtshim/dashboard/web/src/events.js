// A timeline, newest first.

import { h, plain } from "./dom.js";
import { clock, full } from "./format.js";
import { store } from "./store.js";

const SHOWN = 200;

export class Timeline {
  // `pod`: only those of this pod.
  constructor(pod = null) {
    this.pod = pod;
    this.list = h("ol", { class: "events" });
    this.none = h("p", { class: "empty" }, "Nothing has happened yet.");
    this.element = h("section", { class: "card" }, h("h2", {}, "Events"), this.none, this.list);
    this.further = [];
    this.refresh();
  }

  // What the node still knows of the time before: [{ at, kind, text }].
  add(further) {
    this.further = further;
    this.refresh();
  }

  refresh() {
    const known = [...this.further, ...store.events.filter((event) => this.pod === null || event.pod === this.pod)];
    const distinct = [...new Map(known.map((event) => [`${Math.round(event.at)} ${event.text}`, event])).values()];
    const newest = distinct.sort((a, b) => b.at - a.at || (b.number ?? 0) - (a.number ?? 0)).slice(0, SHOWN);
    let day = "";
    this.none.hidden = newest.length > 0;
    this.list.replaceChildren(...newest.flatMap((event) => {
      const item = this.item(event);
      const its = new Date(event.at * 1000).toDateString();
      if (its === day) return [item];
      const first = day === "" && its === new Date().toDateString();
      day = its;
      return first ? [item] : [h("li", { class: "day" }, new Date(event.at * 1000).toLocaleDateString([], { weekday: "long", month: "long", day: "numeric" })), item];
    }));
  }

  item(event) {
    const text = plain(event.text);
    const linked = this.pod === null && event.pod && store.byId.has(event.pod);
    return h("li", { "data-kind": event.kind },
      h("time", { datetime: new Date(event.at * 1000).toISOString(), title: full(event.at) }, clock(event.at)),
      h("span", { class: "mark", "aria-hidden": "true" }),
      linked ? h("a", { href: `#/pods/${encodeURIComponent(event.pod)}` }, text) : h("span", {}, text));
  }
}
