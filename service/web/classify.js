// Classify: a picture and labels in; zero-shot beside adapted, why, and where each attribute looks.
import { $, ask, dropZone, fileOf, form, make, runner, say, signed, state, tinted, track, trouble } from "./base.js";

let file = null;
let labels = [];
let maps = null;
let look = null;
let temperature = 1;
let rerun = 0;

const zone = dropZone("drop-classify", (taken) => {
  file = taken;
  forgetMaps();
  $("to-search").hidden = !(state.info && state.info.gallery_model);
  classify();
});
const run = runner($("answers"), $("go-classify"));
export const takePicture = (taken) => zone.take(taken);
export const picture = () => file;

const percent = (p) => (p < 0.001 ? "< 0.1 %" : p > 0.999 ? "> 99.9 %" : (100 * p).toFixed(1) + " %");

// Labels
function drawLabels() {
  $("label-chips").replaceChildren(...labels.map((label, index) => {
    const remove = make("button", { type: "button", "aria-label": "Remove " + label }, "✕");
    remove.addEventListener("click", () => { labels.splice(index, 1); changed(); $("label-input").focus(); });
    return make("li", { className: "chip" }, label, remove);
  }));
  const set = $("sets").value;
  const classes = state.info ? state.info.classes : [];
  $("labels-clear").hidden = !labels.length;
  $("label-input").placeholder = labels.length ? "add another" : "type a label, then Enter";
  $("labels-hint").textContent = labels.length ? "Any words will do, also ones it was never trained on."
    : set ? "The labels of “" + set + "”."
    : classes.length + " trained classes: " + classes.slice(0, 12).join(", ") + (classes.length > 12 ? ", …" : "") + ". Type to ask about others.";
}
function changed() {
  drawLabels();
  clearTimeout(rerun);
  if (file) rerun = setTimeout(classify, 350);
}
function addLabels(text) {
  const fresh = text.split(/[\n,;]/).map((part) => part.trim()).filter((part) => part && !labels.includes(part));
  labels.push(...new Set(fresh));
  $("label-input").value = "";
  if (fresh.length) { $("sets").value = ""; changed(); }
}
$("label-input").addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" || event.key === ",") { event.preventDefault(); addLabels(event.target.value); }
  if (event.key === "Backspace" && !event.target.value && labels.length) { labels.pop(); changed(); }
});
$("label-input").addEventListener("blur", (event) => addLabels(event.target.value));
$("label-input").addEventListener("paste", (event) => {
  const text = event.clipboardData.getData("text");
  if (/[\n,;]/.test(text)) { event.preventDefault(); addLabels(text); }
});
$("label-field").addEventListener("click", (event) => { if (event.target === event.currentTarget) $("label-input").focus(); });
$("labels-clear").addEventListener("click", () => { labels = []; changed(); $("label-input").focus(); });
$("sets").addEventListener("change", () => { labels = []; changed(); });

// The answer
function guesses(title, className, result, choose) {
  const card = make("div", { className: "card " + className }, make("h2", {}, title));
  for (const [rank, prediction] of result.predictions.entries()) {
    const fill = make("i");
    fill.style.width = 100 * prediction.probability + "%";
    const row = make(choose ? "button" : "div", { className: "guess", title: "cosine " + prediction.cosine.toFixed(3) },
      make("span", {}, make("span", {}, prediction.label), make("span", { className: "n" }, percent(prediction.probability))),
      make("span", { className: "bar" }, fill));
    if (choose) {
      row.type = "button";
      row.setAttribute("aria-pressed", String(rank === 0));
      row.addEventListener("click", () => {
        for (const other of card.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === row));
        choose(prediction);
      });
    }
    card.append(row);
  }
  return card;
}
function drawWhy(place, prediction) {
  const parts = Object.entries(prediction.contributions);
  const most = Math.max(...parts.map(([, value]) => value), 0);
  const least = Math.min(...parts.map(([, value]) => value), 0);
  const span = most - least || 1;
  const zero = -least / span;
  const grid = make("div", { className: "why" });
  for (const [name, value] of parts) {
    const end = (value - least) / span;
    const bar = tinted(track(Math.min(zero, end), Math.max(zero, end), value < 0), name);
    grid.append(make("span", { className: "name" }, tinted(make("span", { className: "dot" }), name), name), bar,
      make("span", { className: "value" }, signed(value, "+")));
  }
  grid.append(make("span", { className: "total" }, "logit"), make("span", { className: "total" }),
    make("span", { className: "total value" }, signed(prediction.logit)));
  place.replaceChildren(make("h2", {}, "Why “" + prediction.label + "”?"), grid,
    make("p", { className: "hint" }, "What each feature adds to the logit; they sum to it. Cosine " + prediction.cosine.toFixed(3) + "." +
      (temperature === 1 ? "" : " Probabilities are calibrated with temperature " + temperature.toFixed(2) + ".")));
}
function verdict(zero, adapted) {
  const best = adapted.predictions[0];
  const plain = zero.predictions[0];
  const same = best.label === plain.label;
  const text = adapted.none_of_these ? "Probably none of these" : best.label + ", " + percent(best.probability);
  const other = adapted.none_of_these ? "The nearest is " + best.label + ", and it is not near. Zero-shot says " + plain.label + ", " + percent(plain.probability) + "."
    : same ? "Zero-shot agrees, with " + percent(plain.probability) + "."
    : "Zero-shot says " + plain.label + ", " + percent(plain.probability) + ".";
  return make("p", { className: "verdict" }, text, make("small", {}, other));
}
function draw(zero, adapted) {
  const why = make("div", { className: "card", id: "why" });
  const hasParts = Object.keys(adapted.predictions[0].contributions).length > 1;
  const nodes = [verdict(zero, adapted)];
  for (const warning of new Set([...zero.warnings, ...adapted.warnings])) nodes.push(make("p", { className: "note" }, warning));
  nodes.push(make("div", { className: "pair" },
    guesses("Adapted", "adapted", adapted, hasParts ? (prediction) => drawWhy(why, prediction) : null),
    guesses("Zero-shot", "zero", zero, null)));
  if (hasParts) { drawWhy(why, adapted.predictions[0]); nodes.push(why); }
  $("answers").replaceChildren(...nodes);
}
function fields(mode) {
  return { mode, model: state.chosen, label_set: $("sets").value || null, labels: labels.length ? labels : null };
}
function classify() {
  clearTimeout(rerun);
  return run("Looking…", async (signal) => {
    if (!file) throw new Error("Choose a picture first: drop, paste or pick one.");
    let answers;
    try {
      answers = await Promise.all(["zero_shot", "adapted"].map((mode) => ask("classify", form(fields(mode), file), signal)));
    } catch (error) {
      if (error.name !== "AbortError") { $("answers").replaceChildren(); $("to-search").hidden = true; }
      throw error;
    }
    temperature = answers[1].temperature;
    draw(answers[0].results[0], answers[1].results[0]);
    $("samples").hidden = true;
    $("looks").hidden = !canLook();
    if (look) await showMap(look);
    if (matchMedia("(max-width: 48rem)").matches && document.activeElement !== $("label-input")) $("answers").scrollIntoView({ block: "start" });
  });
}
$("go-classify").addEventListener("click", () => { addLabels($("label-input").value); classify(); });

