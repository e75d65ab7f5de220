"use strict";

const ROWS_SHOWN = 200; // of a table, until asked for all: laying out thousands takes seconds

// --- which rows of a table are shown ----------------------------------------------------------

function refresh(table) {
  const limit = table.dataset.all === "yes" ? Infinity : ROWS_SHOWN;
  let matching = 0;
  for (const row of table.tBodies[0].rows) {
    row.hidden = row.classList.contains("out") || ++matching > limit;
  }
  const all = table.closest(".scroll")?.querySelector("button.all");
  if (all) {
    all.hidden = matching <= limit;
    all.textContent = `show all ${matching} rows`;
  }
}

for (const all of document.querySelectorAll(".scroll button.all")) {
  const table = all.closest(".scroll").querySelector("table");
  all.addEventListener("click", () => {
    closeDetails(table.tBodies[0]);
    table.dataset.all = "yes";
    refresh(table);
  });
  refresh(table);
}

// --- sorting: any table.sortable, by the button in a heading ---------------------------------

function sortValue(row, column) {
  const cell = row.cells[column];
  const value = cell.dataset.value;
  if (value === undefined) return cell.textContent.trim();
  if (value === "nan") return Infinity;
  return Number(value.replace("inf", "Infinity"));
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a === b ? 0 : a < b ? -1 : 1;
  if (typeof a !== typeof b) return typeof a === "number" ? 1 : -1; // no figure: smallest
  return a.localeCompare(b, "en", { numeric: true });
}

function sortBy(heading) {
  const table = heading.closest("table");
  const body = table.tBodies[0];
  closeDetails(body);
  const isNumber = heading.classList.contains("number");
  const before = heading.getAttribute("aria-sort");
  const order = before === null ? (isNumber ? "descending" : "ascending")
    : before === "ascending" ? "descending" : "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const keyed = Array.from(body.rows, (row) => [sortValue(row, heading.cellIndex), row]);
  keyed.sort((a, b) => sign * compare(a[0], b[0]));
  for (const [, row] of keyed) body.append(row);
  refresh(table);
}

for (const heading of document.querySelectorAll("table.sortable thead th")) {
  heading.querySelector("button")?.addEventListener("click", () => sortBy(heading));
}

// --- the operator table: filter, and details under a row --------------------------------------

const details = JSON.parse(document.getElementById("details").textContent);
const operatorTable = document.getElementById("operator-table");

function closeDetails(body) {
  for (const detail of body.querySelectorAll("tr.detail")) detail.remove();
  for (const button of body.querySelectorAll("button.more")) {
    button.setAttribute("aria-expanded", "false");
  }
}

function filter() {
  const words = document.getElementById("words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const chip = document.getElementById("chip").value;
  const passed = document.getElementById("passed").value;
  const body = operatorTable.tBodies[0];
  closeDetails(body);
  let matching = 0;
  for (const row of body.rows) {
    const text = row.textContent.toLowerCase();
    const matches = words.every((word) => text.includes(word)) &&
      (!chip || row.dataset.chip === chip) && (!passed || row.dataset.passed === passed);
    row.classList.toggle("out", !matches);
    matching += matches ? 1 : 0;
  }
  document.getElementById("shown").value = `${matching} of ${body.rows.length}`;
  refresh(operatorTable);
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function tableOf(headings, rows, caption) {
  const table = element("table", undefined, "small");
  table.createCaption().textContent = caption;
  const head = table.createTHead().insertRow();
  for (const heading of headings) head.append(element("th", heading));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const value of row) line.append(element("td", value));
  }
  return table;
}

function detailOf(row) {
  const { facts, worst } = details[row.dataset.row];
  const cell = element("td");
  cell.colSpan = row.cells.length;
  const list = element("dl", undefined, "place");
  for (const [name, value] of facts) list.append(element("dt", name), element("dd", value));
  cell.append(list);
  const picture = row.querySelector("svg");
  if (picture) {
    const large = picture.cloneNode(true);
    large.classList.add("large");
    cell.append(large);
  }
  if (worst.length) {
    cell.append(tableOf(["index", "chip", "reference", "error"], worst, "worst elements"));
  }
  const detail = element("tr", undefined, "detail");
  detail.append(cell);
  return detail;
}

function toggleDetail(button) {
  const row = button.closest("tr");
  const isOpen = button.getAttribute("aria-expanded") === "true";
  button.setAttribute("aria-expanded", String(!isOpen));
  if (isOpen) row.nextElementSibling.remove();
  else row.after(detailOf(row));
}

if (operatorTable) {
  for (const id of ["words", "chip", "passed"]) {
    document.getElementById(id).addEventListener("input", filter);
  }
  operatorTable.tBodies[0].addEventListener("click", (event) => {
    const button = event.target.closest("button.more");
    if (button) toggleDetail(button);
  });
  filter(); // a reloaded page keeps what was typed
}
