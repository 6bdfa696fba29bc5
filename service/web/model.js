// Model: what each attention head is for, what each feature weighs, and what runs it.
import { $, make, state, tinted, track } from "./base.js";

const words = {
  attribute: "one concept: its attribute's token learns here",
  mixed: "several concepts",
  generalization: "no concept stands out: kept as it was pretrained",
};

function describe(place, head) {
  const nodes = [make("h2", {}, "Block " + head.layer + ", head " + head.head + ": " + head.concept),
    make("p", { className: "hint" }, head.role[0].toUpperCase() + head.role.slice(1) + " head (" + words[head.role] + "); concept entropy " + head.entropy.toFixed(2) + " bits.")];
  const most = Math.max(...head.descriptions.map((d) => d.variance), 1e-9);
  if (head.descriptions.length) {
    const grid = make("div", { className: "why" });
    for (const { text, variance } of head.descriptions.slice(0, 12)) {
      grid.append(make("span", {}, text), tinted(track(0, variance / most), head.concept), make("span", { className: "value" }, variance.toFixed(3)));
    }
    nodes.push(grid);
  } else nodes.push(make("p", { className: "hint" }, "No descriptions are stored."));
  place.replaceChildren(...nodes);
}

function roleMap(roles) {
  const detail = make("div", { className: "card", "aria-live": "polite" });
  const map = make("div", { className: "map", role: "group", "aria-label": "Attention heads by block" });
  for (let layer = roles.layers; layer >= roles.first_block; layer--) {
    const row = make("div", {}, make("span", { className: "row-name" }, "block " + layer));
    for (const head of roles.heads.filter((h) => h.layer === layer)) {
      const name = "Block " + layer + ", head " + head.head + ": " + head.concept + ", " + head.role;
      const cell = tinted(make("button", { type: "button", className: "head " + head.role, title: name, "aria-label": name, "aria-pressed": "false" }, head.concept), head.concept);
      cell.addEventListener("click", () => {
        for (const other of map.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === cell));
        describe(detail, head);
      });
      row.append(cell);
    }
    map.append(row);
  }
  const count = (role) => roles.heads.filter((h) => h.role === role).length;
  const legend = make("div", { className: "legend" },
    ...state.info.attributes.map((name) => make("span", {}, tinted(make("span", { className: "dot" }), name), name)),
    make("span", { className: "quiet" }, "plain: attribute head (" + count("attribute") + ") · striped: mixed (" + count("mixed") + ") · faint: generalization (" + count("generalization") + ")"));
  describe(detail, [...roles.heads].sort((a, b) => a.entropy - b.entropy)[0]);
  return [make("div", { className: "card wide" }, make("h2", {}, "What each attention head is for"),
    make("p", { className: "hint" }, "The last blocks of the image tower. Pick a head to read what it responds to."), map, legend), detail];
}

function weightCard(alpha) {
  const grid = make("div", { className: "why" });
  for (const [name, value] of Object.entries(alpha)) {
    grid.append(make("span", { className: "name" }, tinted(make("span", { className: "dot" }), name), name), tinted(track(0, value), name),
      make("span", { className: "value" }, value.toFixed(3)));
  }
  return make("div", { className: "card" }, make("h2", {}, "What each feature weighs (α)"), grid);
}

function facts(info) {
  const list = make("dl");
  const fact = (name, value) => { if (value !== null && value !== undefined && value !== "") list.append(make("dt", {}, name), make("dd", {}, String(value))); };
  fact("Base", info.base.name);
  fact("Classes", info.classes.length);
  for (const [name, value] of Object.entries(info.engine)) fact(name[0].toUpperCase() + name.slice(1), value);
  fact("Graphs", info.graphs.join(", "));
  const fitted = info.calibration;
  if (fitted) {
    fact("Temperature", Number(fitted.temperature).toFixed(3));
    if (typeof fitted.ece_before === "number") fact("Calibration error", fitted.ece_before.toFixed(3) + " before, " + fitted.ece_after.toFixed(3) + " after");
  }
  fact("Label sets", Object.keys(info.label_sets).join(", "));
  fact("Bundle", info.sha256.slice(0, 16) + "…");
  fact("Library", info.library_version);
  return make("div", { className: "card" }, make("h2", {}, "What runs"), list);
}

/** A model was chosen. */
export function start() {
  const { info } = state;
  const heads = info.roles ? roleMap(info.roles) : [];
  $("model-body").replaceChildren(...heads, weightCard(info.alpha), facts(info));
}
