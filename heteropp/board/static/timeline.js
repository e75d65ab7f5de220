"use strict";
// The step's timelines on a canvas: for each rank what was predicted above what was measured.

class StepTimeline {
  constructor(box, onFollow) {
    this.canvas = box.querySelector("canvas");
    this.tip = box.querySelector("#tip");
    this.onFollow = onFollow;
    this.content = null;
    this.view = [0, 1]; // microseconds
    this.followed = null; // {microBatch, pipeline}
    this.drag = null;
    const on = (name, handler, options) => this.canvas.addEventListener(name, handler, options);
    on("mousemove", (event) => this.moved(event));
    on("mouseleave", () => { this.tip.hidden = true; });
    on("mousedown", (event) => { this.drag = { x: event.offsetX, view: this.view, moves: event.shiftKey }; });
    window.addEventListener("mouseup", (event) => this.released(event));
    on("wheel", (event) => this.wheeled(event), { passive: false });
    on("dblclick", () => this.whole());
    on("keydown", (event) => this.pressed(event));
  }

  // content: of the run's details; rows: by rank {label, pipeline, colour}
  show(content, describe) {
    const isOther = !this.content || this.content.end !== endOf(content);
    this.content = { ...content, end: endOf(content), places: content.rows.map((row) => describe(row.rank)) };
    if (isOther) { this.view = [0, this.content.end]; this.followed = null; }
    this.draw();
  }

  whole() { this.view = [0, this.content.end]; this.draw(); }

  follow(followed) {
    this.followed = followed;
    this.draw();
    this.onFollow(followed, followed && this.spell(followed));
  }

  isFollowed(row, span) {
    return span[1] === this.followed.microBatch && this.content.places[row].pipeline === this.followed.pipeline;
  }

  // How long a micro-batch took from its first action to its last, by timeline.
  spell({ microBatch, pipeline }) {
    return this.content.timelines.map(({ name, rows }) => {
      let begin = Infinity, end = -Infinity, stages = new Set();
      rows.forEach((spans, row) => spans.forEach((span) => {
        if (span[1] !== microBatch || this.content.places[row].pipeline !== pipeline) return;
        begin = Math.min(begin, span[3]); end = Math.max(end, span[3] + span[4]);
        stages.add(this.content.places[row].stage);
      }));
      return { name, begin, end, stages: stages.size };
    });
  }

  // --- places ---

  layout() {
    const width = this.canvas.clientWidth || 600;
    const lanes = this.content.timelines.length;
    const rows = this.content.rows.length;
    const bars = rows * lanes;
    const lane = bars <= 20 ? 17 : bars <= 48 ? 12 : 8;
    const gap = rows <= 24 ? 9 : 5;
    const left = width < 560 ? 84 : 168;
    return { width, lane, gap, left, row: lanes * lane + gap, height: rows * (lanes * lane + gap) + 26 };
  }

  toX(time, l) { return l.left + ((time - this.view[0]) / (this.view[1] - this.view[0])) * (l.width - l.left); }

  toTime(x, l) { return this.view[0] + ((x - l.left) / (l.width - l.left)) * (this.view[1] - this.view[0]); }

  at(x, y) {
    const l = this.layout();
    const row = Math.floor(y / l.row), timeline = Math.floor((y - row * l.row) / l.lane);
    if (x < l.left || !this.content.rows[row] || !this.content.timelines[timeline]) return null;
    const time = this.toTime(x, l), slack = (this.view[1] - this.view[0]) / (l.width - l.left);
    const spans = this.content.timelines[timeline].rows[row];
    const hits = spans.filter((span) => span[3] - slack <= time && time <= span[3] + span[4] + slack);
    // of several the shortest: it lies on top
    const span = hits.sort((a, b) => a[4] - b[4])[0];
    return span ? { row, timeline, span } : null;
  }

  // --- drawing ---

  draw() {
    if (!this.content) return;
    const l = this.layout(), scale = window.devicePixelRatio || 1;
    this.canvas.style.height = `${l.height}px`;
    this.canvas.width = Math.round(l.width * scale);
    this.canvas.height = Math.round(l.height * scale);
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    context.clearRect(0, 0, l.width, l.height);
    this.drawAxis(context, l);
    this.content.timelines.forEach((timeline, t) => timeline.rows.forEach((spans, row) => {
      this.drawSpans(context, l, spans, row, row * l.row + t * l.lane);
    }));
    if (this.followed) this.drawArrows(context, l);
    this.drawLabels(context, l);
  }

