/* Line charts: several lines with bands, a cursor for pointer and keyboard, names at the lines' ends. */

class LineChart {
  /* series: {name, colour, shape, x, y, sd, wide}; options: label, unit, digits, low, high, height, names, format, bus. */
  constructor(host, series, options) {
    this.host = host;
    this.series = series;
    this.options = { digits: 1, height: 210, unit: "", ...options };
    this.off = new Set();
    this.rounds = [...new Set(series.flatMap((line) => line.x))].sort((a, b) => a - b);
    this.at = null;
    new ResizeObserver(() => {
      if (host.clientWidth && host.clientWidth !== this.width) this.render();
    }).observe(host);
    this.render();
  }

  format(value) {
    if (value === null || value === undefined) return "-";
    return this.options.format ? this.options.format(value) : value.toFixed(this.options.digits) + this.options.unit;
  }

  range() {
    let { low, high } = this.options;
    const seen = this.series.flatMap((line) => line.y.flatMap((value, i) => {
      const reach = (line.sd && line.sd[i]) || 0;
      return [value - reach, value + reach];
    })).filter(Number.isFinite);
    if (low === undefined) low = seen.length ? Math.min(...seen) : 0;
    if (high === undefined) high = seen.length ? Math.max(...seen) : 1;
    if (high - low < 1e-9) high = low + Math.max(1e-3, Math.abs(low) * 0.1);
    return [low, high];
  }

  render() {
    const width = (this.width = this.host.clientWidth || 640), height = this.options.height;
    const shown = this.series.filter((line) => !this.off.has(line.name) && line.x.length);
    const names = this.options.names && width >= 460 && shown.length * 15 < height - 44;
    const longest = names ? Math.max(0, ...shown.map((line) => line.name.length)) : 0;
    const [least, most] = this.range(), count = height < 170 ? 3 : 5, step = niceStep(least, most, count);
    const low = Math.floor(least / step + 1e-9) * step, high = Math.ceil(most / step - 1e-9) * step;
    const ticks = niceTicks(low, high, Math.round((high - low) / step));
    const text = ticks.map((tick) => (this.options.format ? this.options.format(tick) : String(tick)));
    const left = 12 + 6.6 * Math.max(...text.map((label) => label.length), 2);
    const right = names ? Math.min(190, 20 + 7.2 * longest) : 12, top = 10, bottom = 34;
    const first = this.rounds[0] || 0, last = this.rounds[this.rounds.length - 1] || 1;
    const x = (this.x = (value) => left + ((value - first) / Math.max(1, last - first)) * (width - left - right));
    const y = (this.y = (value) => top + (1 - (value - low) / (high - low)) * (height - top - bottom));
    const svg = draw("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img",
      "aria-label": this.description(shown) });
    ticks.forEach((tick, i) => svg.append(
      draw("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      draw("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, text[i])));
    svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    for (const tick of niceTicks(first, last, Math.min(8, (width - left - right) / 60))) {
      if (tick % 1 === 0) svg.append(draw("text", { x: x(tick), y: height - bottom + 17, "text-anchor": "middle" }, tick));
    }
    svg.append(draw("text", { x: width - right, y: height - 3, "text-anchor": "end" }, "round"));
    for (const line of shown) this.drawLine(svg, line);
    if (names) this.drawNames(svg, shown, width - right + 10, height - bottom);
    this.cursor = draw("g", { "aria-hidden": "true" });
    svg.append(this.cursor);
    this.listen(svg);
    this.host.replaceChildren(svg);
    this.svg = svg;
  }

  drawLine(svg, line) {
    const { x, y } = this;
    if (line.sd && line.sd.some((value) => value)) {
      const up = line.x.map((at, i) => `${x(at)},${y(line.y[i] + (line.sd[i] || 0))}`);
      const down = line.x.map((at, i) => `${x(at)},${y(line.y[i] - (line.sd[i] || 0))}`).reverse();
      svg.append(draw("polygon", { class: "band", fill: line.colour, points: [...up, ...down].join(" ") }));
    }
    const path = line.x.map((at, i) => `${i ? "L" : "M"}${x(at).toFixed(1)},${y(line.y[i]).toFixed(1)}`).join("");
    svg.append(draw("path", { class: "line", d: path, stroke: line.colour, "stroke-width": line.wide ? 3 : null }));
    const step = Math.max(1, Math.round(line.x.length / 5));
    for (let i = line.x.length - 1; i >= 0; i -= step) {
      svg.append(mark(line.shape, 7.5, line.colour, { transform: `translate(${x(line.x[i])},${y(line.y[i])})` }));
    }
  }

  drawNames(svg, shown, left, bottom) {
    const places = shown.map((line) => ({ line, y: this.y(line.y[line.y.length - 1]) })).sort((a, b) => a.y - b.y);
    places.forEach((place, i) => { if (i) place.y = Math.max(place.y, places[i - 1].y + 15); });
    for (let i = places.length - 1, limit = bottom; i >= 0; i--, limit -= 15) places[i].y = Math.min(places[i].y, limit);
    for (const place of places) {
      const text = draw("text", { class: "name", x: left, y: place.y + 4 }, place.line.name);
      text.style.fill = place.line.colour;
      svg.append(text);
    }
  }

  description(shown) {
    const ends = shown.map((line) => `${line.name} ${this.format(line.y[line.y.length - 1])}`);
    const span = this.rounds.length ? `rounds ${this.rounds[0]} to ${this.rounds[this.rounds.length - 1]}` : "no rounds";
    return `Line chart, ${this.options.label}, ${span}. At the end: ${ends.join("; ")}. Arrow keys move from round to round.`;
  }

  listen(svg) {
    const leave = () => { this.point(null); hideTip(); if (this.options.bus) this.options.bus.move(null, this); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      this.choose(this.nearest(((event.clientX - box.left) / box.width) * this.width));
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const last = this.rounds.length - 1, at = this.at === null ? last : this.at;
      const next = { ArrowLeft: at - 1, ArrowRight: this.at === null ? last : at + 1, Home: 0, End: last }[event.key];
      if (event.key === "Escape") { leave(); return; }
      if (next === undefined || last < 0) return;
      event.preventDefault();
      this.choose(Math.max(0, Math.min(last, next)));
    });
  }

  nearest(position) {
    let best = 0;
    this.rounds.forEach((round, i) => {
      if (Math.abs(this.x(round) - position) < Math.abs(this.x(this.rounds[best]) - position)) best = i;
    });
    return best;
  }

  choose(index) {
    this.point(index);
    if (this.options.bus) this.options.bus.move(this.rounds[index], this);
    const round = this.rounds[index], rows = [];
    for (const line of this.series) {
      const i = line.x.indexOf(round);
      if (i < 0 || this.off.has(line.name)) continue;
      const spread = line.sd && line.sd[i] ? ` ± ${this.options.format ? this.options.format(line.sd[i]) : line.sd[i].toFixed(this.options.digits)}` : "";
      rows.push([line.y[i], make("tr", {}, make("td", {}, line.name), make("td", {}, this.format(line.y[i]) + spread))]);
    }
    rows.sort((a, b) => b[0] - a[0]);
    const box = this.svg.getBoundingClientRect();
    const top = box.top + (this.options.height - 34) / 2;
    showTip([make("b", {}, `round ${round}`), make("table", {}, rows.map((row) => row[1]))],
      box.left + (this.x(round) / this.width) * box.width, top);
  }

  /* Puts the cursor on the round of this index; null takes it away. */
  point(index) {
    this.at = index;
    this.cursor.replaceChildren();
    if (index === null || index < 0) return;
    const round = this.rounds[index], at = this.x(round);
    this.cursor.append(draw("line", { class: "cursor", x1: at, x2: at, y1: 10, y2: this.options.height - 34 }));
    for (const line of this.series) {
      const i = line.x.indexOf(round);
      if (i >= 0 && !this.off.has(line.name)) {
        this.cursor.append(mark("circle", 8, line.colour, { transform: `translate(${at},${this.y(line.y[i])})` }));
      }
    }
  }
}

