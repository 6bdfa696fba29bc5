// Search: a picture, words or a result in; pictures alike in the attributes that the sliders weigh.
import { $, ask, dropZone, fileOf, form, make, runner, signed, state, tinted, track } from "./base.js";

const PAGE = 24;
let source = null; // {file} or {id, thumbnail}; words are read from their field
let away = [];
let shownSoFar = 0;
let rerun = 0;
let classifyThis = () => {};

const zone = dropZone("drop-search", (taken) => { source = { file: taken }; $("text").value = ""; search({ jump: true }); });
const run = runner($("hits"), $("go-search"));
export const takePicture = (taken) => zone.take(taken);
export function onClassify(action) { classifyThis = action; }

// Weights
const inputs = () => [...$("sliders").querySelectorAll("input")];
function setWeights(chosen) {
  for (const input of inputs()) {
    input.value = chosen[input.dataset.attribute] || 0;
    input.dispatchEvent(new Event("input"));
  }
}
function weights() {
  return Object.fromEntries(inputs().filter((i) => Number(i.value) > 0).map((i) => [i.dataset.attribute, Number(i.value)]));
}
function drawPresets() {
  const now = weights();
  for (const chip of $("presets").children) {
    chip.setAttribute("aria-pressed", String(Object.keys(now).length === 1 && chip.dataset.attribute in now));
  }
}
function slider(name) {
  const shown = make("output");
  const input = make("input", { type: "range", min: 0, max: 1, step: 0.05, value: name === "class" ? 1 : 0, "aria-label": name });
  input.dataset.attribute = name;
  const show = () => { shown.textContent = Number(input.value).toFixed(2); drawPresets(); };
  input.addEventListener("input", show);
  input.addEventListener("change", again);
  show();
  return tinted(make("label", { className: "slider" }, make("span", {}, tinted(make("span", { className: "dot" }), name), name), shown, input), name);
}
function preset(name) {
  const button = make("button", { type: "button", "aria-pressed": "false" }, "only " + name);
  button.dataset.attribute = name;
  button.addEventListener("click", () => { setWeights({ [name]: 1 }); again(); });
  return button;
}
function again() {
  clearTimeout(rerun);
  if (source || $("text").value.trim()) rerun = setTimeout(() => search(), 250);
}

// This search, in words
function chip(text, className, removed) {
  const button = make("button", { type: "button", "aria-label": "Remove: " + text }, "✕");
  button.addEventListener("click", removed);
  return make("span", { className: "chip " + className }, text, button);
}
function drawQuery() {
  const nodes = [];
  const text = $("text").value.trim();
  if (source && source.id) nodes.push(chip("like " + source.id, "", () => { forget(); $("hits").replaceChildren(invitation()); }));
  else if (source) nodes.push(make("span", { className: "chip still" }, "like your picture"));
  else if (text) nodes.push(make("span", { className: "chip still" }, "“" + text + "”"));
  if (nodes.length) nodes.push(make("span", { className: "chip still" }, "in " + Object.keys(weights()).join(", ")));
  for (const id of away) nodes.push(chip("not like " + id, "away", () => { away = away.filter((other) => other !== id); search(); }));
  $("query").replaceChildren(...nodes);
}
function forget() {
  source = null;
  away = [];
  zone.clear();
  $("more").hidden = true;
  drawQuery();
}

