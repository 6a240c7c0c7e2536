// The node: its numbers, its graphs, its facts, and what happened.

import { h, plain, set } from "./dom.js";
import { bytes, cpu, span } from "./format.js";
import { Timeline } from "./events.js";
import { Graphs } from "./graphs.js";
import { listen, stateOf, store } from "./store.js";

export class NodeView {
  constructor() {
    this.title = "Node";
    this.figures = Object.fromEntries(["vms", "cpu", "memory", "load"].map((name) => [name, { value: h("span", { class: "big" }), note: h("span", { class: "note" }) }]));
    const tile = (name, title) => h("div", { class: "card tile" }, h("span", { class: "title" }, title), this.figures[name].value, this.figures[name].note);
    this.graphs = new Graphs("node", { cpus: () => store.node?.host.cpus ?? 0, memory: () => store.node?.host.memoryTotal ?? 0 });
    this.facts = h("dl", { class: "facts" });
    this.conditions = h("ul", { class: "conditions" });
    this.timeline = new Timeline();
    this.name = h("h1", {});
    this.about = h("p", { class: "about" });
    this.welcome = h("div", { class: "card welcome", hidden: true },
      h("h2", {}, "No VMs yet"),
      h("p", {}, "This node runs no VMs. One that starts here appears by itself, with its graphs, its events and its console."),
      h("dl", {},
        h("dt", {}, "In a cluster"), h("dd", {}, "kubelet starts the pods that have ", h("code", {}, "runtimeClassName: virtshim"), " and are scheduled to this node."),
        h("dt", {}, "Without a cluster"), h("dd", {}, "On the node, as root: ", h("code", {}, "virtshim run -d --name web IMAGE"))));
    this.element = h("div", { class: "page" },
      h("header", { class: "head" }, h("div", { class: "what" }, this.name, this.about)),
      h("div", { class: "tiles" }, tile("vms", "VMs"), tile("cpu", "CPU in use by VMs"), tile("memory", "Memory of VMs"), tile("load", "Load")),
      this.welcome,
      this.graphs.element,
      h("div", { class: "two" },
        this.timeline.element,
        h("section", { class: "card" }, h("h2", {}, "Node"), this.conditions, this.facts)));
    this.stop = listen((what, detail) => this.changed(what, detail));
    this.changed("state");
  }

  changed(what, detail) {
    this.graphs.changed(what, detail);
    if (what === "tick" || what === "state") this.numbers();
    if (what === "events" || what === "state" || what === "pods") this.timeline.refresh();
    if (what === "node" || what === "state" || what === "pods") {
      this.numbers();
      this.tell();
    }
  }

  numbers() {
    const host = store.node?.host ?? {};
    const [used, memory] = store.last.get("node") ?? [];
    const none = store.pods.length === 0;
    const running = store.pods.filter((pod) => stateOf(pod) === "running").length;
    this.figure("vms", String(running), none ? "no pods" : store.pods.length === running ? "all running" : `of ${store.pods.length} pods`);
    this.figure("cpu", cpu(none ? 0 : used), host.cpus ? `of ${host.cpus * 100} %, ${host.cpus} CPUs` : "");
    this.figure("memory", bytes(none ? 0 : memory), host.memoryTotal ? `of ${bytes(host.memoryTotal)}, ${bytes(host.memoryAvailable)} available` : "");
    this.figure("load", host.load ? host.load[0].toFixed(2) : "–", host.load ? `${host.load[1].toFixed(2)} in 5 min, ${host.load[2].toFixed(2)} in 15 min` : "");
    this.welcome.hidden = !none || !store.node?.seen;
    // Empty graphs say nothing. Those of VMs that have gone stay until their time is over.
    this.graphs.element.hidden = none && !this.graphs.known;
  }

  figure(name, value, note) {
    set(this.figures[name].value, value);
    set(this.figures[name].note, note);
  }

  tell() {
    const { host = {}, facts = {}, conditions = {}, version = "" } = store.node ?? {};
    set(this.name, plain(host.hostname ?? "Node"));
    set(this.about, [version, host.system, host.uptime ? `up ${span(host.uptime)}` : null].filter(Boolean).map(plain).join(" · "));
    const troubles = Object.entries(conditions).map(([name, trouble]) => [name, trouble]);
    for (const [title, of] of [["Unreadable record", facts.unreadable], ["Unfinished repair", facts.unfinished], ["Broken device", facts.brokenDevices]]) {
      for (const [name, why] of Object.entries(of ?? {})) troubles.push([`${title} ${name}`, why || "no reason given"]);
    }
    this.conditions.replaceChildren(...troubles.map(([name, trouble]) => h("li", { "data-kind": trouble ? "trouble" : "fine" },
      h("span", { class: "mark", "aria-hidden": "true" }), h("span", {}, `${plain(name)}: ${plain(trouble || "fine")}`))));
    const rows = [
      ["Processor", host.cpuModel], ["CPUs", host.cpus], ["Memory", host.memoryTotal && bytes(host.memoryTotal)],
      ["Swap", host.swapTotal !== undefined ? (host.swapTotal ? bytes(host.swapTotal) : "none") : null],
      ["/dev/kvm", host.kvm === undefined ? null : host.kvm ? "there" : "absent"], ["Kernel", host.kernel], ["System", host.system],
      ["Runtime", version], ["Node id", facts.nodeId], ["State", facts.stateDir],
    ];
    this.facts.replaceChildren(...rows.filter(([, value]) => value !== null && value !== undefined && value !== "").flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, plain(value))]));
  }

  close() {
    this.stop();
    this.graphs.close();
  }
}