/* Charts that move their cursors and hide their lines together. */
class Bus {
  constructor() { this.charts = []; }

  move(round, sender) {
    for (const chart of this.charts) {
      if (chart !== sender) chart.point(round === null ? null : chart.rounds.indexOf(round));
    }
  }

  toggle(name, on) {
    for (const chart of this.charts) {
      if (on) chart.off.delete(name); else chart.off.add(name);
      chart.render();
    }
  }
}

/* Buttons that show and hide lines; keys are {name, colour, shape}. */
function legend(keys, bus) {
  return make("div", { class: "legend", role: "group", "aria-label": "Lines" }, keys.map((key) => {
    const button = make("button", { type: "button", class: "toggle", "aria-pressed": "true" },
      draw("svg", { "aria-hidden": "true", viewBox: "0 0 26 12" },
        draw("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: key.colour, "stroke-width": 2 }),
        mark(key.shape, 8, key.colour, { transform: "translate(13,6)" })), key.name);
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      bus.toggle(key.name, on);
    });
    return button;
  }));
}

/* The numbers of charts as a table that is made when it is opened. */
function numbersTable(title, charts) {
  const box = make("details", {}, make("summary", {}, "Numbers"));
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    for (const { name, chart } of charts) {
      const head = make("tr", {}, make("th", { scope: "col" }, "round"),
        chart.series.map((line) => make("th", { scope: "col", class: "number" }, line.name)));
      const rows = chart.rounds.map((round) => make("tr", {}, make("th", { scope: "row" }, String(round)),
        chart.series.map((line) => {
          const i = line.x.indexOf(round);
          const spread = i >= 0 && line.sd && line.sd[i] ? ` ± ${line.sd[i].toFixed(2)}` : "";
          return make("td", { class: "number" }, i < 0 ? "-" : chart.format(line.y[i]) + spread);
        })));
      box.append(make("div", { class: "scroll" }, make("table", {}, make("caption", {}, name ? `${title}: ${name}` : title),
        make("thead", {}, head), make("tbody", {}, rows))));
    }
  });
  return box;
}
