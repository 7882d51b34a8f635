/* The page itself: theme, score rule, copy buttons, contents, and the figures in their places. */

const root = document.documentElement, themeButton = document.getElementById("theme");

function setTheme(theme) {
  root.dataset.theme = theme;
  themeButton.setAttribute("aria-pressed", String(theme === "dark"));
}

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
setTheme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
themeButton.addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));

for (const input of document.querySelectorAll("#rules input")) {
  input.addEventListener("change", () => {
    for (const block of document.querySelectorAll("[data-rule]")) block.hidden = block.dataset.rule !== input.value;
  });
}

const heat = document.getElementById("heat");
if (heat) {
  heat.addEventListener("click", () => {
    const on = heat.getAttribute("aria-pressed") !== "true";
    heat.setAttribute("aria-pressed", String(on));
    document.getElementById("looks").classList.toggle("plain", !on);
  });
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    const label = button.firstChild.textContent;
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      button.firstChild.textContent = "Copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(button.parentElement.querySelector("pre"));
      window.getSelection().removeAllRanges();
      window.getSelection().addRange(range);
      button.firstChild.textContent = "Selected";
    }
    setTimeout(() => { button.firstChild.textContent = label; }, 1500);
  });
}

const FIGURES = { curves: curvesFigure, losses: lossesFigure, costs: costsFigure, confusion: confusionFigure, prototypes: prototypesFigure };
for (const host of document.querySelectorAll("[data-figure]")) {
  FIGURES[host.dataset.figure](host, DATA.boards[Number(host.dataset.board || 0)]);
}

const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.getAttribute("href").slice(1), link]));
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    for (const link of links.values()) link.removeAttribute("aria-current");
    links.get(entry.target.id).setAttribute("aria-current", "true");
  }
}, { rootMargin: "-15% 0px -75% 0px" });
for (const section of document.querySelectorAll("main section")) watcher.observe(section);

document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
window.addEventListener("scroll", hideTip, { passive: true });
root.dataset.ready = "true";
