// Tables are sorted by a click on a column's name, or Enter on it.
"use strict";
const collator = new Intl.Collator("en", { numeric: true });

function sortBy(table, column, isNumber, down) {
  const keyed = [...table.tBodies[0].rows].map((row) => {
    const cell = row.cells[column];
    return [isNumber ? Number(cell.dataset.value ?? cell.textContent) : cell.textContent, row];
  });
  keyed.sort(([a], [b]) => {
    if (!isNumber) return (down ? -1 : 1) * collator.compare(a, b);
    if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b); // what is missing comes last
    return down ? b - a : a - b;
  });
  table.tBodies[0].append(...keyed.map(([, row]) => row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      sortBy(table, column, head.classList.contains("number"), down);
    });
  });
}
