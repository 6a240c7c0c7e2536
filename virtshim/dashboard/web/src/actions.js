// What a person can do to a VM. Each action that changes something is asked about first. One runs at a time.

import { h, plain, set } from "./dom.js";
import { listen, store, vmThatIsOn } from "./store.js";

// `fits`: whether the button is there. `needsRunning`: the node refuses it for a paused VM.
const ACTIONS = [
  { name: "pause", title: "Pause", fits: (pod, vm) => vm.state === "running",
    about: "The VM is paused until it is resumed or stopped. Kubernetes still sees a running container, but HTTP and TCP probes of it fail." },
  { name: "resume", title: "Resume", fits: (pod, vm) => vm.state === "paused", about: "The VM continues, whoever paused it." },
  { name: "reboot", title: "Reboot", needsRunning: true, about: "The guest restarts itself. It needs the QEMU guest agent." },
  { name: "reset", title: "Reset", needsRunning: true, harms: true,
    about: "The guest restarts at once, as by a reset button. It loses all data that it has not written to its disk." },
  { name: "stop", title: "Stop", harms: true,
    about: "The guest has 30 seconds to shut down, and is then ended. `virtshim start` starts a VM of `virtshim run -d` again." },
];
const SCREENSHOT = { name: "screenshot", title: "Screenshot", fits: (pod) => pod.has_screen };

export class Actions {
  constructor(view) {
    this.view = view;
    this.busy = false;
    this.buttons = [...ACTIONS, SCREENSHOT].map((action) => ({ action, button: h("button", {
      type: "button", class: "button", "data-action": action.name,
      onclick: () => (action === SCREENSHOT ? this.picture() : this.ask(action)) }, action.title) }));
    this.bar = h("div", { class: "actions", role: "group", "aria-label": "Actions" }, this.buttons.map((one) => one.button));
    this.result = h("p", { class: "result", role: "status" });
    this.stop = listen((what) => ["pods", "state", "link", "node"].includes(what) && this.refresh());
    this.refresh();
  }

  refresh() {
    const { pod } = this.view;
    const vm = vmThatIsOn(pod);
    for (const { action, button } of this.buttons) {
      button.hidden = !vm || !(action.fits?.(pod, vm) ?? true);
      const paused = Boolean(action.needsRunning) && vm?.state === "paused";
      button.disabled = this.busy || !answers() || paused;
      button.title = paused ? "The VM is paused: resume it first" : "";
    }
  }

  ask(action) {
    const { pod } = this.view;
    const vm = vmThatIsOn(pod);
    if (!vm || this.busy) return;
    const ofKubernetes = action.name === "stop" && !pod.is_of_run;
    const act = () => this.act(action, action.name === "stop" ? `pods/${encodeURIComponent(pod.id)}/stop` : `vms/${encodeURIComponent(vm.id)}/${action.name}`);
    const about = ofKubernetes
      ? `Kubernetes runs this pod and would start it again. Delete the pod there: kubectl delete pod -n ${pod.namespace} ${pod.name}` : action.about;
    this.dialog?.close();
    const dialog = (this.dialog = h("dialog", { class: "ask", "aria-labelledby": "ask-title", onclose: () => dialog.remove() },
      h("h2", { id: "ask-title" }, ofKubernetes ? "This pod belongs to Kubernetes" : `${action.title} ${plain(pod.namespace)}/${plain(pod.name)}?`),
      h("p", {}, plain(about)),
      h("div", { class: "choice" },
        h("button", { type: "button", class: "button", autofocus: true, onclick: () => dialog.close() }, ofKubernetes ? "Close" : "Cancel"),
        ofKubernetes ? null : h("button", { type: "button", class: `button main${action.harms ? " harms" : ""}`, onclick: (event) => {
          // The second click of a double click on the button that opened this is no answer.
          if (event.detail > 1 || !dialog.open) return;
          dialog.close();
          act();
        } }, action.title))));
    document.body.append(dialog);
    dialog.showModal();
  }

  act(action, path) {
    return this.run(action, async () => {
      const answer = await fetch(path, { method: "POST" });
      const { message, error } = await read(answer);
      if (!answer.ok) throw new Error(error);
      return message;
    });
  }

  picture() {
    const { pod } = this.view;
    const vm = vmThatIsOn(pod);
    if (!vm) return;
    this.run(SCREENSHOT, async () => {
      const answer = await fetch(`vms/${encodeURIComponent(vm.id)}/screenshot`);
      if (!answer.ok) throw new Error((await read(answer)).error);
      const url = URL.createObjectURL(await answer.blob());
      h("a", { href: url, download: `${pod.name}.png` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
      return "your browser saves it";
    });
  }

  async run(action, work) {
    if (this.busy) return;
    this.busy = true;
    this.refresh();
    this.say("busy", `${action.title} …`);
    try {
      // Another program may have taken the address of a dashboard that has ended.
      if (!answers()) throw new Error("the node does not answer now; nothing was done");
      this.say("fine", `${action.title}: ${await work()}`);
    } catch (error) {
      // A failed `fetch` has words of the browser, which say nothing of what to do.
      this.say("bad", `${action.title} failed: ${error instanceof TypeError ? "the dashboard did not answer; look at the VM's state before you try again" : error.message}`);
    } finally {
      this.busy = false;
      this.refresh();
    }
  }

  say(kind, text) {
    this.result.dataset.kind = kind;
    set(this.result, plain(text));
  }

  close() {
    this.stop();
    this.dialog?.close();
  }
}

function answers() {
  return store.link === "open" && !store.node?.trouble;
}

// The answer's JSON, or its text as an error.
async function read(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text);
  } catch {
    return { error: text.trim() || answer.statusText };
  }
}
