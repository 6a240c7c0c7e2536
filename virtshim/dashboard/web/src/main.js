// The page: which view is shown, and how the connection is.

import "./style.css";
import { plain, set } from "./dom.js";
import { setUpKeys } from "./keys.js";
import { PodList } from "./list.js";
import { NodeView } from "./node_view.js";
import { PodView } from "./pod_view.js";
import { connect, listen, store } from "./store.js";
import { nextTheme, setUpTheme } from "./theme.js";

const place = document.getElementById("view");
const search = document.getElementById("search");
let view = null;

setUpTheme(document.getElementById("theme"));
const list = new PodList(document.getElementById("list"), search, document.getElementById("chips"), (id) => open(id));

function open(id) {
  location.hash = `#/pods/${encodeURIComponent(id)}${view instanceof PodView ? `/${view.tab.kind}` : ""}`;
}

function route() {
  const [, first, id, tab] = decodeURI(location.hash).split("/");
  const pod = first === "pods" ? decodeURIComponent(id ?? "") : "";
  if (pod && view instanceof PodView && view.id === pod) view.open(tab);
  else {
    view?.close();
    view = pod ? new PodView(pod, tab) : new NodeView();
    place.replaceChildren(view.element);
    place.scrollTop = 0;
  }
  document.body.dataset.showing = pod ? "pod" : "node";
  list.select(pod);
  document.title = pod ? `${view.title} – virtshim` : "virtshim";
}

function connection() {
  const { link, node } = store;
  const pill = document.getElementById("pill");
  const banner = document.getElementById("banner");
  const troubles = Object.entries(node?.conditions ?? {}).filter(([, trouble]) => trouble);
  let kind = "fine";
  let said = "ready";
  let text = "";
  if (link === "ended") [kind, said, text] = ["lost", "ended", "This session has ended. Open the address that `virtshim dashboard` prints; Enter in its terminal prints another."];
  else if (link === "foreign") [kind, said, text] = ["lost", "ended", "The dashboard has ended, and another program answers at its address: close this page."];
  else if (link === "over") [kind, said, text] = ["lost", "ended", "The dashboard has ended. Start `virtshim dashboard` on the node again, and open the address that it prints."];
  else if (link === "silent") [kind, said, text] = ["lost", "ended", "The dashboard has ended, or the way to it is broken (an SSH tunnel?). Reload this page to try once more, or start `virtshim dashboard` again."];
  else if (link === "lost") [kind, said, text] = ["lost", "reconnecting", "The dashboard does not answer: reconnecting …"];
  else if (link === "connecting" || !node) [kind, said] = ["wait", "connecting"];
  else if (node.trouble) [kind, said, text] = ["lost", "reconnecting", `The node does not answer: reconnecting … (${plain(node.trouble)})`];
  else if (troubles.length) [kind, said, text] = ["trouble", "not ready", troubles.map(([name, why]) => `${plain(name)}: ${plain(why)}`).join("; ")];
  pill.dataset.kind = kind;
  set(pill, said);
  set(banner, text);
  banner.hidden = !text;
  banner.dataset.kind = kind;
  document.body.classList.toggle("stale", kind === "lost");
  set(document.getElementById("host"), plain(node?.host.hostname ?? ""));
}

setUpKeys({
  "/": () => {
    location.hash = document.body.dataset.showing === "pod" && innerWidth < 860 ? "#/" : location.hash;
    search.focus();
    search.select();
  },
  j: () => list.step(1),
  k: () => list.step(-1),
  n: () => (location.hash = "#/"),
  t: nextTheme,
  Escape: () => (location.hash = "#/"),
  tab: (number) => view instanceof PodView && view.pick(number),
});
listen((what) => {
  if (what === "link" || what === "node") connection();
  if (what === "pods" && view instanceof PodView) document.title = `${view.title} – virtshim`;
});
addEventListener("hashchange", route);
connection();
route();
connect();
