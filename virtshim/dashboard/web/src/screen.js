// A VM's screen.

import RFB from "@novnc/novnc";
import { h, plain, set } from "./dom.js";
import { currentVm, isOver, serverKnown, socketUrl } from "./store.js";

export class Stage {
  constructor(view) {
    this.pod = view.pod.id;
    this.vm = currentVm(view.pod).id;
    this.says = h("span", { class: "says", role: "status" }, "Connecting …");
    this.place = h("div", { class: "display" });
    this.look = h("input", { type: "checkbox", onchange: () => this.rfb && (this.rfb.viewOnly = this.look.checked) });
    this.again = h("button", { type: "button", class: "button", hidden: true, onclick: () => this.connect() }, "Connect");
    this.element = h("div", { class: "stagebox" },
      h("div", { class: "stagebar" }, this.says, h("span", { class: "spring" }), this.again,
        h("label", { class: "check" }, this.look, "Look only"),
        h("button", { type: "button", class: "button", onclick: () => this.rfb?.sendCtrlAltDel() }, "Ctrl-Alt-Del"),
        h("button", { type: "button", class: "button", onclick: () => this.place.requestFullscreen?.() }, "Full screen")), this.place);
    this.place.addEventListener("keydown", (event) => this.key(event), true);
    this.pause = 500;
  }

  shown() {
    this.connect();
  }

  changed(pod) {
    const vm = currentVm(pod).id;
    if (vm === this.vm) return;
    this.vm = vm;
    this.connect();
  }

  async connect() {
    clearTimeout(this.later);
    const before = this.rfb;
    this.rfb = null;
    before?.disconnect();
    this.place.replaceChildren();
    this.again.hidden = true;
    const turn = (this.turn = {});
    await serverKnown();
    if (turn !== this.turn) return;
    const socket = new WebSocket(socketUrl(`pods/${encodeURIComponent(this.pod)}/screen`));
    let why = "";
    socket.addEventListener("close", (event) => (why = event.reason));
    const rfb = (this.rfb = new RFB(this.place, socket, { shared: true }));
    rfb.scaleViewport = true;
    rfb.background = "transparent";
    rfb.viewOnly = this.look.checked;
    rfb.addEventListener("connect", () => {
      this.pause = 500;
      this.place.dataset.connected = "true";
      set(this.says, "Connected. Ctrl-] leaves the screen");
      rfb.focus();
    });
    rfb.addEventListener("disconnect", () => {
      if (rfb !== this.rfb) return;
      delete this.place.dataset.connected;
      if (isOver()) return this.over();
      this.again.hidden = false;
      set(this.says, `${plain(why) || "The connection was lost"}; reconnecting …`);
      this.later = setTimeout(() => this.connect(), this.pause);
      this.pause = Math.min(5000, this.pause * 1.6);
    });
  }

  over() {
    clearTimeout(this.later);
    this.again.hidden = true;
    set(this.says, "Not connected any more.");
  }

  key(event) {
    if (!(event.ctrlKey && event.key === "]")) return;
    event.preventDefault();
    event.stopPropagation();
    this.rfb?.blur();
    document.querySelector(".tab[aria-selected=true]")?.focus();
  }

  close() {
    clearTimeout(this.later);
    this.turn = null;
    const rfb = this.rfb;
    this.rfb = null;
    rfb?.disconnect();
  }
}
