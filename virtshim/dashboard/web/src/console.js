// A VM's serial console. What has been shown is told to the server, which reads no further ahead than that.

import { FitAddon } from "@xterm/addon-fit";
import { Terminal } from "@xterm/xterm";
import "@xterm/xterm/css/xterm.css";
import { h, plain, set } from "./dom.js";
import { currentVm, isOver, serverKnown, socketUrl } from "./store.js";
import { onTheme, colour } from "./theme.js";

const ENDED = 4000;
// [label, name, what it sends; a letter: the end of an arrow's sequence]
const KEYS = [["Esc", "Escape", "\x1b"], ["Tab", "Tab", "\t"], ["Ctrl"], ["←", "Left", "D"], ["↑", "Up", "A"], ["↓", "Down", "B"], ["→", "Right", "C"]];

export class Stage {
  constructor(view) {
    this.vm = currentVm(view.pod).id;
    this.says = h("span", { class: "says", role: "status" }, "Connecting …");
    this.place = h("div", { class: "terminal" });
    this.again = h("button", { type: "button", class: "button", hidden: true, onclick: () => this.connect() }, "Connect");
    // On a phone, whose keyboard lacks these keys. A press keeps the focus, and so the phone's keyboard.
    const stay = (event) => event.preventDefault();
    this.ctrl = h("button", { type: "button", class: "button", "aria-pressed": "false", onpointerdown: stay, onmousedown: stay, onclick: () => this.hold(!this.held) }, "Ctrl");
    this.keys = h("div", { class: "keybar", role: "toolbar", "aria-label": "Keys" }, KEYS.map(([label, title, keys]) => (keys
      ? h("button", { type: "button", class: "button", title, "aria-label": title, onpointerdown: stay, onmousedown: stay, onclick: () => this.press(keys) }, label)
      : this.ctrl)));
    this.element = h("div", { class: "stagebox" },
      h("div", { class: "stagebar" }, this.says, h("span", { class: "spring" }), this.again,
        h("button", { type: "button", class: "button", onclick: () => this.terminal.clear() }, "Clear")), this.keys, this.place);
    this.terminal = new Terminal({
      fontFamily: 'ui-monospace, "SFMono-Regular", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace',
      fontSize: 13, scrollback: 5000, cursorBlink: false, screenReaderMode: false, allowProposedApi: false, convertEol: false, disableStdin: true,
      linkHandler: null, windowOptions: {},
    });
    this.fit = new FitAddon();
    this.terminal.loadAddon(this.fit);
    this.terminal.attachCustomKeyEventHandler((event) => this.key(event));
    this.terminal.onData((data) => this.send(new TextEncoder().encode(this.withCtrl(data))));
    this.terminal.onBinary((data) => this.send(Uint8Array.from(data, (char) => char.charCodeAt(0))));
    this.terminal.onResize((size) => this.tell({ columns: size.cols, rows: size.rows }));
    this.paint();
    this.unpaint = onTheme(() => this.paint());
    this.pause = 500;
  }

  shown() {
    this.terminal.open(this.place);
    // For people's own tools, and tests: what is on the screen as text.
    this.place.terminal = this.terminal;
    this.resizing = new ResizeObserver(() => this.place.clientHeight && this.fit.fit());
    this.resizing.observe(this.place);
    this.connect();
    this.terminal.focus();
  }

  changed(pod) {
    const vm = currentVm(pod).id;
    if (vm === this.vm) return;
    this.vm = vm;
    this.terminal.write("\r\n");
    this.connect();
  }

