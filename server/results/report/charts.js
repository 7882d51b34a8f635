"use strict";
/* What all plots share (elements, marks, scales, axes, tooltip, legend, controls), and the plots over axes. */

const SHAPES = ["circle", "square", "triangle", "diamond", "cross", "star", "down", "bar"];

const make = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const draw = (name, attributes, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

/* Colours come round after eight; then the shapes differ. Domains have colours of their own. */
const shapeOf = (index) => SHAPES[(index + 3 * Math.floor(index / 8)) % 8];
const colourOf = (field, index) => `var(--${field === "domain" ? "d" : "g"}${index % 8})`;

/* A mark of `size` pixels around (0, 0). */
function shapePath(shape, size) {
  const r = size / 2, a = r * 0.4;
  const points = (list) => `M${list.map(([x, y]) => `${(r * x).toFixed(2)},${(r * y).toFixed(2)}`).join("L")}z`;
  switch (shape) {
    case "square": return points([[-0.88, -0.88], [0.88, -0.88], [0.88, 0.88], [-0.88, 0.88]]);
    case "triangle": return points([[0, -1.15], [1.1, 0.8], [-1.1, 0.8]]);
    case "down": return points([[0, 1.15], [1.1, -0.8], [-1.1, -0.8]]);
    case "diamond": return points([[0, -1.25], [1.05, 0], [0, 1.25], [-1.05, 0]]);
    case "bar": return points([[-1, -0.45], [1, -0.45], [1, 0.45], [-1, 0.45]]);
    case "cross": return `M${-a},${-r}h${2 * a}v${r - a}h${r - a}v${2 * a}h${a - r}v${r - a}h${-2 * a}v${a - r}h${a - r}v${-2 * a}h${r - a}z`;
    case "star": return points(Array.from({ length: 10 }, (_, i) => {
      const angle = (Math.PI * i) / 5 - Math.PI / 2, reach = i % 2 ? 0.5 : 1.2;
      return [reach * Math.cos(angle), reach * Math.sin(angle)];
    }));
    default: return `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0z`;
  }
}

const mark = (shape, size, colour, more) => draw("path", { d: shapePath(shape, size), fill: colour, ...more });
const at = (x, y) => ({ transform: `translate(${x.toFixed(1)},${y.toFixed(1)})` });

/* `text` in lines of about `most` letters; a longer word stands alone. */
function wrapped(text, most) {
  const lines = [];
  for (const word of text.split(" ")) {
    const last = lines.length - 1;
    if (last >= 0 && lines[last].length + word.length < most) lines[last] += ` ${word}`; else lines.push(word);
  }
  return lines;
}

const inLines = (lines, attributes) => draw("text", attributes,
  lines.map((line, i) => draw("tspan", { x: attributes.x, dy: i ? 14 : 0 }, line)));

/* ---- numbers and scales ---- */

function bytes(value) {
  const [unit, factor] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find((entry) => value >= entry[1]) || ["B", 1];
  return `${Number((value / factor).toPrecision(3))} ${unit}`;
}

/* A format is {digits, unit, bytes, low, tens, shared}: how values read, and where their axis begins. */
const shown = (value, format) => (value === null || value === undefined ? "-"
  : format.bytes ? bytes(value) : value.toFixed(format.digits) + (format.unit || ""));
const withSpread = (value, sd, format) => shown(value, format) + (sd ? ` ± ${shown(sd, { ...format, unit: "" })}` : "");

function niceTicks(low, high, count) {
  const rough = (high > low ? high - low : 1) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(10)));
}

/* Lowest and highest value of lines with their spread, as the format's axis has them. */
function rangeOf(lines, format) {
  const all = lines.flatMap((line) => line.y.flatMap((value, i) => {
    const reach = (line.sd && line.sd[i]) || 0;
    return [value - reach, value + reach];
  })).filter(Number.isFinite);
  let low = all.length ? Math.min(...all) : 0, high = all.length ? Math.max(...all) : 1;
  if (format.tens) low = Math.max(0, Math.floor(low / 10) * 10);
  if (format.low !== undefined) low = format.low;
  if (high - low < 1e-9) high = low + Math.max(1e-3, Math.abs(low) * 0.1);
  return [low, high];
}

/* ---- a chart: axes, tooltip, keyboard ---- */

const tip = document.getElementById("tip");

