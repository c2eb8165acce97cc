"use strict";
// Sorting: a click on a column's head. A row's detail stays below it.
function value(row, column) {
  const cell = row.cells[column];
  const raw = cell.dataset.v ?? cell.textContent;
  const number = raw === "" ? NaN : Number(raw);
  return { number, text: raw };
}
function compare(a, b) {
  const one = Number.isNaN(a.number), two = Number.isNaN(b.number);
  if (!one && !two) return a.number - b.number;
  if (a.text === "" || b.text === "") return 0;
  return a.text.localeCompare(b.text, undefined, { numeric: true });
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
    const down = head.ariaSort ? head.ariaSort === "ascending" : head.classList.contains("n");
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.ariaSort = down ? "descending" : "ascending";
    const pairs = [...body.querySelectorAll("tr.row")].map((row) => {
      const next = row.nextElementSibling;
      return { row, detail: next && next.classList.contains("detail") ? next : null, key: value(row, head.cellIndex) };
    });
    pairs.sort((a, b) => {
      const empty = (a.key.text === "") - (b.key.text === "");  // cells without a figure stay below
      return empty || (down ? -1 : 1) * compare(a.key, b.key);
    });
    for (const pair of pairs) body.append(...[pair.row, pair.detail].filter(Boolean));
  });
}
// A row's detail: its own button, or a link to the row.
function open(row, show) {
  const button = row.querySelector(".more"), detail = row.nextElementSibling;
  if (!button || !detail) return;
  detail.hidden = !show;
  button.setAttribute("aria-expanded", String(show));
}
for (const button of document.querySelectorAll(".more")) {
  button.addEventListener("click", () => open(button.closest("tr"), button.getAttribute("aria-expanded") !== "true"));
}
function follow() {
  const row = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (row && row.matches("tr.row")) { row.hidden = false; open(row, true); row.scrollIntoView({ block: "center" }); }
}
addEventListener("hashchange", follow);
follow();
// Filtering: every word must occur in the row.
const search = document.querySelector("#filter");
search?.addEventListener("input", () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of document.querySelectorAll("table.rows tr.row")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    if (row.hidden) open(row, false);
  }
});
for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const text = button.parentElement.querySelector("pre").textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(button.parentElement.querySelector("pre"));
    }
  });
}
