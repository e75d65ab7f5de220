"use strict";
// Takes what the page is told, from the file itself or from the server, and shows it.

const MOST_POINTS = 6000; // of a run; beyond, the page asks for all of it in fewer points
const EVERY_MS = 1000;
const FAITHFUL = 0.95;

const board = { runs: [], selected: 0, live: false, ready: false };
window.board = board;
const byId = (id) => document.getElementById(id);
const charts = CHARTS.map((definition) => new FigureChart(definition, byId("charts")));
const timeline = new StepTimeline(byId("timeline"), sayFollowed);

// --- what the page is told ---

function take(news) {
  let changed = false;
  board.live = news.live;
  news.runs.forEach((told, index) => {
    const run = (board.runs[index] ??= { steps: [], figures: {}, details: {}, known: {} });
    changed ||= run.running !== told.running || run.problem !== told.problem || run.known.steps !== told.known.steps;
    Object.assign(run, { name: told.name, path: told.path, running: told.running, problem: told.problem, newest: told.newest, known: told.known });
    if (told.peaks) run.peaks = told.peaks;
    if (told.all) Object.assign(run, told.all);
    else append(run, told.added);
    if (told.details) { run.details = told.details; run.isNew = changed = true; }
    if (run.steps.length > MOST_POINTS) run.known = { steps: 0, replaced: -1, details: run.known.details };
  });
  if (changed || !board.ready) show();
  board.ready = !news.more;
}

function append(run, added) {
  const before = run.steps.length;
  run.steps = run.steps.concat(added.steps);
  for (const name of new Set([...Object.keys(run.figures), ...Object.keys(added.figures)])) {
    const old = run.figures[name] ?? Array(before).fill(null);
    run.figures[name] = old.concat(added.figures[name] ?? Array(added.steps.length).fill(null));
  }
}

async function poll() {
  let wait = EVERY_MS;
  if (!document.hidden || !board.ready) {
    try {
      const known = encodeURIComponent(JSON.stringify(board.runs.map((run) => run.known)));
      const answer = await fetch(`news?known=${known}`, { cache: "no-store" });
      const news = await answer.json();
      take(news);
      board.lost = false;
      if (news.more) wait = 0;
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      board.lost = true; // the server has ended
      wait = 3 * EVERY_MS;
    }
    showStatus();
  }
  setTimeout(poll, wait);
}

// --- what it shows ---

function show() {
  const run = board.runs[board.selected];
  showRuns();
  showStatus();
  showNow(run);
  for (const chart of charts) chart.draw(board.runs);
  if (run.isNew || board.shown !== run) showDetails(run);
  else if (run.details.plan) drawMemory(run);
  run.isNew = false;
  board.shown = run;
  const problems = board.runs.map((each) => each.problem).filter(Boolean);
  byId("problems").hidden = !problems.length;
  byId("problems").textContent = problems.join("; ");
}

function showRuns() {
  const key = JSON.stringify([board.runs.map((run) => run.name), board.selected]);
  if (byId("runs").dataset.key === key) return;
  byId("runs").dataset.key = key;
  byId("runs").replaceChildren(...board.runs.map((run, index) => element("button", {
    type: "button", "aria-pressed": String(index === board.selected), title: run.path,
    onclick: () => { board.selected = index; show(); },
  }, element("i", { style: { background: colourOf(RUN_COLOURS, index) } }), run.name)));
}

function showStatus() {
  const run = board.runs[board.selected], status = byId("status");
  if (!run) return;
  status.className = board.lost ? "lost" : run.running && board.live ? "live" : "";
  const state = run.running ? "training" : "not running";
  status.textContent = board.lost ? "heteropp-board has ended; this is the last it told" : !board.live ? "as of when this file was written" : state;
}

function showNow(run) {
  const at = run.newest ?? {}, steps = run.details.start?.steps, step = run.steps[run.steps.length - 1];
  const cards = [];
  const card = (id, title, value, beside, warns) => cards.push(element("div", { class: "figure", id: `now-${id}` },
    element("h3", {}, title), element("div", { class: "value" }, value), beside ? element("div", { class: `beside${warns ? " warn" : ""}` }, beside) : null));
  card("step", "Step", step == null ? "–" : [step.toLocaleString("en-US"), steps ? element("small", {}, ` of ${steps.toLocaleString("en-US")}`) : ""],
    steps && step != null ? element("div", { class: "bar" }, element("i", { style: { width: `${Math.min(100, (100 * step) / steps)}%` } })) : null);
  card("loss", "Loss", isNumber(at.loss) ? at.loss.toFixed(4) : "–", isNumber(at.validation_loss) ? `validation ${at.validation_loss.toFixed(4)}` : "nats per token");
  card("speed", "Tokens per second", significant(at.tokens_per_s), isNumber(at.tokens_per_chip_per_s) ? `${significant(at.tokens_per_chip_per_s)} a chip` : null);
  const doubtful = isNumber(at.pacing_fidelity) && at.pacing_fidelity < FAITHFUL;
  card("time", "Step time", seconds(at.step_s), isNumber(at.predicted_step_s) ? `predicted ${seconds(at.predicted_step_s)}` : null);
  card("bubble", "Bubble", percent(at.bubble), `communication ${percent(at.communication)}`);
  if (isNumber(at.utilization)) card("utilization", "Model FLOPs utilization", percent(at.utilization), null);
  if (isNumber(at.pacing_fidelity)) {
    card("fidelity", "Pacing fidelity", percent(at.pacing_fidelity), doubtful ? "this host is too busy: times say little of the chips" : "the host keeps up with its emulated chips", doubtful);
  }
  byId("now").replaceChildren(...cards);
}

