/* Confusion matrices: one per domain, by run and round, as shares of the true class. */

const MOST_NAMED = 24;

function confusionFigure(host) {
  const runs = DATA.runs.map((run, index) => ({ run, index })).filter(({ run }) => run.confusion);
  if (!runs.length) {
    host.append(make("p", { class: "note" }, "These runs kept no confusion matrices; runs of this version do."));
    return;
  }
  const body = make("div", {});
  const show = (index) => showConfusion(body, runs[index].run);
  if (runs.length > 1) {
    host.append(make("div", { class: "controls" }, selector("Run", runs.map(({ run }) => run.name), show)));
  }
  host.append(make("p", { class: "note" },
    "Rows are true classes, columns what the model said; the stronger the colour, the larger the share of the true class."), body);
  show(0);
}

function showConfusion(body, run) {
  const { rounds, domains } = run.confusion, grid = make("div", { class: "matrices" });
  const update = (at) => grid.replaceChildren(...Object.entries(domains).filter(([, frames]) => frames[at])
    .map(([name, frames]) => matrix(name, frames[at], run.classes)));
  body.replaceChildren();
  if (rounds.length > 1) {
    const move = slider("Round of the confusion matrices", rounds.map((round) => `round ${round}`), rounds.length - 1, update);
    move.input.id = "confusion-round";
    body.append(make("div", { class: "controls" }, move.parts));
  }
  body.append(grid);
  update(rounds.length - 1);
}

function matrix(name, cells, classes) {
  const count = classes.length, cell = 22, named = count <= MOST_NAMED;
  const longest = named ? Math.max(...classes.map((text) => text.length)) : 0;
  const left = named ? Math.min(84, 10 + 5.6 * longest) : 4, size = left + cell * count, tall = named && longest > 2;
  const top = tall ? left : named ? 16 : 4;
  const sums = classes.map((_, row) => cells.slice(row * count, (row + 1) * count).reduce((a, b) => a + b, 0));
  const right = classes.reduce((total, _, row) => total + cells[row * count + row], 0);
  const all = sums.reduce((a, b) => a + b, 0);
  const wrong = [];
  const svg = draw("svg", { viewBox: `0 0 ${size} ${top + cell * count}`, role: "img" });
  for (let row = 0; row < count; row++) {
    if (named) {
      svg.append(draw("text", { x: left - 5, y: top + cell * row + 15, "text-anchor": "end" }, classes[row].slice(0, 13)));
      const at = `translate(${left + cell * row + cell / 2 + (tall ? 4 : 0)},${top - 5})${tall ? " rotate(-90)" : ""}`;
      svg.append(draw("text", { transform: at, "text-anchor": tall ? "start" : "middle" }, classes[row].slice(0, 13)));
    }
    for (let column = 0; column < count; column++) {
      const value = cells[row * count + column];
      if (!value && count > 40) continue;
      const share = sums[row] ? value / sums[row] : 0;
      const box = draw("rect", { x: left + cell * column, y: top + cell * row, width: cell, height: cell,
        fill: `rgba(var(--heat), ${(0.04 + 0.96 * share).toFixed(3)})` },
      draw("title", {}, `${classes[row]} called ${classes[column]}: ${value} of ${sums[row]} (${(100 * share).toFixed(0)} %)`));
      svg.append(box);
      if (value && row !== column) wrong.push([value, `${classes[row]} called ${classes[column]}, ${value} times`]);
    }
  }
  wrong.sort((a, b) => b[0] - a[0]);
  const worst = wrong.slice(0, 3).map((entry) => entry[1]);
  const accuracy = all ? (100 * right) / all : 0;
  svg.setAttribute("aria-label", `Confusion matrix of ${name}: ${accuracy.toFixed(1)} % right. Most often wrong: ${worst.join("; ") || "none"}.`);
  return make("div", { class: "matrix" },
    make("p", {}, name, " ", make("small", {}, `${accuracy.toFixed(1)} % of ${all}`)), svg,
    make("p", { class: "note" }, worst.length ? `Most often wrong: ${worst.join("; ")}.` : "Nothing wrong."));
}
