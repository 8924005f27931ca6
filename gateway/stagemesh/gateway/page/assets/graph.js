/** The drawing of a pipeline: its stages with their replicas and load, and the connectors of its edges. */

import { layOut } from "./layout.js";

const STAGE = { width: 148, height: 84 };
const END = { width: 66, height: 30 };
const INPUT = "@input";
/** The replicas of a stage that have a dot. Its text counts all of them. */
const MAX_DOTS = 4;

/** Whether the page is so narrow that the pipeline is drawn from the top to the bottom. */
export const narrow = matchMedia("(max-width: 40rem)");

/** The drawing. It is made again if the stages, the edges or the direction change. Otherwise only its texts change. */
export class Graph {
  #element;
  #key = "";
  #stages = new Map();
  #edges = new Map();

  constructor(element) {
    this.#element = element;
  }

  /** Shows the state of a pipeline. */
  show(pipeline) {
    const isVertical = narrow.matches;
    const names = [pipeline.stages, pipeline.edges, pipeline.outputs].map((list) => list.map((each) => each.name));
    const key = JSON.stringify([pipeline.pipeline, names, isVertical]);
    if (key !== this.#key) {
      this.#key = key;
      this.#draw(pipeline, isVertical);
    }
    for (const stage of pipeline.stages) this.#stages.get(stage.name)(stage);
    for (const edge of pipeline.edges) this.#edges.get(edge.name)(edge, pipeline);
  }

  #draw(pipeline, isVertical) {
    const { nodes, edges } = findParts(pipeline);
    const sized = nodes.map((node) => {
      const { width, height } = node.stage ? STAGE : END;
      return { ...node, length: isVertical ? height : width, breadth: isVertical ? width : height };
    });
    const layout = layOut(sized, edges, isVertical ? { layer: 44, node: 14 } : { layer: 62, node: 18 });
    const [width, height] = isVertical ? [layout.breadth, layout.length] : [layout.length, layout.breadth];
    const svg = create("svg", { viewBox: `-2 -2 ${width + 4} ${height + 4}`, width: width + 4, role: "list" });
    svg.setAttribute("aria-label", `Stages of ${pipeline.pipeline}`);
    this.#stages.clear();
    this.#edges.clear();
    edges.forEach((edge, index) => {
      const { group, update } = drawEdge(layout.paths[index], isVertical);
      svg.append(group);
      if (edge.name) this.#edges.set(edge.name, update);
    });
    for (const node of sized) {
      const { u, v } = layout.places.get(node.id);
      const group = create("g", { transform: isVertical ? `translate(${v} ${u})` : `translate(${u} ${v})` });
      svg.append(group);
      if (node.stage) this.#stages.set(node.stage, drawStage(group, node.stage));
      else drawEnd(group, node.label);
    }
    this.#element.replaceChildren(svg);
  }
}

/** Returns the nodes and the edges to draw: the stages, the input of the client, and the outputs. */
function findParts({ stages, edges, outputs }) {
  const fed = new Set(edges.filter((edge) => edge.from !== INPUT).map((edge) => edge.to));
  const prompted = stages.filter((stage) => !fed.has(stage.name) && !edges.some((edge) => edge.to === stage.name));
  const end = (output) => `output ${output.name}`;
  return {
    nodes: [
      { id: INPUT, label: "input" },
      ...stages.map(({ name }) => ({ id: name, stage: name })),
      ...outputs.map((output) => ({ id: end(output), label: output.name })),
    ],
    edges: [
      ...prompted.map((stage) => ({ from: INPUT, to: stage.name })),
      ...edges.map(({ name, from, to }) => ({ name, from, to })),
      ...outputs.map((output) => ({ from: output.stage, to: end(output) })),
    ],
  };
}

function drawEnd(group, label) {
  group.append(
    create("rect", { class: "end", ...END, rx: END.height / 2 }),
    text(label, { class: "end-label", x: END.width / 2, y: END.height / 2 }),
  );
}

/** Draws a stage. Returns the function that shows its state. */
function drawStage(group, name) {
  const detail = text("", { class: "detail", x: 14, y: 44 });
  const load = text("", { class: "load", x: 14, y: 69 });
  const dots = create("g", {});
  const title = create("title", {});
  group.setAttribute("role", "listitem");
  group.append(
    title,
    create("rect", { class: "stage", ...STAGE, rx: 12 }),
    text(shorten(name, 15), { class: "name", x: 14, y: 26 }),
    detail,
    load,
    dots,
  );
  return ({ engine, replicas }) => {
    const sum = (field) => replicas.reduce((total, { load: each }) => total + (each?.[field] ?? 0), 0);
    const running = sum("running");
    const queued = sum("queued");
    const ready = replicas.filter((replica) => replica.state === "ready").length;
    Object.assign(group.dataset, { stage: name, running, queued, ready });
    group.classList.toggle("busy", running + queued > 0);
    detail.textContent = replicas.length > 1 ? `${engine} × ${replicas.length}` : engine;
    load.textContent = ready ? loadText(running, queued) : (replicas[0]?.state ?? "no replica");
    const readiness = `${ready} of ${replicas.length} replicas ready`;
    group.setAttribute("aria-label", `${name}: ${readiness}, ${loadText(running, queued)}`);
    title.textContent = replicas.map((each) => `${each.name}: ${each.state} ${each.detail}`.trim()).join("\n");
    const shown = replicas.slice(0, MAX_DOTS);
    dots.replaceChildren(
      ...shown.map(({ state }, index) => {
        return create("circle", { class: state, cx: STAGE.width - 16 - 12 * index, cy: 21, r: 4 });
      }),
    );
  };
}

function loadText(running, queued) {
  return queued ? `${running} running, ${queued} queued` : running ? `${running} running` : "idle";
}

/** Draws an edge. Returns its group, and the function that shows its state. */
function drawEdge(path, isVertical) {
  const point = (u, v) => (isVertical ? `${v} ${u}` : `${u} ${v}`);
  const middle = (node) => node.v + node.breadth / 2;
  let line = "";
  path.slice(1).forEach((to, index) => {
    const from = path[index];
    const begin = from.u + from.length;
    const half = (begin + to.u) / 2;
    line += index ? `L${point(begin, middle(from))}` : `M${point(begin, middle(from))}`;
    line += `C${point(half, middle(from))} ${point(half, middle(to))} ${point(to.u, middle(to))}`;
  });
  const [from, to] = path;
  const [u, v] = [(from.u + from.length + to.u) / 2, (middle(from) + middle(to)) / 2];
  const label = text("", { class: "connector", x: isVertical ? v : u, y: isVertical ? u : v });
  const title = create("title", {});
  const group = create("g", { class: "edge" });
  group.append(title, create("path", { d: line }), label);
  return {
    group,
    update: ({ name, from: producer, connector, links }, { stages }) => {
      const used = [...new Set(links.map((link) => link.connector).filter(Boolean))];
      label.textContent = used.join(", ") || (links.length ? connector : "");
      title.textContent = [name, ...links.map((link) => link.error).filter(Boolean)].join("\n");
      Object.assign(group.dataset, { edge: name, connectors: used.join(" ") });
      group.classList.toggle("failed", links.some((link) => link.error));
      const replicas = stages.find((stage) => stage.name === producer)?.replicas ?? [];
      group.classList.toggle("busy", replicas.some(({ load }) => load?.running));
    },
  };
}

function shorten(name, length) {
  return name.length > length ? `${name.slice(0, length - 1)}…` : name;
}

function text(content, attributes) {
  const element = create("text", attributes);
  element.textContent = content;
  return element;
}

function create(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
