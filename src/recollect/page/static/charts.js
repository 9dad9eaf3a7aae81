// Drawings of the memory at work: a heat map and line charts, as SVG whose colours the style gives.
(function (R) {
  "use strict";

  const SVG = "http://www.w3.org/2000/svg";

  // An element with attributes and children; attributes that begin with "on" are listeners.
  R.element = function (name, attributes = {}, ...children) {
    return fill(document.createElement(name), attributes, children);
  };

  function drawn(name, attributes = {}, ...children) {
    return fill(document.createElementNS(SVG, name), attributes, children);
  }

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value !== null) node.setAttribute(name, String(value));
    }
    node.append(...children);
    return node;
  }

  const short = (x) => Number(x.toPrecision(3)).toString();
  R.short = short;

  // -- the matrix ---------------------------------------------------------------------------------

  R.HeatMap = class {
    constructor(size, label) {
      this.cells = [];
      this.node = drawn("svg", { viewBox: `0 0 ${size} ${size}`, class: "map", role: "img", "aria-label": label });
      for (let i = 0; i < size * size; i++) {
        const [x, y] = [i % size, Math.floor(i / size)];
        const cell = drawn("rect", { x: x + 0.03, y: y + 0.03, width: 0.94, height: 0.94 });
        this.cells.push(cell);
        this.node.append(cell);
      }
    }

    // Strength of colour is |entry| beside the largest; the sign is the colour, and a dot if negative.
    show(W, label) {
      const largest = W.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
      W.forEach((x, i) => {
        const share = largest > 0 && Number.isFinite(x) ? Math.abs(x) / largest : 0;
        this.cells[i].setAttribute("class", x < 0 ? "negative" : "positive");
        this.cells[i].setAttribute("fill-opacity", (0.06 + 0.94 * share).toFixed(3));
      });
      this.node.setAttribute("aria-label", label);
      return largest;
    }
  };

  // -- lines ----------------------------------------------------------------------------------------

  const WIDE = 320;
  const HIGH = 150;
  const EDGE = { left: 36, right: 8, top: 10, bottom: 30 };

  // Axes once, lines whenever `show` is called.
  R.LineChart = class {
    constructor({ label, x, y }) {
      this.x = x; // {from, to, label}
      this.y = y; // {label, most}: most of the axis, or null for what the lines need
      this.node = drawn("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, class: "chart", role: "img", "aria-label": label });
    }

    // lines: [{points: [[x, y]], kind}]; marks: [{x, text}]; now: an x, or null.
    show({ lines, marks = [], now = null, label }) {
      const all = lines.flatMap((line) => line.points.map((point) => point[1])).filter(Number.isFinite);
      const most = this.y.most ?? Math.min(4, Math.ceil(2 * Math.max(1, ...all)) / 2);
      const across = (x) =>
        EDGE.left + ((x - this.x.from) / (this.x.to - this.x.from)) * (WIDE - EDGE.left - EDGE.right);
      const up = (y) => {
        const share = Number.isFinite(y) ? Math.min(y / most, 1.02) : 1.02; // beyond: at the edge
        return HIGH - EDGE.bottom - share * (HIGH - EDGE.top - EDGE.bottom);
      };
      const parts = [0, most / 2, most].flatMap((y) => [
        drawn("line", { x1: across(this.x.from), x2: across(this.x.to), y1: up(y), y2: up(y), class: "grid" }),
        drawn("text", { x: EDGE.left - 5, y: up(y) + 3.5, class: "tick end" }, this.y.percent ? `${100 * y}%` : short(y)),
      ]);
      for (const x of [this.x.from, (this.x.from + this.x.to) / 2, this.x.to]) {
        parts.push(drawn("text", { x: across(x), y: HIGH - EDGE.bottom + 12, class: "tick middle" }, short(x)));
      }
      parts.push(drawn("text", { x: across((this.x.from + this.x.to) / 2), y: HIGH - 4, class: "tick middle" }, this.x.label));
      for (const { x, text } of marks) {
        parts.push(drawn("line", { x1: across(x), x2: across(x), y1: up(0), y2: up(most), class: "mark" }));
        parts.push(drawn("text", { x: across(x) + 4, y: up(0) - 4, class: "tick" }, text));
      }
      if (now !== null) {
        parts.push(drawn("line", { x1: across(now), x2: across(now), y1: up(0), y2: up(most), class: "now" }));
      }
      for (const { points, kind } of lines) {
        const path = points.map(([x, y]) => `${across(x).toFixed(1)},${up(y).toFixed(1)}`).join(" ");
        parts.push(drawn("polyline", { points: path, class: `line ${kind}` }));
      }
      this.node.replaceChildren(...parts);
      this.node.setAttribute("aria-label", label);
    }
  };
})((globalThis.recollect ??= {}));
