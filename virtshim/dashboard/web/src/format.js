// Numbers and times for people. Pure.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${short(value, unit === 0)} ${UNITS[unit]}`;
}

export function rate(value) {
  return value === null || value === undefined ? "–" : `${bytes(value)}/s`;
}

// Of CPUs in use: what one CPU can do is 100 %.
export function cpu(value) {
  return value === null || value === undefined ? "–" : `${short(value * 100)} %`;
}

function short(value, whole = false) {
  if (whole || value >= 100) return String(Math.round(value));
  return value >= 10 ? value.toFixed(1).replace(/\.0$/, "") : value.toFixed(value < 0.005 ? 0 : 2).replace(/\.?0+$/, "") || "0";
}

export function span(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 2 * 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} days`;
}

export function milliseconds(ms) {
  if (ms < 1) return "< 1 ms";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return ms < 10000 ? `${(ms / 1000).toFixed(2)} s` : `${(ms / 1000).toFixed(1)} s`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}

export function full(seconds) {
  return seconds ? new Date(seconds * 1000).toISOString().replace("T", " ").replace(/\.\d+Z$/, " UTC") : "–";
}
