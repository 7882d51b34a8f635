/* The page itself: theme, score rule, copy buttons, contents. */

const root = document.documentElement, themeButton = document.getElementById("theme");
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

function setTheme(dark) {
  root.dataset.theme = dark ? "dark" : "light";
  themeButton.lastChild.textContent = dark ? " Light" : " Dark"; // where the button leads
}

setTheme(prefersDark.matches);
prefersDark.addEventListener("change", (event) => setTheme(event.matches));
themeButton.addEventListener("click", () => setTheme(root.dataset.theme !== "dark"));

for (const input of document.querySelectorAll("#rules input")) {
  input.addEventListener("change", () => {
    for (const block of document.querySelectorAll("[data-rule]")) block.hidden = block.dataset.rule !== input.value;
  });
}

for (const button of document.querySelectorAll(".command button")) {
  button.addEventListener("click", async () => {
    const label = button.firstChild, before = label.textContent, command = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(command.textContent);
      label.textContent = "Copied";
    } catch {
      window.getSelection().selectAllChildren(command);
      label.textContent = "Selected";
    }
    setTimeout(() => { label.textContent = before; }, 1500);
  });
}

const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((candidate) => candidate.isIntersecting)) {
    for (const link of links.values()) link.removeAttribute("aria-current");
    links.get(entry.target.id).setAttribute("aria-current", "true");
  }
}, { rootMargin: "-15% 0px -75% 0px" });
for (const section of document.querySelectorAll("main section")) watcher.observe(section);

document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
window.addEventListener("scroll", hideTip, { passive: true });
root.dataset.ready = "true";
