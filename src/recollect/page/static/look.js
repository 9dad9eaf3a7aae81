// The page of a memory at work. All texts of the data become text nodes, never HTML.
(function () {
  "use strict";

  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const chosen = { layer: 0, head: 0, token: 0 };
  const WIDTH = 340, HEIGHT = 150, LEFT = 44, RIGHT = 8, TOP = 10, BOTTOM = 20;

  function element(name, text, attributes = {}) {
    const node = document.createElement(name);
    node.textContent = text;
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  }

  function shape(name, attributes, text = "") {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.textContent = text;
    return node;
  }

  const number = (x) => (x === null || x === undefined ? "–" : String(Number(x.toPrecision(3))));
  const column = (rows, head) => rows.map((row) => row[head]);

  // Bytes of the answers of a layer, [token, key, head]: 127 times the cosine plus 128, and 0 for none.
  const decoded = new Map();
  function answers(layer) {
    if (layer.answers === null) return null;
    if (!decoded.has(layer))
      decoded.set(layer, Uint8Array.from(atob(layer.answers.data), (x) => x.charCodeAt(0)));
    const [bytes, keys] = [decoded.get(layer), layer.answers.keys];
    return (t, key, head) => {
      const byte = bytes[(t * keys + key) * layer.heads + head];
      return byte === 0 ? null : (byte - 128) / 127;
    };
  }

  // One chart: lines over tokens, all heads faint and the chosen one strong.
  function chart(title, xs, lines, own, options = {}) {
    const finite = lines.flat().filter((x) => x !== null);
    if (options.capacity) finite.push(options.capacity);
    const low = options.low ?? Math.min(0, ...finite), high = options.high ?? Math.max(...finite, low + 1e-9);
    const end = Math.max(1, data.tokens.length);
    const x = (v) => LEFT + ((WIDTH - LEFT - RIGHT) * v) / end;
    const y = (v) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (v - low)) / (high - low);
    const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
    for (const value of [low, high]) {
      svg.append(shape("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
      svg.append(shape("text", { x: LEFT - 4, y: y(value) + 4, "text-anchor": "end" }, number(value)));
    }
    svg.append(shape("text", { x: LEFT, y: HEIGHT - 5 }, "0"));
    svg.append(shape("text", { x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, `${end} tokens`));
    const draw = (values, style) => {
      let path = "", open = false;
      values.forEach((value, i) => {
        if (value !== null) path += `${open ? "L" : "M"}${x(xs[i]).toFixed(1)} ${y(value).toFixed(1)}`;
        open = value !== null;
      });
      svg.append(shape("path", { class: style, d: path }));
    };
    lines.forEach((line, i) => i !== own && draw(line, "other"));
    if (lines[own]) draw(lines[own], "own");
    if (options.capacity)
      svg.append(shape("line", { class: "capacity", x1: LEFT, x2: WIDTH - RIGHT, y1: y(options.capacity), y2: y(options.capacity) }));
    const here = x(chosen.token + 1);
    svg.append(shape("line", { class: "here", x1: here, x2: here, y1: TOP, y2: HEIGHT - BOTTOM }));
    const figure = document.createElement("figure");
    figure.append(element("figcaption", title), svg);
    return figure;
  }

  const heads = (rows, count) => Array.from({ length: count }, (_, head) => column(rows, head));

  function show() {
    const layer = data.layers[chosen.layer], { head, token } = chosen;
    const after = data.tokens.map((_, t) => t + 1);
    at("about").textContent = [layer.recipe, `engine ${layer.engine}`, ...layer.findings].join(" · ");
    const surprise = column(layer.curves.surprise, head);
    const largest = Math.max(1e-12, ...surprise.filter((x) => x !== null));
    [...at("tokens").children].forEach((node, t) => {
      node.style.setProperty("--share", (surprise[t] ?? 0) / largest);
      node.setAttribute("aria-pressed", t === token);
      node.title = `token ${t}: surprise ${number(surprise[t])}`;
    });
    at("chosen").textContent = `Token ${token}, “${data.tokens[token]}”, head ${head}`;
    const values = [];
    for (const [name, rows] of Object.entries(layer.curves)) values.push([name, number(rows[token][head])]);
    const index = layer.positions.findLastIndex((p) => p <= token + 1);
    for (const [name, map] of Object.entries(layer.maps)) {
      const of = map.capacity === null ? "" : ` of ${map.capacity}`;
      values.push([name, number(map.values[index][head]) + of]);
    }
    const read = answers(layer), key = layer.answers && (token * layer.answers.keys) / data.tokens.length;
    const last = data.tokens.length - 1;
    if (read) values.push(["answer for its key at the end, cosine", number(read(last, key, head))]);
    at("values").replaceChildren(...values.flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
    const charts = [];
    if (read) {
      const lines = Array.from({ length: layer.heads }, (_, h) => data.tokens.map((_, t) => read(t, key, h)));
      charts.push(chart(`Answer for the key of token ${token}: cosine with its value, after each token`, after, lines, head, { low: -1, high: 1 }));
    }
    for (const [name, rows] of Object.entries(layer.curves)) charts.push(chart(name, after, heads(rows, layer.heads), head));
    for (const [name, map] of Object.entries(layer.maps))
      charts.push(chart(map.capacity === null ? name : `${name}, capacity ${map.capacity} dashed`, layer.positions, heads(map.values, layer.heads), head, { capacity: map.capacity }));
    at("charts").replaceChildren(...charts);
  }

  function fillHeads() {
    const count = data.layers[chosen.layer].heads;
    chosen.head = Math.min(chosen.head, count - 1);
    at("head").replaceChildren(...Array.from({ length: count }, (_, h) => element("option", h, { value: h })));
    at("head").value = chosen.head;
  }

  data.layers.forEach((layer, i) => at("layer").append(element("option", layer.name, { value: i })));
  data.tokens.forEach((token, t) => {
    const button = element("button", token, { type: "button", class: "token" });
    button.addEventListener("click", () => { chosen.token = t; show(); });
    at("tokens").append(button);
  });
  at("layer").addEventListener("change", (e) => { chosen.layer = Number(e.target.value); fillHeads(); show(); });
  at("head").addEventListener("change", (e) => { chosen.head = Number(e.target.value); show(); });
  fillHeads();
  show();
})();
