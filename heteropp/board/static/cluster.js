"use strict";
// The plan's stages with the memory of their chips, and the cluster with its links.

const SVG = "http://www.w3.org/2000/svg";

// Where every rank is in the plan: {rank, pipeline, stage, chip, label, colour}.
function placesOf(details) {
  const places = new Map();
  let number = 0;
  (details.plan?.pipelines ?? []).forEach((pipeline, p) => pipeline.stages.forEach((stage, s) => {
    const colour = colourOf(STAGE_COLOURS, number++);
    const many = details.plan.pipelines.length > 1;
    for (const replica of stage.replicas) {
      const chips = replica.group_chips ?? [replica.chip], size = replica.ranks.length / chips.length;
      replica.ranks.forEach((rank, i) => {
        const chip = chips[Math.floor(i / size)].replace(/\.toml$/, "").split("/").pop();
        places.set(rank, { rank, pipeline: p, stage: s, chip, colour, label: `rank ${rank} · ${chip}`, where: many ? `pipeline ${p}, stage ${s}` : `stage ${s}` });
      });
    }
  }));
  return places;
}

function memoryOf(run) {
  const details = run.details, prediction = details.plan?.prediction, capacity = new Map();
  for (const node of details.cluster?.nodes ?? []) for (const rank of node.ranks) capacity.set(rank, node.capacity_bytes);
  return (rank) => ({
    measured: run.peaks?.[rank] ?? null,
    predicted: prediction?.memory_bytes?.[rank] ?? null,
    capacity: capacity.get(rank) ?? prediction?.capacity_bytes?.[rank] ?? null,
  });
}

// --- plan ---

const FEW_CHIPS = 8;

function drawPlan(box, facts, run) {
  const plan = run.details.plan, memory = memoryOf(run), model = plan.model;
  facts.textContent = [
    model.name ?? model.family, `${model.layers ?? "?"} layers`, `schedule ${plan.schedule}`,
    `${plan.global_batch} sequences a step in micro-batches of ${plan.micro_batch}`, `ZeRO ${plan.zero_stage}`, plan.optimizer,
  ].filter(Boolean).join(" · ");
  const places = placesOf(run.details);
  box.replaceChildren(...plan.pipelines.map((pipeline, p) => element("div", { class: "pipeline" },
    plan.pipelines.length > 1 ? element("p", {}, `pipeline ${p}: ${pipeline.micro_batches} micro-batches a step`) : null,
    element("div", { class: "stages" }, pipeline.stages.map((stage, s) => stageCard(stage, s, places, memory))))));
  box.append(element("p", { class: "key" }, "Memory: the bar is the largest peak of a measured step, the line what the plan predicts, the whole track the chip's capacity."));
}

function stageCard(stage, s, places, memory) {
  const ranks = stage.replicas.flatMap((replica) => replica.ranks), place = places.get(ranks[0]);
  const chips = [...new Set(ranks.map((rank) => places.get(rank).chip))].join(" + ");
  const [first, last] = stage.layers;
  const also = [
    stage.ministages > 1 && `${stage.ministages} ministages`, stage.recompute && "recompute",
    stage.selective_recompute && "selective recompute", stage.sequence_parallel && "sequence parallel",
    stage.offload && "offload", stage.slack && `slack ${stage.slack}`,
  ].filter(Boolean);
  const layers = stage.ministages > 1 ? `${last - first} layers` : last - first === 1 ? `layer ${first}` : `layers ${first} to ${last - 1}`;
  const replica = stage.replicas[0], cp = replica.token_shares?.length ?? 1;
  const shares = stage.replicas.length > 1 ? `, batch shares ${runLengths(stage.replicas.map((r) => r.batch_share))}` : "";
  return element("article", { class: "stage", colour: place.colour },
    element("h3", {}, `stage ${s}`, element("span", {}, layers)),
    element("p", { class: "facts" }, `${ranks.length} × ${chips} · dp ${stage.replicas.length} · tp ${replica.ranks.length / cp}${cp > 1 ? ` · cp ${cp}` : ""}${shares}`,
      also.length ? ` · ${also.join(" · ")}` : ""),
    element("div", { class: "memory" }, memoryRows(ranks, memory)));
}

function runLengths(values) {
  const found = [];
  for (const value of values) {
    if (found.length && found[found.length - 1][0] === value) found[found.length - 1][1]++;
    else found.push([value, 1]);
  }
  return found.map(([value, count]) => (count > 1 ? `${count} × ${value}` : value)).join(", ");
}

