// The page's start: tabs, theme, key, the choice of a model, and pasted pictures.
import { $, ask, make, state, trouble } from "./base.js";
import * as classify from "./classify.js";
import * as model from "./model.js";
import * as search from "./search.js";

const tabs = ["classify", "search", "model"];

function show(name, focus) {
  for (const tab of tabs) {
    $(tab).hidden = tab !== name;
    $("tab-" + tab).setAttribute("aria-selected", String(tab === name));
    $("tab-" + tab).tabIndex = tab === name ? 0 : -1;
  }
  trouble("");
  if (focus) $("tab-" + name).focus();
  if (location.hash.slice(1) !== name) history.replaceState(null, "", "#" + name);
}
tabs.forEach((tab, index) => {
  $("tab-" + tab).addEventListener("click", () => show(tab));
  $("tab-" + tab).addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) show(tabs[(index + step + tabs.length) % tabs.length], true);
  });
});
$("trouble-close").addEventListener("click", () => trouble(""));

document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((f) => f.type.startsWith("image/"));
  if (!file) return;
  event.preventDefault();
  if (!$("search").hidden) search.takePicture(file);
  else { show("classify"); classify.takePicture(file); }
});
// A picture dropped beside the zone must not replace the page.
for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());
search.onClassify((file) => { show("classify", true); classify.takePicture(file); });
$("to-search").addEventListener("click", () => { show("search", true); search.takePicture(classify.picture()); });

// Theme
const themes = ["system", "light", "dark"];
const signs = { system: "◐", light: "☀", dark: "☾" };
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = signs[theme];
  $("theme").setAttribute("aria-label", "Color theme: " + (theme === "system" ? "as the system" : theme));
  $("theme").title = $("theme").getAttribute("aria-label");
}
$("theme").addEventListener("click", () => {
  const next = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
  localStorage.setItem("theme", next);
  setTheme(next);
});
setTheme(themes.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "system");

// Key
const dialog = $("key-dialog");
function askKey() {
  if (dialog.open) return;
  $("key").value = sessionStorage.getItem("key") || "";
  dialog.returnValue = "";
  dialog.showModal();
}
$("key-open").addEventListener("click", askKey);
document.addEventListener("needs-key", askKey);
dialog.addEventListener("close", () => {
  if (dialog.returnValue !== "save") return;
  sessionStorage.setItem("key", $("key").value);
  trouble("");
  start();
});

// Model
async function start() {
  try {
    const info = state.info = await ask("model" + (state.chosen ? "?model=" + encodeURIComponent(state.chosen) : ""));
    $("models").replaceChildren(...info.models.map((name) => make("option", { value: name }, name)));
    $("models").value = info.model;
    $("models-field").hidden = info.models.length < 2;
    $("about").textContent = (info.models.length < 2 ? info.model + " · " : "") + info.base.name + " · " + info.engine.engine + " on " + info.engine.provider;
    classify.start();
    search.start();
    model.start();
  } catch (error) { trouble(error.message); }
}
$("models").addEventListener("change", () => { state.chosen = $("models").value; start(); });
if (tabs.includes(location.hash.slice(1))) show(location.hash.slice(1));
start();