// Results
function moreLike(hit, name) {
  source = { id: hit.id };
  $("text").value = "";
  if (hit.thumbnail) zone.display(fileOf(hit.thumbnail, hit.id));
  else zone.clear();
  setWeights({ [name]: 1 });
  return search({ jump: true });
}
function scores(hit) {
  return Object.entries(hit.scores).map(([name, score]) => make("span", {}, name,
    tinted(track(0, Math.min(Math.max(score, 0), 1)), name), make("span", { className: "value" }, signed(score))));
}
function card(hit) {
  const body = make("div", {}, make("div", { className: "id" }, make("span", {}, hit.id), make("b", {}, signed(hit.score))),
    make("div", { className: "parts" }, ...scores(hit)));
  const facts = Object.entries(hit.metadata).filter(([, value]) => value !== null).map(([key, value]) => key + ": " + value);
  if (facts.length) body.append(make("div", { className: "more" }, facts.join(" · ")));
  const chips = make("div", { className: "chips", role: "group", "aria-label": "More like " + hit.id + " in" });
  for (const name of ["class", ...state.info.attributes]) {
    const button = tinted(make("button", { type: "button", "aria-label": "more like this in " + name, title: "More like this in " + name }, name), name);
    button.addEventListener("click", () => moreLike(hit, name));
    chips.append(button);
  }
  body.append(make("div", { className: "more" }, "More like this in"), chips);
  const foot = make("div", { className: "foot" });
  const less = make("button", { type: "button", className: "plain" }, "Not this");
  less.addEventListener("click", () => { away = [...new Set([...away, hit.id])].slice(-16); search(); });
  foot.append(less);
  if (hit.thumbnail) {
    const classify = make("button", { type: "button", className: "plain" }, "Classify");
    classify.addEventListener("click", () => classifyThis(fileOf(hit.thumbnail, hit.id)));
    foot.append(classify);
  }
  body.append(foot);
  const node = make("article", { className: "card hit" }, body);
  if (hit.thumbnail) node.prepend(make("img", { src: hit.thumbnail, alt: hit.id, loading: "lazy" }));
  return node;
}
const invitation = () => make("p", { className: "empty" }, "Search by a picture or in words, then move the sliders: alike in color is not alike in shape.");

function search({ offset = 0, jump = false } = {}) {
  clearTimeout(rerun);
  return run("Searching…", async (signal) => {
    const text = $("text").value.trim();
    const attributes = weights();
    if (!text && !source) throw new Error("Choose a picture or write a few words first.");
    if (!Object.keys(attributes).length) throw new Error("Move at least one slider above 0.");
    const fields = { attributes, top_k: PAGE };
    if (offset) fields.offset = offset;
    if (Number($("diversity").value)) fields.diversity = Number($("diversity").value);
    if (state.chosen) fields.model = state.chosen;
    if ($("filter").value.trim()) fields.filter = $("filter").value.trim();
    if (away.length) fields.negative = { ids: away };
    if (text) fields.texts = [text];
    else if (source.id) fields.ids = [source.id];
    const answer = await ask("search", !text && source.file ? form(fields, source.file) : fields, signal);
    drawQuery();
    const cards = answer.results.map(card);
    if (offset) $("hits").append(...cards);
    else $("hits").replaceChildren(...(cards.length ? cards : [make("p", { className: "empty" }, "Nothing found. A filter may leave everything out.")]));
    shownSoFar = offset + cards.length;
    $("more").hidden = cards.length < PAGE;
    // Not while a slider is moved: it would run away.
    if (jump && matchMedia("(max-width: 48rem)").matches) $("query").scrollIntoView({ block: "start" });
  });
}
$("go-search").addEventListener("click", () => search({ jump: true }));
$("more").addEventListener("click", () => search({ offset: shownSoFar }));
// Words replace the picture.
$("text").addEventListener("input", () => { if ($("text").value && source) { source = null; zone.clear(); } });
for (const id of ["text", "filter"]) $(id).addEventListener("keydown", (event) => { if (event.key === "Enter") search({ jump: true }); });
$("diversity").addEventListener("input", (event) => { event.target.previousElementSibling.textContent = Number(event.target.value).toFixed(2); });
$("diversity").addEventListener("change", again);

/** A model was chosen: its attributes as sliders, and whether it has a gallery. */
export function start() {
  const names = ["class", ...state.info.attributes];
  const has = state.info.gallery_model === state.info.model;
  $("no-gallery").hidden = has;
  $("search-body").hidden = !has;
  $("sliders").replaceChildren(...names.map(slider));
  $("presets").replaceChildren(...(names.length > 1 ? names.map(preset) : []));
  drawPresets();
  forget();
  $("hits").replaceChildren(invitation());
}