function showDetails(run) {
  const { plan, cluster, timeline: content, events, reports, start } = run.details;
  byId("timeline-card").hidden = !content;
  byId("plan-card").hidden = !plan;
  byId("cluster-card").hidden = !cluster;
  byId("reports-card").hidden = !reports?.length;
  byId("start-card").hidden = !start;
  if (content) showTimeline(run, content);
  if (plan) drawMemory(run);
  showEvents(events ?? []);
  if (reports?.length) showReports(reports);
  if (start) {
    const versions = Object.entries(start.versions).map(([name, version]) => `${name} ${version}`).join(", ");
    const rows = { command: element("code", {}, start.command), "started at": start.at, host: start.host, versions, folder: run.path };
    byId("start").replaceChildren(...Object.entries(rows).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value ?? "–")]));
  }
}

function drawMemory(run) {
  drawPlan(byId("plan"), byId("plan-facts"), run);
  if (run.details.cluster) drawCluster(byId("cluster"), byId("cluster-facts"), run);
}

function showTimeline(run, content) {
  const places = placesOf(run.details), unknown = (rank) => ({ rank, pipeline: 0, stage: rank, label: `rank ${rank}`, colour: "#98a2b3" });
  const shown = content.rows.length, all = content.ranks;
  byId("timeline-step").textContent = [content.step ? `step ${content.step}` : "", shown < all ? `${shown} of ${all} ranks` : ""].filter(Boolean).join(" · ");
  timeline.show(content, (rank) => places.get(rank) ?? unknown(rank));
  byId("timeline-legend").replaceChildren(...content.kinds.filter((kind) => kind.works).map((kind) =>
    element("span", {}, element("i", { style: { background: kind.colour } }), kind.meaning)),
  element("span", {}, element("i", { style: { background: "var(--idle)" } }), "send, receive, gather"));
  const choices = new Map();
  content.timelines.forEach(({ rows }) => rows.forEach((spans, row) => spans.forEach((span) => {
    if (span[1] >= 0) choices.set(`${timeline.content.places[row].pipeline}/${span[1]}`, [timeline.content.places[row].pipeline, span[1]]);
  })));
  const sorted = [...choices.entries()].sort(([, a], [, b]) => a[0] - b[0] || a[1] - b[1]);
  const many = run.details.plan?.pipelines.length > 1;
  byId("follow").replaceChildren(element("option", { value: "" }, "all"),
    ...sorted.map(([value, [pipeline, microBatch]]) => element("option", { value }, many ? `${microBatch} of pipeline ${pipeline}` : microBatch)));
  sayFollowed(timeline.followed, timeline.followed && timeline.spell(timeline.followed));
}

const HINT = byId("followed").textContent;

function sayFollowed(followed, spell) {
  byId("follow").value = followed ? `${followed.pipeline}/${followed.microBatch}` : "";
  if (!followed) { byId("followed").textContent = HINT; return; }
  const texts = spell.filter(({ stages }) => stages > 0).map(({ name, begin, end, stages }) => `${name} ${seconds((end - begin) * 1e-6)} through ${counted(stages, "stage")}`);
  byId("followed").textContent = `Micro-batch ${followed.microBatch}: ${texts.join(", ")}. Escape shows all again.`;
}

function showEvents(events) {
  const rows = [...events].reverse().map((event) => element("li", {},
    element("span", { class: "step" }, event.step == null ? "" : `step ${event.step.toLocaleString("en-US")}`, event.at ? element("time", { title: new Date(event.at * 1e3).toString() }, new Date(event.at * 1e3).toTimeString().slice(0, 8)) : null),
    element("span", { class: "kind", colour: KIND_COLOURS[event.kind] ?? "#667085" }, event.kind), element("span", {}, event.text)));
  byId("events").replaceChildren(...rows);
}

function showReports(reports) {
  byId("reports").replaceChildren(element("table", {}, element("tbody", {}, reports.flatMap((report) => report.chips.map((chip) => element("tr", {},
    element("th", { scope: "row" }, chip.chip), element("td", { class: chip.passed ? "good" : "bad" }, chip.passed ? "passed" : "failed"),
    element("td", {}, chip.verdict), element("td", {}, element("code", {}, report.file))))))));
}

// --- begin ---

function redraw() {
  for (const chart of charts) chart.key = "";
  board.shown = null;
  if (board.runs.length) show();
}

byId("follow").addEventListener("change", (event) => {
  const [pipeline, microBatch] = event.target.value.split("/").map(Number);
  timeline.follow(event.target.value ? { pipeline, microBatch } : null);
});
byId("zoom-out").addEventListener("click", () => timeline.whole());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let resizing = 0;
window.addEventListener("resize", () => {
  cancelAnimationFrame(resizing);
  resizing = requestAnimationFrame(() => {
    for (const chart of charts) chart.resize();
    timeline.draw();
    const run = board.runs[board.selected];
    if (run?.details.cluster) drawCluster(byId("cluster"), byId("cluster-facts"), run);
  });
});

const given = JSON.parse(byId("data").textContent);
if (given) take(given);
else poll();