function memoryRows(ranks, memory) {
  let shown = ranks.map((rank) => ({ name: `rank ${rank}`, ...memory(rank) }));
  if (ranks.length > FEW_CHIPS) {
    const fullest = shown.reduce((a, b) => ((b.measured ?? b.predicted ?? 0) / (b.capacity || 1) > (a.measured ?? a.predicted ?? 0) / (a.capacity || 1) ? b : a));
    shown = [{ ...fullest, name: "fullest", of: fullest.name }];
  }
  return shown.flatMap(({ name, of = name, measured, predicted, capacity }) => {
    const share = (size) => `${Math.min(100, (100 * size) / capacity)}%`;
    const title = `${of}: measured ${bytes(measured)}, predicted ${bytes(predicted)}, capacity ${bytes(capacity)}`;
    return [
      element("span", { title }, name),
      element("div", { class: "track", title },
        capacity && measured != null ? element("i", { class: measured > capacity ? "over" : "", style: { width: share(measured) } }) : null,
        capacity && predicted != null ? element("b", { style: { left: share(predicted) } }) : null),
      element("span", { class: "size", title }, `${bytes(measured ?? predicted)}${capacity ? ` of ${bytes(capacity)}` : ""}`),
    ];
  });
}

// --- cluster ---

const BOX = { width: 176, height: 128, gap: 18, chips: 8 };

