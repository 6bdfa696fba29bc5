// What every part of the page uses: elements, the server, messages, pictures, colors.
export const $ = (id) => document.getElementById(id);

/** The page's state: what GET /model said, and the bundle that was chosen (null: the default). */
export const state = { info: null, chosen: null };

/** An element with properties, a class and children (texts stay texts: nothing is read as HTML). */
export function make(tag, { className, ...properties } = {}, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

export function say(text) { $("say").textContent = text; }
export function trouble(text) {
  $("trouble-text").textContent = text;
  $("trouble").hidden = !text;
  if (text) $("trouble").scrollIntoView({ block: "nearest" });
}

class Refused extends Error {
  constructor(status, error) {
    super(error && error.message ? error.message[0].toUpperCase() + error.message.slice(1) + "." : "The server answered " + status + ".");
    this.status = status;
    this.code = error ? error.code : null;
  }
}

/** The JSON answer of a route. Throws Refused with the server's own words. */
export async function ask(path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem("key");
  if (key) headers["X-API-Key"] = key;
  const options = { headers, signal };
  if (body instanceof FormData) Object.assign(options, { method: "POST", body });
  else if (body) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try { response = await fetch(path, options); } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is it still running?");
  }
  const answer = await response.json().catch(() => null);
  if (response.status === 401) document.dispatchEvent(new Event("needs-key"));
  if (response.ok) return answer;
  throw new Refused(response.status, answer && answer.error);
}

/** Work that a newer call of the same runner replaces: stale answers are never shown. */
export function runner(place, button) {
  let current = null;
  return async (words, work) => {
    if (current) current.abort();
    const mine = current = new AbortController();
    trouble(""); say(words);
    place.setAttribute("aria-busy", "true");
    button.disabled = true;
    try { await work(mine.signal); say(""); } catch (error) {
      if (mine === current && error.name !== "AbortError") { say(""); trouble(error.message); }
    } finally {
      if (mine === current) { place.removeAttribute("aria-busy"); button.disabled = false; current = null; }
    }
  };
}

/** Fields as a form; lists and objects as JSON text. */
export function form(fields, file) {
  const data = new FormData();
  if (file) data.append("images", file, "picture");
  for (const [name, value] of Object.entries(fields)) {
    if (value !== null && value !== undefined) data.append(name, typeof value === "string" ? value : JSON.stringify(value));
  }
  return data;
}

/** A number with a real minus sign. */
export const signed = (value, plus = "") => (value < 0 ? "−" : plus) + Math.abs(value).toFixed(2);

/** A color per feature, the same on every tab. */
export function tint(name) {
  const all = state.info ? ["class", ...state.info.attributes] : [];
  const index = all.indexOf(name);
  return index < 0 ? "var(--base)" : "var(--c" + (index % 8) + ")";
}
export function tinted(node, name) { node.style.setProperty("--tint", tint(name)); return node; }

/** A bar from `from` to `to`, both 0..1. */
export function track(from, to, minus) {
  const fill = make("i", { className: minus ? "minus" : "" });
  fill.style.left = 100 * from + "%";
  fill.style.width = 100 * Math.max(to - from, 0) + "%";
  return make("span", { className: "track" }, fill);
}

/** A data URI as a file; fetch() may not open those here. */
export function fileOf(uri, name) {
  const [head, data] = uri.split(",");
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  return new File([bytes], name, { type: head.slice(5).split(";")[0] });
}

/** A drop zone: `taken(file)` is called for what is dropped, chosen, or given to `take`. */
export function dropZone(id, taken) {
  const zone = $(id);
  const input = zone.querySelector("input");
  const frame = zone.querySelector(".frame");
  const shown = zone.querySelector(".shown");
  const invite = zone.querySelector(".invite");
  const words = [...invite.childNodes];
  const clear = () => {
    if (shown.src) URL.revokeObjectURL(shown.src);
    shown.removeAttribute("src");
    frame.hidden = true;
    invite.hidden = false;
    invite.replaceChildren(...words);
  };
  const display = (file) => {
    clear();
    shown.src = URL.createObjectURL(file);
    shown.alt = "Chosen picture: " + file.name;
    frame.hidden = false;
    invite.hidden = true;
  };
  const take = (file) => { display(file); taken(file); };
  // As large as the zone allows, small pictures too.
  shown.addEventListener("load", () => {
    const { naturalWidth: w, naturalHeight: h } = shown;
    shown.style.width = Math.round(w * Math.min(320 / w, (zone.classList.contains("small") ? 130 : 300) / h)) + "px";
  });
  // TIFF and HEIF, which servers can read and browsers cannot show.
  shown.addEventListener("error", () => {
    if (!shown.src) return;
    clear();
    invite.replaceChildren(make("b", {}, shown.alt), make("br"), "no preview");
  });
  input.addEventListener("change", () => { if (input.files[0]) take(input.files[0]); input.value = ""; });
  zone.addEventListener("dragover", (event) => { event.preventDefault(); zone.classList.add("over"); });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
  });
  return { take, display, clear, zone, shown };
}
