/* Plots with their controls, drawn from what the page's data say: lines, bars, points, confusion matrices. */

let serial = 0;

/* A row of radio buttons; `change` is called with the index of the chosen one. */
function choice(title, options, change) {
  const name = `choice-${serial++}`;
  return make("fieldset", { class: "choice" }, make("legend", {}, title), options.map((text, index) => make("label", {},
    make("input", { type: "radio", name, value: text, checked: index === 0, onchange: () => change(index) }), make("span", {}, text))));
}

function selector(title, options, change) {
  const select = make("select", { onchange: () => change(Number(select.value)) },
    options.map((text, index) => make("option", { value: index }, text)));
  return make("label", {}, title, select);
}

/* Calls `change(index)` as a slider over rounds moves; returns the controls with `set`. */
function slider(id, title, rounds, change) {
  const labels = rounds.map((round) => `round ${round}`), last = labels.length - 1;
  const output = make("output", {}, labels[last]);
  const input = make("input", { id, type: "range", min: 0, max: last, step: 1, value: last, "aria-label": title, "aria-valuetext": labels[last] });
  const set = (index) => {
    input.value = index;
    input.setAttribute("aria-valuetext", labels[index]);
    output.textContent = labels[index];
    change(index);
  };
  input.addEventListener("input", () => set(Number(input.value)));
  return { parts: [input, output], set };
}

const controls = (...parts) => make("div", { class: "controls" }, parts);
const note = (text) => make("p", { class: "note" }, text);