// Heat maps, asked for when somebody wants to see one
const canLook = () => Boolean(state.info && state.info.graphs.includes("explain") && state.info.attributes.length);
function forgetMaps() {
  maps = null;
  const heat = zone.zone.querySelector(".heat");
  heat.hidden = true;
  heat.removeAttribute("src");
}
async function showMap(name) {
  look = name;
  for (const chip of $("looks-chips").children) chip.setAttribute("aria-pressed", String(chip.dataset.name === (name || "")));
  const heat = zone.zone.querySelector(".heat");
  if (!name) { heat.hidden = true; return; }
  if (!maps) {
    const answer = await ask("classify", form({ model: state.chosen, heatmaps: true, top_k: 1 }, file));
    maps = answer.results[0].heatmaps || {};
  }
  if (!maps[name] || look !== name) return;
  // The tower sees the centre square of the upright picture.
  const { naturalWidth: w, naturalHeight: h } = zone.shown;
  if (!w) return; // a format that cannot be shown
  const side = Math.min(w, h);
  Object.assign(heat.style, { left: 50 - 50 * side / w + "%", top: 50 - 50 * side / h + "%", width: 100 * side / w + "%", height: 100 * side / h + "%" });
  heat.src = maps[name];
  heat.alt = "Where " + name + " looks";
  heat.hidden = false;
}
function drawLooks() {
  const chip = (name, text) => {
    const button = make("button", { type: "button", "aria-pressed": String(!name) }, text);
    button.dataset.name = name;
    button.addEventListener("click", async () => {
      button.disabled = true;
      try { await showMap(name || null); } catch (error) { trouble(error.message); } finally { button.disabled = false; }
    });
    return button;
  };
  $("looks-chips").replaceChildren(chip("", "off"), ...state.info.attributes.map((name) => chip(name, name)));
}

// Some pictures to begin with
async function drawSamples() {
  $("samples").hidden = true;
  const { info } = state;
  if (file || !info.gallery_model || info.gallery_model !== info.model || !info.classes.length) return;
  const texts = info.classes.slice(0, 12);
  const answer = await ask("search", { texts, top_k: 1 });
  const found = texts.length > 1 ? answer.results.flatMap((r) => r.results || []) : answer.results;
  const hits = [...new Map(found.filter((h) => h.thumbnail).map((h) => [h.id, h])).values()].slice(0, 10);
  $("samples-row").replaceChildren(...hits.map((hit) => {
    const button = make("button", { type: "button", "aria-label": "Classify " + hit.id }, make("img", { src: hit.thumbnail, alt: "" }));
    button.addEventListener("click", () => zone.take(fileOf(hit.thumbnail, hit.id)));
    return button;
  }));
  $("samples").hidden = Boolean(file) || !hits.length;
}

/** A model was chosen: its classes, label sets and attributes. */
export function start() {
  forgetMaps();
  look = null;
  const names = Object.keys(state.info.label_sets);
  ask("label_sets").then(({ label_sets: all }) => {
    names.push(...all.filter((s) => s.source === "sent").map((s) => s.name));
    const chosen = $("sets").value;
    $("sets").replaceChildren(make("option", { value: "" }, "none"), ...names.map((name) => make("option", { value: name }, name)));
    $("sets").value = names.includes(chosen) ? chosen : "";
    $("sets-field").hidden = !names.length;
    drawLabels();
  }).catch((error) => say(error.message));
  drawLabels();
  drawLooks();
  $("looks").hidden = true;
  drawSamples().catch((error) => say(error.message));
  if (file) classify();
}