  async connect() {
    clearTimeout(this.later);
    this.socket?.close();
    this.again.hidden = true;
    const turn = (this.turn = {});
    await serverKnown();
    if (turn !== this.turn) return;
    const socket = (this.socket = new WebSocket(socketUrl(`vms/${encodeURIComponent(this.vm)}/console`)));
    socket.binaryType = "arraybuffer";
    socket.onmessage = (message) => {
      if (socket !== this.socket) return;
      if (typeof message.data === "string") return this.attached(JSON.parse(message.data));
      const data = new Uint8Array(message.data);
      const { earlier } = this;
      this.earlier = false;
      this.terminal.write(data, () => {
        if (earlier) this.replaying = false;
        this.tell({ shown: data.length }, socket);
      });
    };
    socket.onclose = (event) => socket === this.socket && this.left(event);
  }

  attached(message) {
    this.pause = 500;
    // The earlier output comes first. It may ask the terminal for answers, which the guest has got long ago.
    this.replaying = this.earlier = message.earlier;
    if (message.earlier) this.terminal.write("\x1bc");
    this.terminal.options.disableStdin = !message.input;
    set(this.says, message.input ? "Connected. Ctrl-] leaves the console" : "Connected, to look only: set stdin: true in the container's spec to type here");
    this.tell({ columns: this.terminal.cols, rows: this.terminal.rows });
  }

  left(event) {
    this.terminal.options.disableStdin = true;
    this.again.hidden = false;
    if (event.code === ENDED && !event.reason) {
      set(this.says, "The console has ended.");
      return;
    }
    if (isOver()) return this.over();
    set(this.says, `${plain(event.reason) || "The connection was lost"}; reconnecting …`);
    this.later = setTimeout(() => this.connect(), this.pause);
    this.pause = Math.min(5000, this.pause * 1.6);
  }

  over() {
    clearTimeout(this.later);
    this.again.hidden = true;
    set(this.says, "Not connected any more.");
  }

  send(data) {
    if (this.socket?.readyState === WebSocket.OPEN && !this.replaying && !this.terminal.options.disableStdin) this.socket.send(data);
  }

  tell(said, socket = this.socket) {
    if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify(said));
  }

  press(keys) {
    const arrow = /^[A-D]$/.test(keys);
    if (!arrow) return this.terminal.input(keys);
    const start = this.held ? "\x1b[1;5" : this.terminal.modes.applicationCursorKeysMode ? "\x1bO" : "\x1b[";
    this.hold(false);
    this.terminal.input(start + keys);
  }

  // The next key is pressed with Ctrl.
  hold(held) {
    this.held = held;
    this.ctrl.setAttribute("aria-pressed", String(held));
  }

  withCtrl(data) {
    // Answers of the terminal to the guest are longer.
    if (!this.held || data.length !== 1) return data;
    this.hold(false);
    return /[ @-_a-z]/.test(data) ? String.fromCharCode(data.charCodeAt(0) & 31) : data;
  }

  key(event) {
    if (event.type === "keydown" && event.ctrlKey && event.key === "]") {
      event.preventDefault();
      event.stopPropagation();
      this.terminal.blur();
      document.querySelector(".tab[aria-selected=true]")?.focus();
      return false;
    }
    return true;
  }

  paint() {
    this.terminal.options.theme = {
      background: colour("--term-bg"), foreground: colour("--term-fg"), cursor: colour("--term-fg"), cursorAccent: colour("--term-bg"), selectionBackground: colour("--term-select"),
      black: "#1d2330", red: "#e0555c", green: "#4cae6b", yellow: "#c99a2e", blue: "#5b8def", magenta: "#b07ad9", cyan: "#3aa7a3", white: "#c8ced9",
      brightBlack: "#6b7486", brightRed: "#f1797e", brightGreen: "#6fca8b", brightYellow: "#e0b95a", brightBlue: "#86adf7", brightMagenta: "#c89ceb", brightCyan: "#63c4c0", brightWhite: "#f4f6fa",
    };
  }

  close() {
    clearTimeout(this.later);
    this.turn = null;
    this.unpaint();
    this.resizing?.disconnect();
    const socket = this.socket;
    this.socket = null;
    socket?.close();
    this.terminal.dispose();
  }
}
