// Tables that are sorted by a click on a heading, or by Enter or Space on it; without this script
// they stand in the order in which they were written.
(function (R) {
  "use strict";

  const ORDERS = { none: "ascending", ascending: "descending", descending: "none" };

  // Places of the rows in an order. cells: [{text, number}], number null where it is none; rows
  // without a number come last either way, and equal rows stay as they stood.
  R.sorted = function (cells, order) {
    const places = cells.map((_, place) => place);
    if (order === "none") return places;
    const sign = order === "ascending" ? 1 : -1;
    const numbers = cells.some((cell) => cell.number !== null);
    const compare = (a, b) => {
      if (!numbers) return sign * a.text.localeCompare(b.text, "en", { numeric: true, sensitivity: "base" });
      if (a.number === null || b.number === null) return (a.number === null) - (b.number === null);
      return sign * (a.number - b.number);
    };
    return places.sort((i, j) => compare(cells[i], cells[j]) || i - j);
  };

  function cellOf(row, column) {
    const cell = row.children[column];
    const number = cell.getAttribute("data-sort");
    return { text: cell.textContent, number: number === null ? null : Number(number) };
  }

  function sortable(table) {
    const body = table.querySelector("tbody");
    const written = [...body.children];
    const headings = [...table.querySelector("thead").querySelectorAll("th")];
    if (written.length < 2) return;
    headings.forEach((heading, column) => {
      const button = document.createElement("button");
      button.setAttribute("type", "button");
      button.setAttribute("class", "sort");
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const order = ORDERS[heading.getAttribute("aria-sort") ?? "none"];
        for (const other of headings) other.removeAttribute("aria-sort");
        if (order !== "none") heading.setAttribute("aria-sort", order);
        const cells = written.map((row) => cellOf(row, column));
        body.append(...R.sorted(cells, order).map((place) => written[place]));
      });
    });
  }

  R.startTables = () => document.querySelectorAll("table").forEach(sortable);
})((globalThis.recollectReport ??= {}));
