// What the node is known to be, and the connection that keeps it so. Views are told which part has changed.

const SPARK = 40;
const EVENTS = 1000;

export const store = {
  // open, lost, or one for good: over: the dashboard has ended, silent: it no longer answers, ended: the session has ended, foreign:
  // another program has the address.
  link: "connecting",
  node: null,
  pods: [],
  byId: new Map(),
  last: new Map(),
  sparks: new Map(),
  events: [],
  at: 0,
};

const listeners = new Set();

export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell(what, detail) {
  for (const listener of [...listeners]) listener(what, detail);
}

export function now() {
  return store.at ? Math.max(store.at, Date.now() / 1000) : Date.now() / 1000;
}

// Whether it has a QEMU: a paused VM has one, too.
function isOn(vm) {
  return vm.state === "running" || vm.state === "paused";
}

export function currentVm(pod) {
  return pod.vms.find(isOn) ?? pod.vms[0] ?? null;
}

// The pod's VM if it has a QEMU.
export function vmThatIsOn(pod) {
  return pod?.vms.find(isOn) ?? null;
}

// One word: running, paused, created, exited, unknown, or, without a VM, ready or stopped.
export function stateOf(pod) {
  const vm = currentVm(pod);
  if (vm) return vm.state;
  return pod.ready ? "ready" : "stopped";
}

export function socketUrl(path) {
  const url = new URL(path, location.href);
  url.protocol = "ws:";
  url.hash = "";
  return url.href;
}

// What this page's server has told it, and says first: a program that took its port when it ended does not know it.
const RUN = document.querySelector("meta[name=run]").content;
// The server's code for its end.
const OVER = 4002;
// For about a minute.
const TRIES = 16;
let pause = 500;
let tries = 0;

// Whether the page will not connect again.
export function isOver() {
  return !["connecting", "open", "lost"].includes(store.link);
}

export function connect() {
  const socket = new WebSocket(socketUrl("live"));
  socket.onmessage = (first) => {
    if (read(first).run !== RUN) {
      store.link = "foreign";
      socket.close();
      return;
    }
    pause = 500;
    tries = 0;
    store.link = "open";
    tell("link");
    socket.onmessage = (message) => take(JSON.parse(message.data));
  };
  socket.onclose = async (event) => {
    if (event.code === OVER) store.link = "over";
    else if (store.link !== "foreign") {
      store.link = "lost";
      if (await sessionEnded()) store.link = "ended";
      else if ((tries += 1) >= TRIES) store.link = "silent";
    }
    tell("link");
    if (store.link !== "lost") return;
    setTimeout(connect, pause);
    pause = Math.min(5000, pause * 1.6);
  };
}

function read(message) {
  try {
    return JSON.parse(message.data) ?? {};
  } catch {
    return {};
  }
}

// Until it is the page's own server that answers: nothing is loaded from another, and nothing typed to it.
export function serverKnown() {
  return new Promise((resolve) => {
    if (store.link === "open") return resolve();
    const forget = listen((what) => {
      if (what !== "link" || store.link !== "open") return;
      forget();
      resolve();
    });
  });
}

async function sessionEnded() {
  try {
    return (await fetch("./", { method: "HEAD" })).status === 401;
  } catch {
    return false;
  }
}

const parts = {
  state(message) {
    store.node = message.node;
    store.events = message.events;
    store.last = new Map(Object.entries(message.last));
    store.sparks = new Map(Object.entries(message.sparks));
    store.at = message.node.seen ?? 0;
    takePods(message.pods);
    for (const part of ["node", "pods", "events", "tick", "state"]) tell(part);
  },
  node(message) {
    store.node = message.node;
    tell("node");
  },
  pods(message) {
    takePods(message.pods);
    tell("pods");
  },
  event(message) {
    store.events.push(message.event);
    if (store.events.length > EVENTS) store.events.splice(0, store.events.length - EVENTS);
    tell("events", message.event);
  },
  tick(message) {
    store.at = message.at;
    for (const [pod, values] of Object.entries(message.samples)) {
      store.last.set(pod, values);
      if (pod === "node") continue;
      if (!store.sparks.has(pod)) store.sparks.set(pod, []);
      push(store.sparks.get(pod), values[0], SPARK);
    }
    tell("tick", message);
  },
};

function take(message) {
  parts[message.type]?.(message);
}

function takePods(pods) {
  store.pods = pods;
  store.byId = new Map(pods.map((pod) => [pod.id, pod]));
  for (const known of [store.last, store.sparks]) {
    for (const id of known.keys()) if (id !== "node" && !store.byId.has(id)) known.delete(id);
  }
}

export function push(array, item, longest) {
  array.push(item);
  if (array.length > longest) array.shift();
}
