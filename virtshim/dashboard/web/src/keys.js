// Keys for everything.

import { h } from "./dom.js";

const KEYS = [
  ["/", "Find a pod"], ["j, k", "Next pod, previous pod"], ["n", "The node"], ["1 … 5", "Overview, start-up, console, screen, details"],
  ["t", "Light, dark, or as the system has it"], ["Esc", "Back to the list, or out of a dialog"], ["Ctrl-]", "Leave the console or the screen"], ["?", "This list"],
];

export function setUpKeys(actions) {
  const dialog = document.getElementById("keys");
  dialog.append(h("form", { method: "dialog" }, h("h2", { id: "keys-title" }, "Keyboard"),
    h("dl", {}, KEYS.flatMap(([key, what]) => [h("dt", {}, key.split(", ").map((one) => h("kbd", {}, one))), h("dd", {}, what)])),
    h("button", { class: "button", value: "close", autofocus: true }, "Close")));
  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close();
  });
  const help = () => (dialog.open ? dialog.close() : dialog.showModal());
  document.getElementById("help").addEventListener("click", help);
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.target.closest("input, textarea, select, .terminal, .display")) return;
    const open = document.querySelector("dialog[open]");
    if (event.key === "?" && (!open || open === dialog)) return help();
    if (open) return;
    const action = actions[event.key] ?? (/^[1-5]$/.test(event.key) ? () => actions.tab(Number(event.key) - 1) : null);
    if (!action) return;
    event.preventDefault();
    action();
  });
}
