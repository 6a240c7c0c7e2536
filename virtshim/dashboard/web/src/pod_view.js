// One pod: its graphs, its start, its console, its screen, and all that the node says of it.

import { Actions } from "./actions.js";
import { h, plain, set } from "./dom.js";
import { bytes, full, span } from "./format.js";
import { Timeline } from "./events.js";
import { Graphs } from "./graphs.js";
import { Waterfall } from "./startup.js";
import { currentVm, isOver, listen, now, serverKnown, stateOf, store, vmThatIsOn } from "./store.js";

const TABS = [
  ["overview", "Overview", Overview],
  ["start", "Start-up", StartTab],
  ["console", "Console", ConsoleTab],
  ["screen", "Screen", ScreenTab],
  ["details", "Details", Details],
];

export class PodView {
  constructor(id, tab) {
    this.id = id;
    this.name = h("h1", {});
    this.badge = h("span", { class: "badge" });
    this.about = h("p", { class: "about" });
    this.actions = new Actions(this);
    this.trouble = h("p", { class: "trouble", role: "status" });
    this.tabs = TABS.map(([name, title], index) => h("a", {
      class: "tab", role: "tab", id: `tab-${name}`, href: `#/pods/${encodeURIComponent(id)}/${name}`, "aria-controls": "panel", title: `${title} (${index + 1})`,
      onkeydown: (event) => this.key(event, index) }, title));
    this.panel = h("div", { class: "panel", id: "panel", role: "tabpanel" });
    this.element = h("div", { class: "page pod" },
      h("header", { class: "head" },
        h("a", { class: "back", href: "#/", "aria-label": "Back to the list" }, "‹"),
        h("div", { class: "what" }, h("div", { class: "row1" }, this.name, this.badge), this.about, this.trouble),
        this.actions.bar),
      this.actions.result,
      h("div", { class: "tabs", role: "tablist", "aria-label": "About this pod" }, this.tabs),
      this.panel);
    this.stop = listen((what, detail) => this.changed(what, detail));
    this.title = "Pod";
    this.changed("pods");
    this.open(tab);
  }

  get pod() {
    return store.byId.get(this.id) ?? null;
  }

  open(tab) {
    const found = TABS.find(([name]) => name === tab) ?? TABS[0];
    if (this.tab?.kind === found[0]) return;
    this.tab?.close();
    const focused = this.tabs.includes(document.activeElement);
    TABS.forEach(([name], index) => {
      this.tabs[index].setAttribute("aria-selected", String(name === found[0]));
      this.tabs[index].tabIndex = name === found[0] ? 0 : -1;
    });
    if (focused) this.tabs.find((one) => one.tabIndex === 0).focus();
    this.panel.setAttribute("aria-labelledby", `tab-${found[0]}`);
    this.tab = found[2](this);
    this.tab.kind = found[0];
    this.panel.className = `panel ${found[0]}`;
    this.panel.replaceChildren(this.tab.element);
    this.tab.shown?.();
  }

  key(event, index) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = this.tabs[(index + step + TABS.length) % TABS.length];
    location.hash = next.getAttribute("href");
    next.focus();
  }

  pick(number) {
    if (TABS[number]) location.hash = this.tabs[number].getAttribute("href");
  }

  changed(what, detail) {
    const pod = this.pod;
    if (what === "pods" || what === "state" || what === "link") {
      this.element.classList.toggle("gone", !pod);
      if (!pod) {
        if (!this.name.textContent) set(this.name, store.link === "connecting" ? "" : "No such pod");
        this.badge.dataset.state = "gone";
        set(this.badge, store.link === "connecting" ? "…" : "removed");
      } else {
        const vm = currentVm(pod);
        const state = stateOf(pod);
        set(this.name, plain(pod.name));
        this.title = plain(pod.name);
        this.badge.dataset.state = state;
        set(this.badge, state);
        const words = [pod.namespace, ...pod.addresses, vm?.image, pod.vcpus && `${pod.vcpus} vCPU`, pod.memoryGiven && bytes(pod.memoryGiven), `${span(now() - pod.created)} old`];
        set(this.about, words.filter(Boolean).map(plain).join(" · "));
        set(this.trouble, plain(vm?.trouble ?? ""));
      }
    }
    this.tab?.changed?.(what, detail);
  }

  async detail() {
    const answer = await fetch(`pods/${encodeURIComponent(this.id)}`);
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error ?? answer.statusText);
    return told;
  }

  close() {
    this.stop();
    this.actions.close();
    this.tab?.close();
  }
}

function Overview(view) {
  const graphs = new Graphs(view.id, { cpus: () => view.pod?.vcpus ?? 0, memory: () => view.pod?.memoryGiven ?? 0 });
  const timeline = new Timeline(view.id);
  let closed = false;
  const load = () => view.detail().then((told) => closed || timeline.add(earlier(told)), () => {});
  return {
    element: h("div", {}, graphs.element, timeline.element),
    shown: load,
    changed(what, detail) {
      graphs.changed(what, detail);
      if (what === "events" && (!detail || detail.pod === view.id)) timeline.refresh();
      if (what === "state") load();
    },
    close() {
      closed = true;
      graphs.close();
    },
  };
}