  drawAxis(context, l) {
    const bottom = l.height - 24, most = Math.max(2, Math.floor((l.width - l.left) / 110));
    const every = niceStep((this.view[1] - this.view[0]) / most);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    context.textAlign = "center";
    for (let time = Math.ceil(this.view[0] / every) * every; time <= this.view[1] * (1 + 1e-9); time += every) {
      const x = this.toX(time, l);
      context.fillStyle = themed("--grid");
      context.fillRect(Math.round(x), 0, 1, bottom);
      context.fillStyle = themed("--dim");
      context.textAlign = x > l.width - 30 ? "right" : "center";
      context.fillText(seconds(time * 1e-6), x, bottom + 6);
    }
  }

  drawSpans(context, l, spans, row, top) {
    const height = l.lane - 1.5, kinds = this.content.kinds;
    context.save();
    context.beginPath();
    context.rect(l.left, top, l.width - l.left, l.lane);
    context.clip();
    context.fillStyle = themed("--track");
    context.globalAlpha = 0.45;
    context.fillRect(l.left, top, l.width - l.left, height);
    context.font = `${Math.min(11, l.lane - 4)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const idle = themed("--idle");
    for (const span of spans) {
      const [kind, microBatch, ministage, begin, took] = span;
      if (begin > this.view[1] || begin + took < this.view[0]) continue;
      const x = this.toX(begin, l), width = Math.max(0.7, this.toX(begin + took, l) - x);
      const { colour, works } = kinds[kind];
      const faded = this.followed && !this.isFollowed(row, span);
      context.globalAlpha = faded ? 0.13 : ministage ? 0.72 : 1;
      context.fillStyle = works ? colour : idle;
      context.fillRect(x, top, Math.max(0.7, width - (width > 3 ? 0.8 : 0)), height);
      if (works && microBatch >= 0 && width > 13 && l.lane >= 12) {
        context.globalAlpha = faded ? 0.25 : 1;
        context.fillStyle = "#fff";
        context.fillText(microBatch, x + width / 2, top + height / 2 + 0.5);
      }
    }
    context.restore();
  }

  drawArrows(context, l) {
    context.save();
    context.beginPath();
    context.rect(l.left, 0, l.width - l.left, l.height - 24);
    context.clip();
    context.strokeStyle = context.fillStyle = themed("--text");
    context.lineWidth = 1.3;
    context.globalAlpha = 0.8;
    for (const [t, rowA, indexA, rowB, indexB] of this.content.arrows) {
      const from = this.content.timelines[t].rows[rowA][indexA], to = this.content.timelines[t].rows[rowB][indexB];
      if (!from || !to || !this.isFollowed(rowA, from)) continue;
      const x0 = this.toX(from[3] + from[4], l), x1 = this.toX(to[3], l);
      const y0 = rowA * l.row + (t + 0.5) * l.lane, y1 = rowB * l.row + (t + 0.5) * l.lane;
      const bend = Math.max(8, Math.abs(x1 - x0) / 2);
      context.beginPath();
      context.moveTo(x0, y0);
      context.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
      context.stroke();
      context.beginPath();
      context.moveTo(x1, y1);
      context.lineTo(x1 - 6, y1 - 3);
      context.lineTo(x1 - 6, y1 + 3);
      context.fill();
    }
    context.restore();
  }

  drawLabels(context, l) {
    context.textBaseline = "middle";
    const lanes = this.content.timelines.length, middle = (lanes * l.lane) / 2 - 1;
    this.content.places.forEach((place, row) => {
      const top = row * l.row;
      context.fillStyle = place.colour;
      context.fillRect(0, top, 3, lanes * l.lane - 1.5);
      context.textAlign = "left";
      context.fillStyle = themed("--text");
      context.font = `${l.lane < 10 ? 10 : 12}px system-ui, sans-serif`;
      const text = l.left < 100 ? `rank ${place.rank}` : place.label;
      context.fillText(text, 9, top + middle, l.left - (l.lane >= 12 && l.left > 100 ? 72 : 14));
      if (l.lane < 12 || l.left < 100) return;
      context.font = "10px system-ui, sans-serif";
      context.fillStyle = themed("--faint");
      context.textAlign = "right";
      this.content.timelines.forEach(({ name }, t) => context.fillText(name, l.left - 7, top + (t + 0.5) * l.lane - 0.5));
    });
  }

  // --- what the reader does ---

  moved(event) {
    if (!this.content) return;
    const l = this.layout();
    if (this.drag?.moves && event.buttons) {
      const by = ((this.drag.x - event.offsetX) / (l.width - l.left)) * (this.drag.view[1] - this.drag.view[0]);
      this.set(this.drag.view[0] + by, this.drag.view[1] + by);
      return;
    }
    if (this.drag && event.buttons && Math.abs(event.offsetX - this.drag.x) > 4) {
      this.draw();
      const context = this.canvas.getContext("2d");
      context.globalAlpha = 0.2;
      context.fillStyle = themed("--accent");
      const from = Math.max(l.left, this.drag.x);
      context.fillRect(from, 0, Math.max(l.left, event.offsetX) - from, l.height - 24);
      context.globalAlpha = 1;
      return;
    }
    const hit = this.at(event.offsetX, event.offsetY);
    this.tip.hidden = !hit;
    if (!hit) return;
    this.tip.textContent = this.describe(hit);
    const right = event.offsetX + 14 + this.tip.offsetWidth > l.width;
    this.tip.style.left = `${Math.max(0, right ? event.offsetX - 14 - this.tip.offsetWidth : event.offsetX + 14)}px`;
    this.tip.style.top = `${event.offsetY + 14}px`;
  }

  describe({ row, timeline, span }) {
    const [kind, microBatch, ministage, begin, took] = span, place = this.content.places[row];
    const what = this.content.kinds[kind].meaning + (microBatch >= 0 ? ` of micro-batch ${microBatch}` : "");
    const part = ministage ? `, ministage ${ministage}` : "";
    const name = this.content.timelines[timeline].name;
    const lines = [`${what}${part}`, `${place.label}`, `${name}: ${seconds(took * 1e-6)}, from ${seconds(begin * 1e-6)} to ${seconds((begin + took) * 1e-6)}`];
    this.content.timelines.forEach((other, t) => {
      if (t === timeline) return;
      const same = other.rows[row].find((s) => s[0] === kind && s[1] === microBatch && s[2] === ministage);
      if (same) lines.push(`${other.name}: ${seconds(same[4] * 1e-6)}, from ${seconds(same[3] * 1e-6)}`);
    });
    return lines.join("\n");
  }

  released(event) {
    const drag = this.drag;
    this.drag = null;
    if (!drag || !this.content || drag.moves) return;
    const x = event.clientX - this.canvas.getBoundingClientRect().left, l = this.layout();
    if (Math.abs(x - drag.x) > 4) {
      const [a, b] = [this.toTime(Math.min(x, drag.x), l), this.toTime(Math.max(x, drag.x), l)];
      this.set(Math.max(a, 0), b);
    } else if (event.target === this.canvas) {
      const hit = this.at(event.offsetX, event.offsetY);
      const microBatch = hit?.span[1] ?? -1;
      this.follow(microBatch < 0 ? null : { microBatch, pipeline: this.content.places[hit.row].pipeline });
    }
  }

  wheeled(event) {
    if (!this.content || Math.abs(event.deltaY) < Math.abs(event.deltaX)) return;
    if (this.view[1] - this.view[0] >= this.content.end && event.deltaY > 0) return; // the page scrolls
    event.preventDefault();
    this.zoom(Math.exp(event.deltaY * 0.0015), this.toTime(event.offsetX, this.layout()));
  }

  zoom(factor, around) {
    this.set(around - (around - this.view[0]) * factor, around + (this.view[1] - around) * factor);
  }

  set(begin, end) {
    const least = this.content.end / 1e4;
    let width = Math.min(Math.max(end - begin, least), this.content.end);
    begin = Math.min(Math.max(begin, 0), this.content.end - width);
    this.view = [begin, begin + width];
    this.draw();
  }

  pressed(event) {
    const middle = (this.view[0] + this.view[1]) / 2, width = this.view[1] - this.view[0];
    if (event.key === "+" || event.key === "=") this.zoom(0.7, middle);
    else if (event.key === "-") this.zoom(1 / 0.7, middle);
    else if (event.key === "ArrowRight") this.set(this.view[0] + width / 8, this.view[1] + width / 8);
    else if (event.key === "ArrowLeft") this.set(this.view[0] - width / 8, this.view[1] - width / 8);
    else if (event.key === "Escape") { this.follow(null); this.whole(); }
    else return;
    event.preventDefault();
  }
}

function endOf(content) {
  let end = 1;
  for (const { rows } of content.timelines) for (const spans of rows) for (const span of spans) end = Math.max(end, span[3] + span[4]);
  return end;
}

function niceStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw) ?? 10 * power;
}
