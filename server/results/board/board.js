/* The board's page: sorting, links into folded parts, and curves. */

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8c564b"];
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const SVG = "http://www.w3.org/2000/svg";

function colour(index) { return COLOURS[index % COLOURS.length]; }

function number(text) {
  const found = /[+-]?\d+(\.\d+)?/.exec(text);
  return found ? Number(found[0]) : null;
}

function sortBy(table, column, descending) {
  const body = table.tBodies[0];
  const rows = Array.from(body.rows);
  const text = (row) => row.cells[column].textContent.trim();
  rows.sort((one, other) => {
    const a = text(one), b = text(other);
    if (column === 1) return descending ? b.localeCompare(a) : a.localeCompare(b);
    const x = number(a), y = number(b);
    if (x === null || y === null) return (x === null) - (y === null); // rows without a number stay at the end
    return descending ? y - x : x - y;
  });
  body.append(...rows);
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      sortBy(table, column, descending);
    });
  });
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let place = target; place; place = place.parentElement) if (place.tagName === "DETAILS") place.open = true;
  if (target) target.scrollIntoView();
}

window.addEventListener("hashchange", openTarget);
openTarget();

function element(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function draw(place) {
  const series = JSON.parse(place.dataset.curves);
  if (!series.length) return;
  const width = 760, height = 320, left = 40, bottom = 34, top = 10, right = 10;
  const points = series.flatMap((each) => each.points);
  const last = Math.max(1, ...points.map((point) => point[0]));
  const high = Math.min(100, 10 * Math.ceil(Math.max(10, ...points.map((point) => point[1])) / 10));
  const x = (round) => left + (round / last) * (width - left - right);
  const y = (value) => height - bottom - (value / high) * (height - bottom - top);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "accuracy over rounds" });
  for (let value = 0; value <= high; value += high > 50 ? 20 : 10) {
    svg.append(element("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: "#dfd9ca" }));
    svg.append(element("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, String(value)));
  }
  const step = Math.max(1, Math.ceil(last / 10));
  for (let round = 0; round <= last; round += step) {
    svg.append(element("text", { x: x(round), y: height - bottom + 16, "text-anchor": "middle" }, String(round)));
  }
  svg.append(element("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "round"));
  const names = document.createElement("div");
  names.className = "names";
  const lines = new Map();
  series.forEach((each, index) => {
    const path = each.points.map((point, at) => `${at ? "L" : "M"}${x(point[0])} ${y(point[1])}`).join("");
    const dash = DASHES[Math.floor(index / COLOURS.length) % DASHES.length];
    const line = element("path", { d: path, class: "line", stroke: colour(index), "stroke-dasharray": dash });
    line.append(element("title", {}, each.name));
    svg.append(line);
    lines.set(each.name, line);
    const name = document.createElement("span");
    const swatch = document.createElement("i");
    swatch.className = "swatch";
    swatch.style.background = colour(index);
    name.append(swatch, each.name);
    single(name, each.name, lines);
    names.append(name);
  });
  place.append(svg, names);
  let table = place.previousElementSibling;
  while (table && !table.querySelector("table.sortable")) table = table.previousElementSibling;
  for (const row of table ? table.querySelectorAll("tbody tr") : []) {
    const index = series.findIndex((each) => each.name === row.dataset.name);
    if (index < 0) continue;
    row.querySelector(".swatch").style.background = colour(index);
    single(row, row.dataset.name, lines);
  }
}

function single(place, name, lines) {
  const fade = (on) => { for (const [other, line] of lines) line.classList.toggle("faded", on && other !== name); };
  place.addEventListener("mouseenter", () => fade(true));
  place.addEventListener("mouseleave", () => fade(false));
}

for (const place of document.querySelectorAll("[data-curves]")) draw(place);
document.documentElement.dataset.ready = "true";