// What the node knows of a pod's VMs from before this page.
function earlier(told) {
  return told.vms.flatMap((vm) => [
    vm.created && { at: vm.created, kind: "created", text: `VM ${vm.name} created, attempt ${vm.attempt}` },
    vm.started && { at: vm.started, kind: "started", text: `VM ${vm.name} started` },
    vm.finished && { at: vm.finished, kind: "stopped", text: `VM ${vm.name} ended with code ${vm.exitCode} (${vm.reason || "no reason given"})${vm.message ? `: ${vm.message.slice(0, 300)}` : ""}` },
  ].filter(Boolean));
}

// A tab of what the node says when it is asked; asked again when the pod changes.
function asked(view, show) {
  const element = h("div", {}, h("p", { class: "empty" }, "Asking the node …"));
  let closed = false;
  let asking = false;
  const ask = async () => {
    if (asking) return;
    asking = true;
    try {
      const told = await view.detail();
      if (!closed) element.replaceChildren(...show(told));
    } catch (error) {
      if (!closed) element.replaceChildren(h("p", { class: "empty" }, plain(error.message || "The node does not answer.")));
    } finally {
      asking = false;
    }
  };
  return {
    element,
    shown: ask,
    ask,
    changed(what, detail) {
      if (what === "pods" || what === "state" || (what === "events" && detail?.pod === view.id)) ask();
    },
    close() {
      closed = true;
    },
  };
}

function StartTab(view) {
  const waterfall = new Waterfall();
  const tab = asked(view, (told) => {
    waterfall.update(told, view.pod);
    return [waterfall.element];
  });
  const changed = tab.changed;
  let ticks = 0;
  tab.changed = (what, detail) => {
    changed(what, detail);
    // While a guest comes up, its phases end one after another.
    if (what === "tick" && (waterfall.running || (ticks += 1) % 5 === 0)) tab.ask();
  };
  return tab;
}

function Details(view) {
  return asked(view, (told) => [
    ...told.vms.map((vm) => h("section", { class: "card" }, h("h2", {}, "VM ", plain(vm.name)), table([
      ["Id", vm.id], ["State", vm.state], ["Attempt", vm.attempt], ["Created", full(vm.created)], ["Started", full(vm.started)],
      ["Ended", vm.finished ? `${full(vm.finished)}, code ${vm.exitCode} (${vm.reason || "no reason given"})` : null],
      ["Message", vm.message], ["Image", vm.image], ["Image id", vm.imageId], ["Log", vm.logPath],
      ...Object.entries(vm.facts.info ?? {}).filter(([name]) => name !== "sandboxID").map(([name, value]) => [name, said(value)]),
      ...Object.entries(vm.facts.guestInfo ?? {}).map(([name, value]) => [`guest: ${name}`, said(value)]),
    ]), texts("Mounts", Object.fromEntries(vm.mounts.map((one) => [one.container, `${one.host}${one.readonly ? " (read-only)" : ""}`]))),
    texts("Labels", vm.labels), texts("Annotations", vm.annotations))),
    h("section", { class: "card" }, h("h2", {}, "Pod"), table([
      ["Id", told.id], ["UID", told.uid], ["Attempt", told.attempt], ["Created", view.pod && full(view.pod.created)], ["Handler", view.pod?.handler],
      ...Object.entries(told.facts.info ?? {}).map(([name, value]) => [name, said(value)]),
    ]), texts("Labels", told.labels), texts("Annotations", told.annotations)),
  ]);
}

function said(value) {
  if (value === null || value === "" || (Array.isArray(value) && !value.length)) return null;
  return typeof value === "object" ? (Object.keys(value).length ? JSON.stringify(value, null, 1) : null) : value;
}

function table(rows) {
  return h("dl", { class: "facts wide" }, rows.filter(([, value]) => value !== null && value !== undefined && value !== "").flatMap(([name, value]) => [h("dt", {}, plain(name)), h("dd", {}, plain(value))]));
}

function texts(title, values) {
  const rows = Object.entries(values);
  return rows.length ? h("details", { open: rows.length < 8 }, h("summary", {}, `${title} (${rows.length})`), table(rows)) : null;
}

// The console and the screen are files of their own, loaded when somebody wants them.
function loaded(view, load, wanting) {
  const element = h("div", { class: "stage" }, h("p", { class: "empty" }, "Connecting …"));
  let stage = null;
  let closed = false;
  const start = async () => {
    const why = wanting(view.pod);
    if (why) {
      stage?.close();
      stage = null;
      element.replaceChildren(h("p", { class: "empty" }, why));
      return;
    }
    if (stage) return stage.changed(view.pod);
    const { Stage } = await load();
    if (closed || stage) return;
    stage = new Stage(view);
    element.replaceChildren(stage.element);
    stage.shown();
  };
  return {
    element,
    shown: start,
    changed(what) {
      if (what === "pods" || what === "state") start();
      if (what === "link" && isOver()) stage?.over();
    },
    close() {
      closed = true;
      stage?.close();
    },
  };
}

function ConsoleTab(view) {
  return loaded(view, () => serverKnown().then(() => import("./console.js")), (pod) => (vmThatIsOn(pod) ? "" : "The console is there while the VM runs."));
}

function ScreenTab(view) {
  return loaded(view, () => serverKnown().then(() => import("./screen.js")), (pod) => {
    if (!vmThatIsOn(pod)) return "The screen is there while the VM runs.";
    return pod.has_screen ? "" : 'This VM has no screen. A pod with the annotation virtshim.io/vnc: "true" has one.';
  });
}
