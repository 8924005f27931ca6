/** The layout of a directed graph without cycles, in layers. */

/**
 * Returns the layer, the place and the size of each node, and the points of each edge.
 *
 * - A node is {id, length, breadth}: its size along the layers, and across them.
 * - An edge is {from, to}: the ids of two nodes.
 * - `gap` is {layer, node}: the space between two layers, and between two nodes of a layer.
 *
 * A node is in the layer after the last of the nodes before it: its layer is the length of the longest path to it. An
 * edge over several layers bends around their nodes. `u` runs along the layers, and `v` across them.
 */
export function layOut(nodes, edges, gap) {
  const layerOf = findLayers(nodes, edges);
  const places = new Map(nodes.map((node) => [node.id, { ...node, layer: layerOf.get(node.id) }]));
  const chains = edges.map((edge) => addBends(edge, places));
  const layers = sortLayers(places, chains);
  place(layers, gap);
  const last = layers.at(-1);
  return {
    length: last[0].u + Math.max(...last.map((node) => node.length)),
    breadth: Math.max(...layers.flat().map((node) => node.v + node.breadth)),
    places,
    paths: chains.map((chain) => chain.map((id) => places.get(id))),
  };
}

/** Returns the length of the longest path to each node. */
function findLayers(nodes, edges) {
  const layers = new Map(nodes.map((node) => [node.id, 0]));
  // No path has more edges than there are nodes.
  for (let round = 0; round < nodes.length; round++) {
    for (const { from, to } of edges) layers.set(to, Math.max(layers.get(to), layers.get(from) + 1));
  }
  return layers;
}

/** Adds a small node in each layer that an edge crosses. Returns the ids along the edge. */
function addBends({ from, to }, places) {
  const chain = [from];
  for (let layer = places.get(from).layer + 1; layer < places.get(to).layer; layer++) {
    const id = `${from} ${to} ${layer}`;
    places.set(id, { id, layer, length: 0, breadth: 12 });
    chain.push(id);
  }
  return [...chain, to];
}

/** Returns the nodes of each layer, sorted by the mean place of the nodes before them, so that few edges cross. */
function sortLayers(places, chains) {
  const layers = [];
  for (const node of places.values()) (layers[node.layer] ??= []).push(node);
  const before = new Map([...places.keys()].map((id) => [id, []]));
  for (const chain of chains) chain.slice(1).forEach((id, index) => before.get(id).push(chain[index]));
  const rank = new Map();
  for (const layer of layers) {
    const mean = (node) => {
      const ranks = before.get(node.id).map((id) => rank.get(id));
      return ranks.length ? ranks.reduce((sum, each) => sum + each, 0) / ranks.length : 0;
    };
    const means = new Map(layer.map((node) => [node, mean(node)]));
    layer.sort((a, b) => means.get(a) - means.get(b));
    layer.forEach((node, index) => rank.set(node.id, (index + 1) / (layer.length + 1)));
  }
  return layers;
}

/** Sets `u` and `v` of each node. Centers each layer. */
function place(layers, gap) {
  const breadths = layers.map((layer) => layer.reduce((sum, node) => sum + node.breadth + gap.node, -gap.node));
  const breadth = Math.max(...breadths);
  let u = 0;
  layers.forEach((layer, index) => {
    const length = Math.max(...layer.map((node) => node.length));
    let v = (breadth - breadths[index]) / 2;
    for (const node of layer) {
      Object.assign(node, { u, v });
      // Edges cross the layer in a straight line.
      if (node.length === 0) node.length = length;
      v += node.breadth + gap.node;
    }
    u += length + gap.layer;
  });
}
