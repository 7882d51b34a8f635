/* Prototypes: the map over rounds with its slider, and how many, how far apart and how far moved. */

function prototypesFigure(host) {
  const runs = DATA.runs.filter((run) => run.map);
  if (!runs.length) {
    host.append(make("p", { class: "note" }, "None of these methods exchanges prototypes, or the runs kept none."));
    return;
  }
  const body = make("div", {});
  const show = (index) => {
    body.replaceChildren();
    showMap(body, runs[index]);
    showNumbers(body, runs[index]);
  };
  if (runs.length > 1) {
    host.append(make("div", { class: "controls" }, selector("Run", runs.map((run) => run.name), show)));
  }
  host.append(make("p", { class: "note" }, "Each mark is one vector in feature space, at unit length: filled marks are what "
    + "clients sent (their shape is the domain), rings are the global set. All rounds are placed together, so positions compare."), body);
  show(0);
}

function showMap(body, run) {
  const data = run.map, places = Object.keys(data.places), pad = 26;
  const size = Math.max(340, Math.min(640, body.clientWidth || 640)); // marks and text keep their size on a phone
  if (!places.length) return;
  const domains = [...new Set([...run.domains, ...data.owners.map((owner) => owner.domain)])].filter(Boolean);
  let place = places[0], by = "class", at = data.rounds.length - 1, only = null, timer = null;
  const svg = draw("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", id: "map" });
  const marks = new Map(), keys = make("div", { class: "key-list" }), note = make("p", { class: "note" });
  const domainOf = (owner) => (owner < 0 ? "" : data.owners[owner].domain);
  const colour = (label, owner) => (by === "class" ? classColour(label, run.classes.length)
    : owner < 0 ? "var(--ink)" : domainColour(domains.indexOf(domainOf(owner))));

  const update = () => {
    const frame = data.frames[at], spots = data.places[place].frames[at];
    const used = new Set(), seen = new Map();
    if (spots) {
      frame.class.forEach((label, i) => {
        const owner = frame.owner[i], base = `${owner}/${label}`, turn = seen.get(base) || 0;
        seen.set(base, turn + 1);
        const key = `${base}/${turn}`;
        used.add(key);
        if (!marks.has(key)) marks.set(key, newMark(label, owner));
        const element = marks.get(key);
        const x = pad + spots.x[i] * (size - 2 * pad), y = size - pad - spots.y[i] * (size - 2 * pad);
        element.style.transform = `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px)`;
        element.classList.toggle("dim", only !== null && only !== (by === "class" ? String(label) : domainOf(owner)));
        const path = element.firstChild;
        if (owner < 0) path.setAttribute("stroke", colour(label, owner)); else path.setAttribute("fill", colour(label, owner));
      });
    }
    for (const [key, element] of marks) {
      if (!used.has(key)) { element.remove(); marks.delete(key); }
    }
    svg.setAttribute("aria-label", `Map of the prototypes of ${run.name} after round ${data.rounds[at]}: `
      + `${frame.owner.filter((owner) => owner >= 0).length} from clients, ${frame.owner.filter((owner) => owner < 0).length} global.`);
    note.textContent = spots ? `${place}: ${data.places[place].note}.` : `${place} does not place this round; move on.`;
  };

  const newMark = (label, owner) => {
    const name = owner < 0 ? `global prototype of ${run.classes[label]}` : `${run.classes[label]}, ${data.owners[owner].client}`;
    const shape = owner < 0 ? "circle" : shapeOf(Math.max(0, domains.indexOf(domainOf(owner))));
    const element = draw("g", { class: owner < 0 ? "spot global" : "spot" },
      draw("path", { d: shapePath(shape, owner < 0 ? 19 : 10), fill: owner < 0 ? "none" : null }), draw("title", {}, name));
    if (owner < 0) element.append(draw("text", { x: 12, y: -8 }, run.classes[label].slice(0, 12)));
    svg.append(element);
    return element;
  };

  const relist = () => {
    const entries = by === "class" ? run.classes.map((name, i) => [String(i), name, classColour(i, run.classes.length), "circle"])
      : domains.map((name, i) => [name, name, domainColour(i), shapeOf(i)]);
    const buttons = entries.slice(0, 40).map(([value, name, paint, shape]) => {
      const button = make("button", { type: "button", "aria-pressed": "false" },
        draw("svg", { viewBox: "-7 -7 14 14", "aria-hidden": "true" }, mark(shape, 11, paint)), name);
      button.addEventListener("click", () => {
        only = only === value ? null : value;
        for (const other of buttons) other.setAttribute("aria-pressed", String(only !== null && other === button));
        update();
      });
      return button;
    });
    const shapes = by === "class" ? domains.map((name, i) => make("span", { class: "shape" },
      draw("svg", { viewBox: "-7 -7 14 14", "aria-hidden": "true" }, mark(shapeOf(i), 11, "var(--soft)")), ` ${name} `)) : [];
    keys.replaceChildren(make("p", {}, by === "class" ? "Class (press one to single it out)" : "Domain (press one to single it out)"), ...buttons,
      shapes.length ? make("p", {}, "Domain: ", shapes) : "");
  };

  const move = slider("Round of the prototype map", data.rounds.map((round) => `round ${round}`), at, (index) => { at = index; update(); });
  move.input.id = "map-round";
  const play = make("button", { type: "button", "aria-pressed": "false" }, "Play");
  play.addEventListener("click", () => {
    if (timer) { clearInterval(timer); timer = null; } else {
      if (at === data.rounds.length - 1) move.set(0);
      timer = setInterval(() => {
        if (!document.contains(svg)) { clearInterval(timer); timer = null; return; }
        if (at < data.rounds.length - 1) { move.set(at + 1); return; }
        play.click();
      }, 600);
    }
    play.textContent = timer ? "Pause" : "Play";
    play.setAttribute("aria-pressed", String(Boolean(timer)));
  });
  body.append(make("div", { class: "controls" },
    choice("Colour", "map-colour", [["class", "class"], ["domain", "domain"]], (value) => {
      by = value; only = null; relist(); update();
    }),
    places.length > 1 ? choice("Placed by", "map-place", places.map((name) => [name, name]), (value) => { place = value; update(); }) : null),
  make("div", { class: "controls" }, data.rounds.length > 1 ? [play, move.parts] : `round ${data.rounds[0]}`),
  make("div", { class: "map" }, svg, make("div", {}, keys, note)));
  relist();
  update();
}