/* Shows `content` next to the point (x, y) of the window, inside it. */
function showTip(content, x, y) {
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), width = document.documentElement.clientWidth;
  const left = x + 14 + box.width > width - 6 ? Math.max(6, x - box.width - 14) : x + 14;
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(6, Math.min(y - box.height / 2, window.innerHeight - box.height - 6))}px`;
}

function hideTip() { tip.hidden = true; }

/* Axes with marks on them. What a kind of chart adds: `stops` (places along the axis that the cursor visits, each
   {x, title, rows: [[name, text]]}), `marks()`, and `describe()`. Charts of one `bus` move and hide together. */
class Chart {
  constructor(host, lines, options) {
    Object.assign(this, { host, lines, off: new Set(), stop: null, options: { height: 210, label: "", ...options } });
    this.format = options.format;
    if (options.bus) options.bus.push(this);
    new ResizeObserver(() => { if (host.clientWidth && host.clientWidth !== this.width) this.render(); }).observe(host);
    this.render();
  }

  visible() { return this.lines.filter((line) => !this.off.has(line.name) && line.y.length); }

  render() {
    const { height, names, label } = this.options, width = (this.width = this.host.clientWidth || 640);
    const lines = this.visible(), [low, high] = this.options.range || rangeOf(this.lines, this.format);
    const ticks = niceTicks(low, high, height < 170 ? 3 : 5), texts = ticks.map((tick) => (this.format.bytes ? bytes(tick) : String(tick)));
    const endNames = names && width >= 460 ? lines.map((line) => wrapped(line.name, 26)) : [];
    const fits = endNames.length && endNames.flat().length * 15 < height - 44;
    const right = fits ? Math.min(210, 20 + 7.2 * Math.max(...endNames.flat().map((text) => text.length))) : this.options.across ? 24 : 12;
    const left = 12 + 6.6 * Math.max(...texts.map((text) => text.length), 2), top = 10, bottom = this.bottom();
    Object.assign(this, { left, right, floor: height - bottom });
    const bounds = [ticks[0], ticks[ticks.length - 1]];
    this.y = (value) => top + (1 - (value - bounds[0]) / (bounds[1] - bounds[0])) * (height - top - bottom);
    const svg = (this.svg = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img",
      "aria-label": `${label}. ${this.describe(lines)} Arrow keys move along it.` }));
    ticks.forEach((tick, i) => svg.append(
      draw("line", { class: "grid", x1: left, x2: width - right, y1: this.y(tick), y2: this.y(tick) }),
      draw("text", { x: left - 8, y: this.y(tick) + 4, "text-anchor": "end" }, texts[i])));
    svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: this.floor, y2: this.floor }));
    this.marks(svg, lines);
    if (fits) this.nameEnds(svg, lines, endNames);
    this.cursor = draw("g", { "aria-hidden": "true" });
    svg.append(this.cursor);
    this.listen(svg);
    this.host.replaceChildren(svg);
  }

  bottom() { return 34; }

  /* A numeric horizontal axis from `low` to `high`; sets `x`. */
  across(svg, low, high, title, format) {
    const span = this.width - this.left - this.right;
    this.x = (value) => this.left + ((value - low) / Math.max(1e-12, high - low)) * span;
    for (const tick of niceTicks(low, high, Math.min(8, span / 60)).filter((value) => value >= low && value <= high)) {
      if (format || tick % 1 === 0) {
        svg.append(draw("text", { x: this.x(tick), y: this.floor + 17, "text-anchor": "middle" }, format ? shown(tick, format) : tick));
      }
    }
    svg.append(draw("text", { x: this.width - this.right, y: this.floor + 31, "text-anchor": "end" }, title));
  }

  nameEnds(svg, lines, names) {
    const places = lines.map((line, i) => ({ line, text: names[i], y: this.y(line.y[line.y.length - 1]) })).sort((a, b) => a.y - b.y);
    const tall = (place) => 15 * place.text.length;
    places.forEach((place, i) => { if (i) place.y = Math.max(place.y, places[i - 1].y + tall(places[i - 1])); });
    for (let i = places.length - 1, limit = this.floor; i >= 0; i--) {
      limit = places[i].y = Math.min(places[i].y, limit - tall(places[i]) + 15);
      limit -= 15;
    }
    for (const place of places) {
      const text = inLines(place.text, { class: "name", x: this.width - this.right + 10, y: place.y + 4 });
      text.style.fill = place.line.colour;
      svg.append(text);
    }
  }

  listen(svg) {
    const leave = () => { this.point(null); hideTip(); this.tell(null); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * this.width;
      const y = ((event.clientY - box.top) / box.height) * this.options.height;
      const far = (stop) => Math.abs(stop.x - x) + (stop.y === undefined ? 0 : Math.abs(stop.y - y));
      if (this.stops.length) this.choose(this.stops.reduce((best, stop, i) => (far(stop) < far(this.stops[best]) ? i : best), 0));
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const last = this.stops.length - 1, now = this.stop === null ? last : this.stop;
      const next = { ArrowLeft: now - 1, ArrowRight: this.stop === null ? last : now + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") leave();
      if (next === undefined || last < 0) return;
      event.preventDefault();
      this.choose(Math.max(0, Math.min(last, next)));
    });
  }

  choose(index) {
    const stop = this.stops[index], box = this.svg.getBoundingClientRect();
    this.point(index);
    this.tell(stop.title);
    showTip([make("b", {}, stop.title), make("table", {}, stop.rows.map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell)))))],
      box.left + (stop.x / this.width) * box.width, box.top + this.floor / 2);
  }

  tell(title) {
    for (const chart of this.options.bus || []) {
      if (chart !== this) chart.point(title === null ? null : chart.stops.findIndex((stop) => stop.title === title));
    }
  }

  /* Puts the cursor on a stop; null takes it away. */
  point(index) {
    this.stop = index;
    this.cursor.replaceChildren();
    if (index === null || index < 0) return;
    const stop = this.stops[index];
    this.cursor.append(draw("line", { class: "cursor", x1: stop.x, x2: stop.x, y1: 10, y2: this.floor }));
    for (const [y, colour] of stop.spots || []) this.cursor.append(mark("circle", 8, colour, at(stop.x, y)));
  }

  error(svg, x, y, sd) {
    if (sd) svg.append(draw("path", { class: "error", d: `M${x},${this.y(y - sd)}V${this.y(y + sd)}M${x - 4},${this.y(y - sd)}h8M${x - 4},${this.y(y + sd)}h8` }));
  }
}

/* Lines over rounds with bands; a line is {name, colour, shape, x, y, sd}. */
class Lines extends Chart {
  describe(lines) {
    return `At the end: ${lines.map((line) => `${line.name} ${shown(line.y[line.y.length - 1], this.format)}`).join("; ")}.`;
  }

  marks(svg, lines) {
    const rounds = [...new Set(this.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const first = rounds[0] || 0, last = rounds[rounds.length - 1] || 1;
    this.across(svg, first, Math.max(last, first + 1), "round");
    const { x, y } = this;
    for (const line of lines) {
      if (line.sd && line.sd.some(Boolean)) {
        const edge = (sign) => line.x.map((round, i) => `${x(round)},${y(line.y[i] + sign * (line.sd[i] || 0))}`);
        svg.append(draw("polygon", { class: "band", fill: line.colour, points: [...edge(1), ...edge(-1).reverse()].join(" ") }));
      }
      const path = line.x.map((round, i) => `${i ? "L" : "M"}${x(round).toFixed(1)},${y(line.y[i]).toFixed(1)}`).join("");
      svg.append(draw("path", { class: "line", d: path, stroke: line.colour, "stroke-width": line.wide ? 3 : null }));
      for (let i = line.x.length - 1; i >= 0; i -= Math.max(1, Math.round(line.x.length / 5))) {
        svg.append(mark(line.shape, 7.5, line.colour, at(x(line.x[i]), y(line.y[i]))));
      }
    }
    this.stops = rounds.map((round) => {
      const here = lines.map((line) => [line, line.x.indexOf(round)]).filter((pair) => pair[1] >= 0).sort((a, b) => b[0].y[b[1]] - a[0].y[a[1]]);
      return { x: x(round), title: `round ${round}`, spots: here.map(([line, i]) => [y(line.y[i]), line.colour]),
        rows: here.map(([line, i]) => [line.name, withSpread(line.y[i], line.sd && line.sd[i], this.format)]) };
    });
  }
}

/* Bars with deviation: a group per name in `options.groups`; a line's y and sd are in their order, null where missing. */
class Bars extends Chart {
  bottom() { return 22 + 14 * Math.max(...this.options.groups.map((name) => wrapped(name, 14).length)); }

  describe(lines) {
    return lines.map((line) => `${line.name}: ${this.options.groups.map((name, i) => `${name} ${shown(line.y[i], this.format)}`).join(", ")}.`).join(" ");
  }

  marks(svg, lines) {
    const { groups } = this.options, step = (this.width - this.left - this.right) / groups.length, thick = Math.min(34, (0.78 * step) / Math.max(1, lines.length));
    this.stops = groups.map((name, place) => {
      const middle = this.left + (place + 0.5) * step, rows = [];
      svg.append(inLines(wrapped(name, Math.max(8, step / 7)), { x: middle, y: this.floor + 17, "text-anchor": "middle" }));
      lines.forEach((line, i) => {
        const value = line.y[place], sd = line.sd && line.sd[place], x = middle + (i - lines.length / 2) * thick;
        if (value === null) return;
        svg.append(draw("rect", { class: "column", x: x + 1, y: this.y(value), width: Math.max(1, thick - 2), height: Math.max(0, this.floor - this.y(value)), fill: line.colour }));
        this.error(svg, x + thick / 2, value, sd);
        rows.push([line.name, withSpread(value, sd, this.format)]);
      });
      return { x: middle, title: name, rows };
    });
  }
}

/* One point per line, {name, colour, shape, x: [value], y: [value], sd: [value]}; `options.across` is {title, format}. */
class Points extends Chart {
  describe(lines) {
    return lines.map((line) => `${line.name}: ${shown(line.y[0], this.format)} at ${shown(line.x[0], this.options.across.format)}`).join("; ") + ".";
  }

  marks(svg, lines) {
    const { title, format } = this.options.across, all = niceTicks(0, Math.max(1e-9, ...this.lines.map((line) => line.x[0])), 5);
    this.across(svg, 0, all[all.length - 1], title, format);
    this.stops = lines.map((line) => {
      const x = this.x(line.x[0]), y = this.y(line.y[0]);
      this.error(svg, x, line.y[0], line.sd[0]);
      svg.append(mark(line.shape, 11, line.colour, at(x, y)));
      return { x, y, title: line.name, rows: [["accuracy", withSpread(line.y[0], line.sd[0], this.format)], [title, shown(line.x[0], format)]] };
    }).sort((a, b) => a.x - b.x);
  }
}
