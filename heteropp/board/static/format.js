"use strict";
// How figures read, and small helpers to build the page.

const STAGE_COLOURS = ["#4c8ed9", "#e8a33d", "#5aa469", "#b06fc4", "#d65f5f", "#3fb5b0", "#8c7ae6", "#c98a5b", "#7f9f3f", "#d46a9f"];
const RUN_COLOURS = ["#3563e9", "#e0662f", "#1d9a6c", "#a64ac9", "#c8a415", "#0f9fb8", "#d63a6a", "#7a7f8c"];
const KIND_COLOURS = { start: "#667085", warning: "#d98a1f", straggler: "#d98a1f", switch: "#3563e9", recovery: "#c8322b", restart: "#c8322b", stop: "#667085" };

const colourOf = (colours, index) => colours[index % colours.length];
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (name === "colour") made.style.setProperty("--colour", value);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function scaled(value, units, base) {
  let i = 0;
  while (i < units.length - 1 && Math.abs(value) >= base * 0.9995) { value /= base; i++; }
  return `${value < 10 ? trimmed(value, 2) : value < 100 ? trimmed(value, 1) : Math.round(value)} ${units[i]}`;
}
const trimmed = (value, digits) => Number(value.toFixed(digits)).toString();
const bytes = (value) => (isNumber(value) ? scaled(value, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024) : "–");
const rate = (value) => (isNumber(value) ? scaled(value, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"], 1000) : "–");
const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(1)} %` : "–");

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0 s";
  if (Math.abs(value) < 1e-3) return `${significant(value * 1e6)} µs`;
  if (Math.abs(value) < 1) return `${significant(value * 1e3)} ms`;
  return value < 120 ? `${significant(value)} s` : `${significant(value / 60)} min`;
}

function significant(value, digits = 4) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return scaled(value, ["", "k", "M", "G", "T"], 1000).trim();
  if (size >= 1e3) return Math.round(value).toLocaleString("en-US");
  if (size < 1e-3) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toString();
}