function showNumbers(body, run) {
  const { rounds, ...numbers } = run.prototypes;
  const line = (key, name, colour, shape) => {
    const kept = rounds.map((round, i) => [round, numbers[key][i]]).filter((pair) => pair[1] !== null);
    return { name, colour, shape, x: kept.map((pair) => pair[0]), y: kept.map((pair) => pair[1]) };
  };
  const sheets = [["global prototypes", [line("count", "prototypes", groupColour(0), "circle")], 0],
    ["drift of class means", [line("drift", "since the round before", groupColour(1), "square")], 4],
    ["distance between", [line("domains", "domains", groupColour(2), "triangle"),
      line("classes", "classes", groupColour(3), "diamond")], 3]];
  const box = make("div", { class: "panels" }), charts = [];
  body.append(make("p", { class: "note" }, "Distances are one minus the cosine: between domains within a class, and between "
    + "classes within a domain. Domains agree when the first falls and the second does not."), box);
  for (const [name, series, digits] of sheets.filter((sheet) => sheet[1].some((entry) => entry.x.length))) {
    const place = make("div", {}), bus = new Bus();
    const shown = series.filter((entry) => entry.x.length);
    box.append(make("div", { class: "panel" }, make("p", {}, name), shown.length > 1 ? legend(shown, bus) : null, place));
    const chart = new LineChart(place, shown, { height: 165, label: name, digits, low: 0, bus });
    bus.charts.push(chart);
    charts.push({ name, chart });
  }
  body.append(numbersTable("Prototypes", charts));
}
