"use strict";

const root = document.documentElement;

document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});

// A page opened from a file may not use the clipboard API. Copying a selected text area always works.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

// Decompresses a table in all formats: base64 of gzip of JSON.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

for (const button of document.querySelectorAll("[data-copy], [data-format]")) {
  button.addEventListener("click", async () => {
    const name = button.textContent;
    const table = button.closest(".table");
    await copy(button.dataset.copy ?? (await unpacked(table.dataset.copies))[button.dataset.format]);
    button.textContent = "copied";
    setTimeout(() => (button.textContent = name), 1200);
  });
}

// ---- navigation: highlights the section that is on screen --------------------------------------------------------

const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const seen = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) links.get(entry.target.id)?.classList.toggle("here", entry.isIntersecting);
  },
  { rootMargin: "-20% 0px -60% 0px" },
);
for (const section of document.querySelectorAll("section[id]")) seen.observe(section);

// ---- saving plots: a plot's colours are variables of the page, so a file needs their values --------------------------

function standalone(plot) {
  const svg = plot.cloneNode(true);
  const background = document.createElementNS(svg.namespaceURI, "rect");
  for (const side of ["width", "height"]) background.setAttribute(side, "100%");
  background.style.fill = "var(--card)";
  svg.prepend(background);
  const probe = document.body.appendChild(document.createElement("span"));
  const text = new XMLSerializer().serializeToString(svg).replace(/var\((--[\w-]+)\)/g, (_, name) => {
    if (name === "--sans") return "sans-serif";
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return text;
}

for (const button of document.querySelectorAll("button.save")) {
  button.addEventListener("click", () => {
    const figure = button.closest("figure");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([standalone(figure.querySelector("svg"))], { type: "image/svg+xml" }));
    link.download = `${figure.getAttribute("aria-label").replace(/[^\w]+/g, "-").slice(0, 60)}.svg`;
    link.click();
    URL.revokeObjectURL(link.href);
  });
}

// ---- flame graphs: nested [name, own µs, children] --------------------------------------------------------------------

const ROW = 20; // pixels
// Fractions of the graph's width: narrower boxes are not drawn, have no name, have no border.
const THINNEST = 0.0008;
const NAMED = 0.03;
const BORDERED = 0.004;

function sized([name, self, children]) {
  const inner = children.map(sized);
  return { name, self, children: inner, us: inner.reduce((sum, child) => sum + child.us, self) };
}

// Merges siblings whose names differ only in a number, and their children.
function mergedRepeats(node) {
  const groups = new Map();
  for (const child of node.children) {
    const name = child.name.replace(/(?<=[._])\d+(?=\.|$)/g, "*");
    const group = groups.get(name) ?? { name, self: 0, us: 0, children: [] };
    group.self += child.self;
    group.us += child.us;
    group.children.push(...child.children);
    groups.set(name, group);
  }
  return { ...node, children: [...groups.values()].map(mergedRepeats) };
}

function hue(name) {
  let hash = 7;
  for (const letter of name.replace(/\d+/g, "")) hash = (hash * 31 + letter.charCodeAt(0)) % 9973;
  return `var(--series-${(hash % 6) + 1})`;
}

// Three digits, no exponent.
function digits(value) {
  return value >= 1000 ? Math.round(value).toLocaleString("en") : value.toPrecision(3);
}

function flameGraph(figure) {
  const steps = Number(figure.dataset.steps);
  const plain = sized(JSON.parse(figure.querySelector("script").textContent));
  const rows = figure.querySelector(".rows");
  const [search, merge] = figure.querySelectorAll("input");
  const output = figure.querySelector("output");
  let whole = plain;
  let zoom = [plain]; // path from the root to the box that is shown in full width
  let boxes = []; // the drawn boxes

  const time = (us) => `${digits(us / steps / 1000)} ms per step, ${digits((100 * us) / plain.us)} %`;
  const matches = (node, words) => words && node.name.toLowerCase().includes(words);

  function box(node, path, left, width, depth, words) {
    const drawn = document.createElement("div");
    drawn.textContent = width > NAMED ? node.name || "all" : "";
    drawn.title = `${path.map((n) => n.name || "all").join(" › ")}\n${time(node.us)}`;
    drawn.style.cssText = `left:${100 * left}%;width:${100 * width}%;top:${depth * ROW}px`;
    drawn.style.setProperty("--hue", hue(node.name));
    drawn.classList.toggle("bordered", width > BORDERED);
    drawn.classList.toggle("found", Boolean(matches(node, words)));
    drawn.classList.toggle("faded", depth < zoom.length - 1);
    drawn.tabIndex = node === zoom.at(-1) ? 0 : -1;
    drawn.setAttribute("role", "treeitem");
    drawn.setAttribute("aria-level", depth + 1);
    drawn.setAttribute("aria-label", `${node.name || "all"}: ${time(node.us)}`);
    boxes.push({ drawn, path, left, width, depth });
    drawn.addEventListener("click", () => { zoom = path; draw(); });
    drawn.addEventListener("focus", () => { output.value = `${node.name || "all"}: ${time(node.us)}`; });
    drawn.addEventListener("pointerenter", () => { output.value = `${node.name || "all"}: ${time(node.us)}`; });
    rows.append(drawn);
  }

  function place(node, path, left, width, depth, words) {
    if (width < THINNEST) return depth;
    box(node, path, left, width, depth, words);
    let deepest = depth;
    for (const child of node.children) {
      const share = (width * child.us) / node.us;
      deepest = Math.max(deepest, place(child, [...path, child], left, share, depth + 1, words));
      left += share;
    }
    return deepest;
  }

  // Time of the boxes that match. A matching box counts once, with everything inside it.
  function found(node, words) {
    return matches(node, words) ? node.us : node.children.reduce((sum, child) => sum + found(child, words), 0);
  }

  function draw() {
    const words = search.value.trim().toLowerCase();
    rows.replaceChildren();
    boxes = [];
    zoom.slice(0, -1).forEach((node, depth) => box(node, zoom.slice(0, depth + 1), 0, 1, depth, words));
    const deepest = place(zoom.at(-1), zoom, 0, 1, zoom.length - 1, words);
    rows.style.height = `${(deepest + 1) * ROW}px`;
    const scope = zoom.at(-1);
    output.value = words
      ? `found: ${time(found(scope, words))}, ${digits((100 * found(scope, words)) / scope.us)} % of the boxes shown`
      : `${scope.name || "all"}: ${time(scope.us)}`;
  }

  // The arrow keys move to a neighbouring box, Enter zooms in, Escape shows all.
  function neighbour(from, key) {
    const middle = from.left + from.width / 2;
    const level = from.depth + ({ ArrowUp: -1, ArrowDown: 1 }[key] ?? 0);
    const there = boxes.filter((box) => box.depth === level && box !== from);
    if (key === "ArrowUp") return there.find((box) => box.left <= middle && middle <= box.left + box.width);
    if (key === "ArrowDown") return there.find((box) => box.left >= from.left - 1e-9 && box.left < from.left + from.width);
    return key === "ArrowLeft"
      ? there.filter((box) => box.left < from.left).at(-1)
      : there.find((box) => box.left > from.left);
  }

  rows.setAttribute("role", "tree");
  rows.setAttribute("aria-label", "Flame graph");
  rows.addEventListener("keydown", (event) => {
    const from = boxes.find((box) => box.drawn === document.activeElement);
    if (!from) return;
    if (event.key.startsWith("Arrow")) neighbour(from, event.key)?.drawn.focus();
    else if (["Enter", " ", "Escape"].includes(event.key)) {
      zoom = event.key === "Escape" ? [whole] : from.path;
      draw();
      boxes.find((box) => box.path.at(-1) === zoom.at(-1)).drawn.focus();
    } else return;
    event.preventDefault();
  });
  search.addEventListener("input", draw);
  merge.addEventListener("change", () => {
    whole = merge.checked ? mergedRepeats(plain) : plain;
    zoom = [whole];
    draw();
  });
  figure.querySelector(".reset").addEventListener("click", () => { zoom = [whole]; draw(); });
  draw();
}

document.querySelectorAll(".flame").forEach(flameGraph);
