"use strict";
/* Elements, numbers and marks that all figures share. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const SHAPES = ["circle", "square", "triangle", "diamond", "cross", "star", "down", "bar"];

function make(name, attributes, ...children) {
  const element = document.createElement(name);
  return fill(element, attributes, children);
}

function draw(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  return fill(element, attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}

/* Colours come round after eight; then the shapes differ. */
const shapeOf = (index) => SHAPES[(index + 3 * Math.floor(index / 8)) % 8];
const groupColour = (index) => `var(--g${index % 8})`;
const domainColour = (index) => `var(--d${index % 8})`;

function classColour(index, count) {
  const hue = Math.round((360 * index) / Math.max(1, count) + 20) % 360;
  return `hsl(${hue} 62% var(--class-light))`;
}

/* A mark of `size` pixels around (0, 0). */
function shapePath(shape, size) {
  const r = size / 2;
  switch (shape) {
    case "square": return `M${-r * 0.88},${-r * 0.88}h${r * 1.76}v${r * 1.76}h${-r * 1.76}z`;
    case "triangle": return `M0,${-r * 1.15}L${r * 1.1},${r * 0.8}H${-r * 1.1}z`;
    case "down": return `M0,${r * 1.15}L${r * 1.1},${-r * 0.8}H${-r * 1.1}z`;
    case "diamond": return `M0,${-r * 1.25}L${r * 1.05},0L0,${r * 1.25}L${-r * 1.05},0z`;
    case "cross": {
      const a = r * 0.4;
      return `M${-a},${-r}h${2 * a}v${r - a}h${r - a}v${2 * a}h${a - r}v${r - a}h${-2 * a}v${a - r}h${a - r}v${-2 * a}h${r - a}z`;
    }
    case "star": {
      let path = "";
      for (let i = 0; i < 10; i++) {
        const angle = (Math.PI * i) / 5 - Math.PI / 2, reach = i % 2 ? r * 0.5 : r * 1.2;
        path += `${i ? "L" : "M"}${(reach * Math.cos(angle)).toFixed(2)},${(reach * Math.sin(angle)).toFixed(2)}`;
      }
      return `${path}z`;
    }
    case "bar": return `M${-r},${-r * 0.45}h${2 * r}v${r * 0.9}h${-2 * r}z`;
    default: return `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0z`;
  }
}

const mark = (shape, size, colour, more) => draw("path", { d: shapePath(shape, size), fill: colour, ...more });

function niceStep(low, high, count) {
  const rough = (high > low ? high - low : 1) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
}

function niceTicks(low, high, count) {
  const step = niceStep(low, high, count);
  const ticks = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6; tick += step) {
    ticks.push(Math.abs(tick) < step * 1e-6 ? 0 : Number(tick.toPrecision(10)));
  }
  return ticks;
}

const number = (value, digits) => (value === null || value === undefined ? "-" : value.toFixed(digits));

function bytes(value) {
  for (const [unit, factor] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= factor) return `${Number((value / factor).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

const tip = document.getElementById("tip");

/* Shows `content` beside the point (x, y) of the window, inside it. */
function showTip(content, x, y) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), width = document.documentElement.clientWidth;
  let left = x + 14;
  if (left + box.width > width - 6) left = Math.max(6, x - box.width - 14);
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(6, Math.min(y - box.height / 2, window.innerHeight - box.height - 6))}px`;
}

function hideTip() { tip.hidden = true; }

/* A row of radio buttons; `change` is called with the chosen value. */
function choice(title, name, options, change) {
  const labels = options.map(([value, text], index) => make("label", {},
    make("input", { type: "radio", name, value, checked: index === 0, onchange: () => change(value) }),
    make("span", {}, text)));
  return make("fieldset", { class: "choice" }, make("legend", {}, title), labels);
}

function selector(title, options, change) {
  const select = make("select", { onchange: () => change(Number(select.value)) },
    options.map((text, index) => make("option", { value: index }, text)));
  return make("label", {}, title, select);
}

/* Calls `change(index)` as a slider over `labels` moves; returns the controls with `set`. */
function slider(title, labels, start, change) {
  const output = make("output", {}, labels[start]);
  const input = make("input", { type: "range", min: 0, max: labels.length - 1, step: 1, value: start,
    "aria-label": title, "aria-valuetext": labels[start] });
  const set = (index) => {
    input.value = index;
    input.setAttribute("aria-valuetext", labels[index]);
    output.textContent = labels[index];
    change(index);
  };
  input.addEventListener("input", () => set(Number(input.value)));
  return { parts: [input, output], input, set };
}
