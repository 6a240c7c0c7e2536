// Where a pod's start went: a bar for each phase, on one scale of time.

import { h, plain } from "./dom.js";
import { full, milliseconds } from "./format.js";

// `whole`: a call, of which the phases after it are parts.
const PHASES = {
  sandbox: { title: "RunPodSandbox", whole: true },
  network: { title: "Network", about: "namespace, CNI plugins, bridge, tap, DHCP", tone: "net" },
  create: { title: "CreateContainer", whole: true },
  devices: { title: "Devices", about: "functions of the host" },
  disk: { title: "Disk", about: "the root disk" },
  seed: { title: "Seed", about: "cloud-init's documents" },
  empty_disks: { title: "Empty disks" },
  define: { title: "Definition", about: "the VM made known to libvirt" },
  start: { title: "StartContainer", whole: true },
  cgroup: { title: "Cgroup" },
  volumes: { title: "Volumes", about: "the share daemon" },
  libvirt: { title: "libvirt", about: "libvirt, vmwrapper and QEMU, until the VM runs" },
  firmware: { title: "Firmware", about: "until the kernel's first words", tone: "guest", within: true },
  kernel: { title: "Kernel", about: "until those of the first process", tone: "guest", within: true },
  "user-space": { title: "User space", about: "until cloud-init is through, or a login", tone: "late", within: true },
  "cloud-init": { title: "cloud-init", about: "from its first stage to its last", tone: "late", within: true },
  agent: { title: "Agent", about: "until it listens", tone: "late", within: true },
};

export class Waterfall {
  constructor() {
    this.running = false;
    this.element = h("div", {});
  }

  update(told) {
    const vms = [...new Set(told.start.map((phase) => phase.vm).filter(Boolean))];
    this.running = told.start.some((phase) => !phase.over);
    if (!told.start.length) {
      this.element.replaceChildren(h("p", { class: "empty" }, "Nothing is known of this start: virtshim tells those of pods that were made since it was started."));
      return;
    }
    const first = told.start.filter((phase) => !phase.vm);
    const starts = (vms.length ? vms : [""]).map((id, index) => {
      const phases = [...(index === 0 ? first : []), ...told.start.filter((phase) => id && phase.vm === id)];
      return start(told.vms.find((vm) => vm.id === id), id, phases);
    });
    this.element.replaceChildren(...starts.reverse());
  }
}

function start(vm, id, phases) {
  const from = Math.min(...phases.map((phase) => phase.began));
  const whole = Math.max(0.001, ...phases.map((phase) => phase.began + phase.seconds - from));
  const rows = phases.map((phase) => {
    const known = PHASES[phase.name] ?? { title: plain(phase.name) };
    const about = phase.error ? plain(phase.error) : known.about;
    const bar = h("span", { class: "phase", "data-tone": phase.error ? "bad" : known.whole ? "whole" : known.tone ?? "node", "data-open": !phase.over });
    bar.style.marginInlineStart = `${(((phase.began - from) / whole) * 100).toFixed(2)}%`;
    bar.style.width = `max(3px, ${((phase.seconds / whole) * 100).toFixed(2)}%)`;
    return h("tr", { "data-phase": plain(phase.name), class: known.whole || known.within ? "" : "part" },
      h("th", { scope: "row" }, known.title, about ? h("small", {}, about) : null),
      h("td", { class: "lane" }, bar),
      h("td", { class: "ms" }, phase.over ? milliseconds(phase.seconds * 1000) : `${milliseconds(phase.seconds * 1000)} …`));
  });
  const over = phases.every((phase) => phase.over);
  return h("section", { class: "card" },
    h("h2", {}, vm ? `Start of VM ${plain(vm.name)}${vm.attempt ? `, attempt ${vm.attempt}` : ""}` : id ? `Start of an earlier VM, ${plain(id.slice(0, 12))}` : "Start of the pod"),
    h("p", { class: "note" }, `${full(from)}; ${over ? `${milliseconds(whole * 1000)} in all` : "it is still coming up"}`),
    h("table", { class: "waterfall", "aria-label": "Phases of the start, in order" }, h("tbody", {}, rows)));
}
