// Light, dark, or as the system has it. The choice is kept with the tab: nothing of the page outlives that.

import { set } from "./dom.js";

const ORDER = ["system", "light", "dark"];
const SIGNS = { system: "◐", light: "☀", dark: "☾" };
const KEY = "virtshim-theme";
const listeners = new Set();
let chosen = "system";

export function setUpTheme(button) {
  try {
    chosen = ORDER.includes(sessionStorage.getItem(KEY)) ? sessionStorage.getItem(KEY) : "system";
  } catch {
    // A browser that keeps nothing.
  }
  button.addEventListener("click", nextTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}

export function nextTheme() {
  chosen = ORDER[(ORDER.indexOf(chosen) + 1) % ORDER.length];
  try {
    sessionStorage.setItem(KEY, chosen);
  } catch {
    // As above.
  }
  apply();
}

function apply() {
  const button = document.getElementById("theme");
  document.documentElement.dataset.theme = chosen;
  set(button, SIGNS[chosen]);
  button.setAttribute("aria-label", `Colours: ${chosen}`);
  button.title = `Colours: ${chosen} (t)`;
  for (const listener of listeners) listener();
}

export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

// What a variable of the style sheet is now, as a colour that others understand.
export function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
