// Everything here is a convenience: without scripts a page shows the same content, unsorted and unfiltered.
(() => {
  "use strict";

  // Copy buttons beside code: <button data-copy="id of the element">.
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copy);
      const idle = button.dataset.idle || (button.dataset.idle = button.textContent);
      try {
        await navigator.clipboard.writeText(source.textContent.trim());
        button.textContent = "Copied";
      } catch {
        // Clipboard refused: select the text, so that a key press copies it.
        getSelection().selectAllChildren(source);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = idle; }, 1600);
    });
  }

  // Sortable tables: <th data-sort="text|number"> in a <table class="sortable">; data-value overrides a cell's text.
  const cell = (row, column) => {
    const td = row.cells[column];
    return td.dataset.value ?? td.textContent.trim();
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    for (const th of table.querySelectorAll("th[data-sort]")) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...th.childNodes);
      th.append(button);
      button.addEventListener("click", () => {
        const up = th.getAttribute("aria-sort") !== "ascending";
        for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
        th.setAttribute("aria-sort", up ? "ascending" : "descending");
        const column = th.cellIndex;
        const numeric = th.dataset.sort === "number";
        const body = table.tBodies[0];
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [cell(a, column), cell(b, column)];
          if (!numeric) return (up ? 1 : -1) * x.localeCompare(y, undefined, { numeric: true });
          const [p, q] = [parseFloat(x), parseFloat(y)];
          if (Number.isNaN(p) || Number.isNaN(q)) return Number.isNaN(p) - Number.isNaN(q); // unknown goes last
          return (up ? 1 : -1) * (p - q);
        });
        body.append(...rows);
      });
    }
  }

  // Filters of the board: rows carry data-family, data-status, data-verdicts and data-search.
  const filters = document.getElementById("filters");
  if (filters) {
    filters.hidden = false;
    const rows = [...document.querySelectorAll("#systems tbody tr")];
    const shown = document.getElementById("shown");
    const apply = () => {
      const words = filters.elements.search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const row of rows) {
        const ok = ["family", "status"].every((name) => {
          const wanted = filters.elements[name].value;
          return !wanted || row.dataset[name] === wanted;
        }) && (!filters.elements.verdict.value || row.dataset.verdicts.split(" ").includes(filters.elements.verdict.value))
          && words.every((word) => row.dataset.search.includes(word));
        row.hidden = !ok;
        count += ok;
      }
      shown.textContent = `${count} of ${rows.length}`;
    };
    filters.addEventListener("input", apply);
    filters.addEventListener("submit", (event) => event.preventDefault());
    apply();
  }

  // On paper everything is open.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const details of closed) details.open = true;
  });
  addEventListener("afterprint", () => { for (const details of closed) details.open = false; });
})();
