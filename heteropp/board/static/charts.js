"use strict";
// Figures by step: one uPlot for each chart, with the lines of every run.

const CHARTS = [
  { id: "loss", title: "Loss", unit: "nats per token", lines: ["loss", "validation_loss", "validation/"], text: significant },
  { id: "gradient", title: "Gradient norm", unit: "", lines: ["gradient_norm"], text: significant },
  { id: "speed", title: "Tokens per second", unit: "", lines: ["tokens_per_s"], text: significant, zero: true },
  { id: "step", title: "Step time", unit: "measured and predicted", lines: ["step_s", "predicted_step_s"], text: seconds, zero: true },
  { id: "shares", title: "Where the time goes", unit: "share of a mean rank's step", lines: ["bubble", "communication"], text: percent, zero: true },
  { id: "memory", title: "Memory", unit: "peak of each chip in the step", lines: ["memory/"], text: bytes, zero: true, base: 2, together: ["largest", Math.max] },
  { id: "links", title: "Bytes on links", unit: "from node to node in the step", lines: ["link/"], text: bytes, zero: true, base: 2, together: ["all links", (a, b) => a + b] },
  { id: "rate", title: "Learning rate", unit: "", lines: ["learning_rate"], text: significant, zero: true },
];
const NAMES = {
  loss: "training", validation_loss: "validation", gradient_norm: "norm", tokens_per_s: "tokens/s",
  step_s: "measured", predicted_step_s: "predicted", learning_rate: "rate",
};
const DASHES = [null, [7, 4], [2, 3], [9, 3, 2, 3]];
const POINTS_WITHOUT_LINE = new Set(["validation_loss"]);

class FigureChart {
  constructor(definition, parent) {
    this.definition = definition;
    this.box = element("div", { class: "chart", id: `chart-${definition.id}` },
      element("h2", {}, definition.title, element("small", {}, definition.unit)));
    this.place = element("div");
    this.box.append(this.place);
    parent.append(this.box);
    this.plot = null;
    this.key = "";
  }

  // Draws the runs' figures; the plot is made anew only when it has other lines.
  draw(runs) {
    const lines = runs.flatMap((run, index) => linesOf(this.definition, run, index, runs.length));
    this.box.hidden = !lines.length;
    if (!lines.length) return;
    const data = joined(runs, lines);
    const key = JSON.stringify(lines.map((line) => [line.label, line.colour, line.dash]));
    if (this.plot && key === this.key) {
      const { min, max } = this.plot.scales.x;
      const before = this.plot.data[0];
      const zoomed = min > before[0] || max < before[before.length - 1];
      this.plot.setData(data, !zoomed);
      return;
    }
    this.key = key;
    this.remake(lines, data, runs);
  }

  remake(lines, data, runs) {
    this.plot?.destroy();
    this.place.replaceChildren();
    const { text, zero, base } = this.definition;
    const axis = {
      stroke: themed("--dim"), font: "11px system-ui, sans-serif",
      grid: { stroke: themed("--grid"), width: 1 }, ticks: { show: false },
    };
    const options = {
      width: this.width(), height: 190,
      cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false }, points: { size: 7 } },
      legend: { live: true },
      scales: { x: { time: false }, y: { range: (_, least, most) => range(least, most, zero) } },
      axes: [
        { ...axis, size: 26, values: (_, splits) => splits.map((s) => (Number.isInteger(s) ? s.toLocaleString("en-US") : "")) },
        { ...axis, size: 62, incrs: base === 2 ? powersOfTwo() : undefined, values: (_, splits) => splits.map((split) => text(split)) },
      ],
      series: [
        { label: "step", value: (plot, step) => Math.round(step ?? last(plot.data[0])).toLocaleString("en-US") },
        ...lines.map((line) => ({
          label: line.label, stroke: line.colour, width: 1.6, dash: line.dash ?? undefined,
          value: (plot, value, series, at) => text(at == null ? last(plot.data[series]) : value), spanGaps: true,
          points: { show: line.points || undefined, size: 5, fill: line.points ? line.colour : undefined },
        })),
      ],
      hooks: { drawClear: [(plot) => drawEvents(plot, runs)] },
    };
    this.plot = new uPlot(options, data, this.place);
  }

  width() { return Math.max(200, this.box.clientWidth - 28); }

  resize() { if (this.plot && !this.box.hidden) this.plot.setSize({ width: this.width(), height: 190 }); }
}

function linesOf(definition, run, index, runCount) {
  const names = Object.keys(run.figures).filter((name) =>
    definition.lines.some((line) => (line.endsWith("/") ? name.startsWith(line) : name === line)) &&
    run.figures[name].some((value) => value != null));
  names.sort((a, b) => order(definition, a) - order(definition, b));
  if (definition.together && runCount > 1 && names.length) {
    const [label, fold] = definition.together;
    return [{ run: index, label: `${run.name}: ${label}`, colour: colourOf(RUN_COLOURS, index), values: folded(run, names, fold) }];
  }
  return names.map((name, i) => {
    const own = NAMES[name] ?? name.replace(/^[^/]*\//, "");
    return {
      run: index, values: run.figures[name], points: POINTS_WITHOUT_LINE.has(name),
      label: runCount > 1 ? (names.length > 1 ? `${run.name}: ${own}` : run.name) : own,
      colour: runCount > 1 ? colourOf(RUN_COLOURS, index) : colourOf(name === "predicted_step_s" ? ["#98a2b3"] : RUN_COLOURS, i),
      dash: runCount > 1 ? DASHES[i % DASHES.length] : i >= RUN_COLOURS.length ? DASHES[1] : null,
    };
  });
}

// What the legend shows while the cursor is elsewhere.
function last(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] != null) return values[i];
  return null;
}

const order = (definition, name) => definition.lines.findIndex((line) => (line.endsWith("/") ? name.startsWith(line) : name === line));

function folded(run, names, fold) {
  return run.steps.map((_, i) => names.reduce((sum, name) => {
    const value = run.figures[name][i];
    return value == null ? sum : sum == null ? value : fold(sum, value);
  }, null));
}

// The lines over the steps of all runs together.
function joined(runs, lines) {
  const of = (run) => lines.filter((line) => line.run === run).map((line) => line.values);
  if (runs.length === 1) return [runs[0].steps, ...of(0)];
  return uPlot.join(runs.map((run, index) => [distinct(run.steps), ...of(index)]).filter((table) => table.length > 1));
}

// uPlot joins tables by step, in which a step may come once.
function distinct(steps) {
  let last = -Infinity;
  return steps.map((step) => (last = step > last ? step : last + 1e-3));
}

function range(least, most, zero) {
  if (least == null || most == null) return [0, 1];
  if (zero) return [0, most > 0 ? most * 1.08 : 1];
  const pad = (most - least || Math.abs(most) || 1) * 0.07;
  return [least - pad, most + pad];
}

function powersOfTwo() {
  const steps = [];
  for (let power = 1; power < 2 ** 52; power *= 2) steps.push(power);
  return steps;
}

function drawEvents(plot, runs) {
  const { ctx, bbox } = plot;
  ctx.save();
  for (const run of runs) {
    for (const event of run.details?.events ?? []) {
      if (event.step == null || event.kind === "start") continue;
      const x = Math.round(plot.valToPos(event.step, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = KIND_COLOURS[event.kind] ?? themed("--faint");
      ctx.globalAlpha = 0.55;
      ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.lineWidth = devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}