function drawCluster(box, facts, run) {
  const cluster = run.details.cluster, groups = groupsOf(cluster), places = placesOf(run.details), memory = memoryOf(run);
  const chips = cluster.nodes.reduce((sum, node) => sum + node.ranks.length, 0);
  facts.textContent = `${cluster.name} · ${counted(cluster.nodes.length, "node")} · ${counted(chips, "chip")}${cluster.idle_chips ? ` · ${cluster.idle_chips} more idle` : ""}`;
  const svg = document.createElementNS(SVG, "svg");
  const bars = new Map();
  const wanted = Math.max(1, Math.floor((box.clientWidth + BOX.gap - 4) / (BOX.width + BOX.gap)));
  let x = 2, right = 0;
  const byPlace = Map.groupBy ? Map.groupBy(groups, (g) => g.place) : groupBy(groups, (g) => g.place);
  for (const link of cluster.links) for (const name of link.between) if (!byPlace.has(name)) byPlace.set(name, []);
  // one place: several rows of nodes; several places: beside one another
  const perRow = byPlace.size > 1 ? Infinity : wanted;
  let bottom = 0;
  for (const [name, own] of byPlace) {
    const columns = Math.max(1, Math.min(perRow, own.length)), rows = Math.ceil(own.length / columns);
    own.forEach((group, i) => {
      const left = x + (i % columns) * (BOX.width + BOX.gap), top = 2 + Math.floor(i / columns) * (BOX.height + 34);
      svg.append(...nodeBox(group, left, top, places, memory));
    });
    const width = columns * (BOX.width + BOX.gap) - BOX.gap;
    bars.set(name, { x, width, rows });
    bottom = Math.max(bottom, rows * (BOX.height + 34) + 2);
    x += width + BOX.gap * 2;
    right = x - BOX.gap * 2;
  }
  let height = bottom;
  for (const [name, bar] of bars) {
    if (bar.rows > 1) svg.prepend(shape("line", { class: "wire", x1: bar.x + bar.width / 2, x2: bar.x + bar.width / 2, y1: BOX.height, y2: bottom }));
    svg.append(shape("rect", { class: "place", x: bar.x, y: bottom, width: bar.width, height: 24, rx: 7 }),
      label(bar.x + bar.width / 2, bottom + 16, name || "one fabric, no bottleneck but the NICs", "middle"));
    height = bottom + 26;
  }
  cluster.links.forEach((link, i) => {
    const [a, b] = link.between.map((name) => bars.get(name));
    const y = bottom + 44 + i * 26, from = a.x + a.width / 2 - 6 * i, to = b.x + b.width / 2 + 6 * i;
    const text = `${rate(link.bytes_per_s)}, ${seconds(link.latency_s)}`, half = text.length * 3.2 + 5;
    svg.append(shape("path", { class: "wire", d: `M${from} ${bottom + 24}V${y}H${to}V${bottom + 24}` }),
      shape("rect", { class: "under", x: (from + to) / 2 - half, y: y - 9, width: 2 * half, height: 18 }),
      label((from + to) / 2, y + 4, text, "middle", "dim"));
    height = y + 14;
  });
  svg.setAttribute("width", right + 2);
  svg.setAttribute("height", height);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Cluster ${cluster.name}`);
  box.replaceChildren(svg);
}

const counted = (count, what) => `${count.toLocaleString("en-US")} ${what}${count === 1 ? "" : "s"}`;

function groupBy(items, keyOf) {
  const found = new Map();
  for (const item of items) found.set(keyOf(item), [...(found.get(keyOf(item)) ?? []), item]);
  return found;
}

// Nodes that are alike share a box once there are many.
function groupsOf(cluster) {
  const alike = cluster.nodes.length > 12
    ? groupBy(cluster.nodes, (n) => JSON.stringify([n.chip, n.place, n.ranks.length, n.nics, n.nic_bytes_per_s]))
    : new Map(cluster.nodes.map((node) => [node.name, [node]]));
  return [...alike.values()].map((nodes) => ({
    ...nodes[0], nodes: nodes.length, ranks: nodes.flatMap((n) => n.ranks),
    name: nodes.length > 1 ? `${nodes[0].name} … ${nodes[nodes.length - 1].name}` : nodes[0].name,
  }));
}

function nodeBox(group, x, y, places, memory) {
  const title = group.nodes > 1 ? `${group.nodes} nodes of ${group.ranks.length / group.nodes}` : counted(group.ranks.length, "chip");
  const made = [
    shape("line", { class: "wire", x1: x + BOX.width / 2, x2: x + BOX.width / 2, y1: y + BOX.height, y2: y + BOX.height + 34 }),
    shape("rect", { class: "box", x, y, width: BOX.width, height: BOX.height, rx: 9 }),
    label(x + 11, y + 20, shortened(group.name, 24), "start", "", 600),
    label(x + 11, y + 36, shortened(`${group.vendor} ${group.chip_type} · ${title}`, 27), "start", "dim"),
  ];
  const shown = spread(group.ranks, BOX.chips), size = 30, pitch = 39;
  shown.forEach((rank, i) => {
    const { measured, predicted, capacity } = memory(rank), place = places.get(rank);
    const left = x + 11 + (i % 4) * pitch, top = y + 46 + Math.floor(i / 4) * 36 - (shown.length > 4 ? 2 : -6);
    const share = capacity ? Math.min(1, (measured ?? predicted ?? 0) / capacity) : 0;
    const chip = shape("g", {});
    chip.append(
      shape("rect", { class: "empty", x: left, y: top, width: size, height: size, rx: 5 }),
      shape("rect", { x: left, y: top + size * (1 - share), width: size, height: size * share, rx: share > 0.8 ? 5 : 2, fill: place?.colour ?? "#98a2b3" }),
      shape("rect", { x: left, y: top, width: size, height: size, rx: 5, fill: "none", stroke: place?.colour ?? "#98a2b3", "stroke-width": 1.6 }),
      label(left + size / 2, top + size / 2 + 4, rank, "middle"), // the rank
    );
    const tip = document.createElementNS(SVG, "title");
    tip.textContent = `rank ${rank}, ${place?.where ?? "idle"}: ${bytes(measured ?? predicted)} of ${bytes(capacity)}`;
    chip.append(tip);
    made.push(chip);
  });
  const inside = group.ranks.length > 1 && shown.length <= 4 ? `inside ${rate(group.intra_node_bytes_per_s)}` : "";
  if (inside) made.push(label(x + 11, y + BOX.height - 12, inside, "start", "dim"));
  made.push(label(x + BOX.width / 2 + 6, y + BOX.height + 21, `${group.nics > 1 ? `${group.nics} × ` : ""}${rate(group.nic_bytes_per_s)}`, "start", "dim"));
  return made;
}

function spread(ranks, most) {
  if (ranks.length <= most) return ranks;
  return Array.from({ length: most }, (_, i) => ranks[Math.floor((i * (ranks.length - 1)) / (most - 1))]);
}

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function label(x, y, text, anchor, kind = "", weight = 450) {
  const made = shape("text", { x, y, "text-anchor": anchor, class: kind, "font-weight": weight });
  made.textContent = text;
  return made;
}