/* Buttons that show and hide lines in all charts of a bus. */
function legend(lines, bus) {
  return make("div", { class: "legend", role: "group", "aria-label": "Lines" }, lines.map((line) => {
    const button = make("button", { type: "button", class: "toggle", "aria-pressed": "true" },
      draw("svg", { "aria-hidden": "true", viewBox: "0 0 26 12" },
        draw("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: line.colour, "stroke-width": 2 }), mark(line.shape, 8, line.colour, at(13, 6))), line.name);
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      for (const chart of bus) { if (on) chart.off.delete(line.name); else chart.off.add(line.name); chart.render(); }
    });
    return button;
  }));
}

/* The numbers of charts as tables that are made when they are opened. */
function numbersTable(title, charts) {
  const box = make("details", {}, make("summary", {}, "Numbers"));
  box.addEventListener("toggle", () => {
    if (!box.open || box.children.length > 1) return;
    for (const chart of charts) {
      const columns = [...new Set(chart.stops.flatMap((stop) => stop.rows.map((row) => row[0])))];
      const rows = chart.stops.map((stop) => make("tr", {}, make("th", { scope: "row" }, stop.title),
        columns.map((name) => make("td", { class: "number" }, (stop.rows.find((row) => row[0] === name) || [name, "-"])[1]))));
      const head = make("tr", {}, make("th", { scope: "col" }), columns.map((name) => make("th", { scope: "col", class: "number" }, name)));
      box.append(make("div", { class: "scroll" }, make("table", {}, make("caption", {}, chart.options.label || title),
        make("thead", {}, head), make("tbody", {}, rows))));
    }
  });
  return box;
}

/* Rows of numbers as lines, named and coloured by one of their fields. */
const linesBy = (rows, field, keys) => rows.map((row) => {
  const index = keys[field].indexOf(row[field]);
  return index < 0 ? { ...row, name: row[field], colour: "var(--ink)", shape: "circle", wide: true }
    : { ...row, name: row[field], colour: colourOf(field, index), shape: shapeOf(index) };
});

const KINDS = { lines: Lines, bars: Bars, points: Points };

/* One chart over the whole width (`spec.wide`: the field of its lines), small ones below (`spec.panels`: fields to
   choose among), of the rows of one measure (`spec.measures`) and, over the whole width, of one `spec.of`. */
function chartPlot(host, spec) {
  const { rows, keys, title, panels = [], measures = [] } = spec, Kind = KINDS[spec.kind];
  let measure = measures[0], of = spec.of && spec.of[0], facet = 0;
  const wide = make("div", {}), small = make("div", {}), caption = make("figcaption", {});
  const options = { groups: spec.groups, across: spec.across };

  const redraw = () => {
    const mine = rows.filter((row) => !measure || row.measure === measure);
    const label = [title, measure, of].filter(Boolean).join(", ");
    if (spec.wide) {
      const lines = linesBy(mine.filter((row) => !of || row[spec.choose] === of), spec.wide, keys), bus = [], place = make("div", {});
      wide.replaceChildren(lines.length > 1 ? legend(lines, bus) : "", place);
      const chart = new Kind(place, lines, { ...options, label, format: lines[0].format, height: spec.height || 340, names: spec.kind === "lines", bus });
      wide.append(numbersTable(label, [chart]));
      caption.textContent = label + (mine.some((row) => (row.sd || []).some(Boolean)) ? "; mean and standard deviation over seeds." : ".");
    }
    if (!panels.length) return;
    const by = panels[facet], field = panels.length > 1 ? panels[1 - facet] : spec.colour;
    const lines = linesBy(mine.filter((row) => keys[by].includes(row[by]) && keys[field].includes(row[field])), field, keys);
    const bus = [], box = make("div", { class: "panels" });
    const unique = keys[field].map((name) => lines.find((line) => line.name === name)).filter(Boolean);
    small.replaceChildren(unique.length > 1 ? legend(unique, bus) : "", box);
    const charts = keys[by].map((name) => [name, lines.filter((line) => line[by] === name)]).filter((pair) => pair[1].length).map(([name, own]) => {
      const place = make("div", {}), { format } = own[0];
      box.append(make("div", { class: "panel" }, make("p", {}, name), place));
      return new Kind(place, own, { ...options, label: `${label}, ${name}`, format, height: 165, bus, range: format.shared && rangeOf(lines, format) });
    });
    small.append(numbersTable(label, charts));
  };

  if (!rows.length) { host.append(note(spec.none || "Nothing was recorded.")); return; }
  const top = [measures.length > 1 ? choice("Measure", measures, (index) => { measure = measures[index]; redraw(); }) : "",
    spec.of ? selector("of", spec.of, (index) => { of = spec.of[index]; redraw(); }) : ""];
  if (spec.wide) host.append(make("figure", {}, top.some(Boolean) ? controls(top) : "", caption, wide));
  if (panels.length) {
    host.append(make("figure", {}, panels.length > 1 ? controls(choice("Panels", panels.map((name) => `by ${name}`),
      (index) => { facet = index; redraw(); })) : "", small));
  }
  redraw();
}

/* A figure of one run at a time, with a choice among runs where there are several. */
function runPlot(host, spec) {
  const body = make("div", {}), show = (index) => { body.replaceChildren(); spec.draw(body, spec.runs[index]); };
  if (!spec.runs.length) { host.append(note(spec.none)); return; }
  if (spec.runs.length > 1) host.append(controls(selector("Run", spec.runs.map((run) => run.name), show)));
  host.append(note(spec.note), body);
  show(0);
}

/* ---- confusion matrices: one per domain, by run and round, as shares of the true class ---- */

const MAX_NAMED = 24;

function confusion(body, run) {
  const { rounds, domains } = run, grid = make("div", { class: "matrices" });
  const update = (index) => grid.replaceChildren(...Object.entries(domains).filter(([, frames]) => frames[index])
    .map(([name, frames]) => matrix(name, frames[index], run.classes)));
  if (rounds.length > 1) body.append(controls(slider("confusion-round", "Round of the confusion matrices", rounds, update).parts));
  body.append(grid);
  update(rounds.length - 1);
}

function matrix(name, cells, classes) {
  const count = classes.length, cell = 22, named = count <= MAX_NAMED, cut = (text) => (text.length > 13 ? `${text.slice(0, 12)}…` : text);
  const longest = named ? Math.max(...classes.map((text) => text.length)) : 0;
  const left = named ? Math.min(84, 10 + 5.6 * longest) : 4, tall = named && longest > 2, top = tall ? left : named ? 16 : 4;
  const sums = classes.map((_, row) => cells.slice(row * count, (row + 1) * count).reduce((a, b) => a + b, 0));
  const right = classes.reduce((total, _, row) => total + cells[row * count + row], 0), all = sums.reduce((a, b) => a + b, 0);
  const wrong = [], svg = draw("svg", { viewBox: `0 0 ${left + cell * count} ${top + cell * count}`, role: "img" });
  for (let row = 0; row < count; row++) {
    if (named) {
      const turned = `translate(${left + cell * row + cell / 2 + (tall ? 4 : 0)},${top - 5})${tall ? " rotate(-90)" : ""}`;
      svg.append(draw("text", { x: left - 5, y: top + cell * row + 15, "text-anchor": "end" }, cut(classes[row])),
        draw("text", { transform: turned, "text-anchor": tall ? "start" : "middle" }, cut(classes[row])));
    }
    for (let column = 0; column < count; column++) {
      const value = cells[row * count + column], share = sums[row] ? value / sums[row] : 0;
      if (!value && count > 40) continue;
      svg.append(draw("rect", { x: left + cell * column, y: top + cell * row, width: cell, height: cell, fill: `rgba(var(--heat), ${(0.04 + 0.96 * share).toFixed(3)})` },
        draw("title", {}, `${classes[row]} called ${classes[column]}: ${value} of ${sums[row]} (${(100 * share).toFixed(0)} %)`)));
      if (value && row !== column) wrong.push([value, `${classes[row]} called ${classes[column]}, ${value} times`]);
    }
  }
  const worst = wrong.sort((a, b) => b[0] - a[0]).slice(0, 3).map((entry) => entry[1]).join("; "), accuracy = all ? (100 * right) / all : 0;
  svg.setAttribute("aria-label", `Confusion matrix of ${name}: ${accuracy.toFixed(1)} % right. Most often wrong: ${worst || "none"}.`);
  return make("div", { class: "matrix" }, make("p", {}, name, " ", make("small", {}, `${accuracy.toFixed(1)} % of ${all}`)), svg,
    note(worst ? `Most often wrong: ${worst}.` : "Nothing wrong."));
}

const DRAWN = { confusion: (host, spec) => runPlot(host, { ...spec, draw: confusion }) };
const PLOTS = JSON.parse(document.getElementById("plots").textContent);
for (const host of document.querySelectorAll("[data-plot]")) {
  const spec = PLOTS[Number(host.dataset.plot)];
  (DRAWN[spec.kind] || chartPlot)(host, spec);
}
