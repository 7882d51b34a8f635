/* Figures over rounds: accuracy and test loss by domain and by method, loss terms, cost. */

const asLine = (name, band, more) => ({ name, x: band.round, y: band.mean, sd: band.sd, ...more });

function groupKeys(board) {
  return board.groups.map((group, i) => ({ name: group.name, colour: groupColour(i), shape: shapeOf(i) }));
}

function domainKeys(board) {
  return board.domains.map((name, i) => ({ name, colour: domainColour(i), shape: shapeOf(i) }));
}

/* Panels with one chart each, on one scale, with one legend; panels are [title, series]. */
function panels(host, title, keys, sheets, options) {
  const bus = new Bus(), charts = [], box = make("div", { class: "panels" });
  host.replaceChildren(keys.length > 1 ? legend(keys, bus) : "", box);
  for (const [name, series] of sheets) {
    const place = make("div", {});
    box.append(make("div", { class: "panel" }, make("p", {}, name), place));
    const chart = new LineChart(place, series, { height: 165, ...options, label: `${title}, ${name}`, bus });
    bus.charts.push(chart);
    charts.push({ name, chart });
  }
  host.append(numbersTable(title, charts));
}

function sharedRange(sheets, floor) {
  const all = sheets.flatMap(([, series]) => series.flatMap((line) => line.y.flatMap((value, i) => {
    const reach = (line.sd && line.sd[i]) || 0;
    return [value - reach, value + reach];
  }))).filter(Number.isFinite);
  if (!all.length) return {};
  return { low: floor === undefined ? Math.min(...all) : Math.max(floor, Math.floor(Math.min(...all) / 10) * 10),
    high: Math.max(...all) };
}

const MEASURES = {
  accuracy: { title: "Test accuracy in %", digits: 1, unit: "", floor: 0 },
  loss: { title: "Test loss", digits: 3, unit: "" },
};

function curvesFigure(host, board) {
  const many = board.groups.length > 1;
  let measure = "accuracy", by = many ? "domain" : "method", quantity = 0;
  const wide = make("div", {}), small = make("div", {});
  const quantities = [["average", "average over domains"], ["worst", "worst domain"],
    ...board.domains.map((name) => [`domain:${name}`, name])];
  const caption = make("figcaption", {});

  const redraw = () => {
    const { title, digits, floor } = MEASURES[measure];
    const [key, name] = quantities[quantity];
    const pick = (group, which) => group[measure][which] || { round: [], mean: [], sd: [], runs: [] };
    const runs = Math.max(...board.groups.flatMap((group) => group.runs.length));
    const lines = many
      ? board.groups.map((group, i) => asLine(group.name, pick(group, key), groupKeys(board)[i]))
      : [...board.domains.map((domain, i) => asLine(domain, pick(board.groups[0], `domain:${domain}`), domainKeys(board)[i])),
        asLine("average", pick(board.groups[0], "average"), { colour: "var(--ink)", shape: "circle", wide: true })];
    const bus = new Bus(), place = make("div", {});
    wide.replaceChildren(legend(lines, bus), place);
    const range = measure === "accuracy" ? sharedRange([["", lines]], 0) : {};
    const label = many ? `${title}, ${name}` : `${title} by domain`;
    const chart = new LineChart(place, lines, { label, digits, height: 340, names: true, bus, ...range });
    bus.charts.push(chart);
    wide.append(numbersTable(label, [{ name: "", chart }]));
    caption.textContent = `${label}${runs > 1 ? "; mean and standard deviation over seeds" : ""}.`;
    if (!many) return;
    const sheets = by === "domain"
      ? board.domains.map((domain) => [domain, board.groups.map((group, i) =>
        asLine(group.name, pick(group, `domain:${domain}`), groupKeys(board)[i]))])
      : board.groups.map((group) => [group.name, board.domains.map((domain, i) =>
        asLine(domain, pick(group, `domain:${domain}`), domainKeys(board)[i]))]);
    panels(small, title, by === "domain" ? groupKeys(board) : domainKeys(board), sheets,
      { digits, ...sharedRange(sheets, floor) });
  };

  const controls = make("div", { class: "controls" },
    choice("Measure", `measure-${host.dataset.board}`, [["accuracy", "accuracy"], ["loss", "loss"]], (value) => { measure = value; redraw(); }),
    many ? selector("of", quantities.map((entry) => entry[1]), (index) => { quantity = index; redraw(); }) : null);
  host.append(make("figure", {}, controls, caption, wide));
  if (many) {
    host.append(make("figure", {}, make("div", { class: "controls" },
      choice("Panels", `panels-${host.dataset.board}`, [["domain", "by domain"], ["method", "by method"]],
        (value) => { by = value; redraw(); })), small));
  }
  redraw();
}

function lossesFigure(host, board) {
  const terms = [...new Set(board.groups.flatMap((group) => Object.keys(group.terms)))];
  if (!terms.length) { host.append(make("p", { class: "note" }, "No losses were recorded.")); return; }
  const sheets = terms.map((term) => [term.replaceAll("_", " "), board.groups.map((group, i) => ({ group, i }))
    .filter(({ group }) => group.terms[term])
    .map(({ group, i }) => asLine(group.name, group.terms[term], groupKeys(board)[i]))]);
  const place = make("div", {});
  host.append(place);
  panels(place, "Training loss", groupKeys(board), sheets, { digits: 4 });
}

function costsFigure(host, board) {
  const line = (pick) => board.groups.map((group, i) => asLine(group.name, pick(group), groupKeys(board)[i]));
  const bus = new Bus(), box = make("div", { class: "panels" }), charts = [];
  const keys = groupKeys(board);
  host.append(keys.length > 1 ? legend(keys, bus) : "", box);
  const sheets = [["bytes down a round", line((group) => group.bytes.down), bytes],
    ["bytes up a round", line((group) => group.bytes.up), bytes],
    ["seconds a round", line((group) => group.seconds), null]];
  for (const [name, series, format] of sheets) {
    const place = make("div", {});
    box.append(make("div", { class: "panel" }, make("p", {}, name), place));
    const chart = new LineChart(place, series, { height: 165, label: name, low: 0, digits: 2, format, bus });
    bus.charts.push(chart);
    charts.push({ name, chart });
  }
  host.append(numbersTable("Cost", charts));
}
