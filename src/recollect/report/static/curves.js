// Curves that are read off: by the pointer, a tap, or the arrow keys. The drawing is an image; what
// stands beside it as data says where its axes lie in it, and which points its curves have. Without
// this script the drawing and the table of its values stand as they are.
(function (R) {
  "use strict";

  const HINT = "Point at the drawing, or focus it and press ← and →, to read values.";
  const scaled = (axis, value) => (axis.log ? Math.log(value) : value);

  // Where a value lies on an axis: 0 at its low end, 1 at its high end.
  R.share = function (axis, value) {
    const [low, high] = [scaled(axis, axis.low), scaled(axis, axis.high)];
    return high === low ? 0.5 : (scaled(axis, value) - low) / (high - low);
  };

  const drawn = (plot, x, y) =>
    y !== null && Number.isFinite(R.share(plot.x, x)) && Number.isFinite(R.share(plot.y, y));

  // Of all curves the point nearest to a place, as {curve, point}; null where there is none.
  // across, up: of the place, as shares of the axes. wide: the axes' width by their height.
  R.nearest = function (plot, across, up, wide = 1) {
    let [best, least] = [null, Infinity];
    plot.curves.forEach((line, curve) =>
      line.x.forEach((x, point) => {
        if (!drawn(plot, x, line.y[point])) return;
        const away = Math.hypot((R.share(plot.x, x) - across) * wide, R.share(plot.y, line.y[point]) - up);
        if (away < least) [best, least] = [{ curve, point }, away];
      }),
    );
    return best;
  };

  // What every curve says at x, or where it has a point nearest to it:
  // [{name, colour, x, y, low, high, here}]; here is whether that point is at x itself.
  R.readings = function (plot, x) {
    const wanted = R.share(plot.x, x);
    return plot.curves.flatMap(({ name, colour, ...line }) => {
      let [best, least] = [-1, Infinity];
      line.x.forEach((at, point) => {
        const away = drawn(plot, at, line.y[point]) ? Math.abs(R.share(plot.x, at) - wanted) : Infinity;
        if (away < least) [best, least] = [point, away];
      });
      if (best < 0) return [];
      const [low, high] = [line.low?.[best] ?? null, line.high?.[best] ?? null];
      return [{ name, colour, x: line.x[best], y: line.y[best], low, high, here: line.x[best] === x }];
    });
  };

  // Every x at which a curve has a point, in order.
  R.stops = function (plot) {
    const found = plot.curves.flatMap((line) => line.x.filter((x, i) => drawn(plot, x, line.y[i])));
    return [...new Set(found)].sort((a, b) => a - b);
  };

  R.told = function (number) {
    const size = Math.abs(number);
    if (size !== 0 && (size < 1e-4 || size >= 1e12)) return number.toExponential(3);
    return number.toLocaleString("en", { maximumSignificantDigits: size >= 1e4 ? 12 : 4 });
  };

  R.saidOf = function (one) {
    const band = one.low === null || one.low === one.high ? "" : ` (${R.told(one.low)} … ${R.told(one.high)})`;
    return R.told(one.y) + band;
  };

  // As the page chooses between the two drawings.
  R.narrow = () => matchMedia("(max-width: 40em)");

  R.bounds = (plot) => (R.narrow().matches ? plot.narrow_bounds : plot.bounds);

  function made(name, attributes, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
    node.append(...children);
    return node;
  }

  class Reader {
    constructor(holder) {
      this.plots = JSON.parse(holder.querySelector(".plots").textContent);
      this.drawing = holder.querySelector(".drawing");
      this.reading = holder.querySelector(".reading");
      this.place = { plot: 0, stop: -1 };
      const label = `Values of: ${this.drawing.querySelector("img").getAttribute("alt")}`;
      this.pointer = made("div", { class: "pointer", role: "slider", tabindex: 0, "aria-label": label });
      this.drawing.append(this.pointer);
      this.pointer.addEventListener("pointermove", (event) => this.point(event));
      this.pointer.addEventListener("pointerdown", (event) => this.point(event));
      this.pointer.addEventListener("keydown", (event) => this.press(event));
      R.narrow().addEventListener("change", () => this.clear());
      this.clear();
    }

    clear() {
      this.place.stop = -1;
      this.pointer.replaceChildren();
      this.reading.replaceChildren(made("span", { class: "hint" }, HINT));
      this.announce(0, "no place chosen");
    }

    announce(stop, text) {
      const most = Math.max(0, R.stops(this.plots[this.place.plot]).length - 1);
      const said = { valuemin: 0, valuemax: most, valuenow: stop, valuetext: text };
      for (const [key, value] of Object.entries(said)) this.pointer.setAttribute(`aria-${key}`, String(value));
    }

    point(event) {
      const frame = this.pointer.getBoundingClientRect();
      const x = (event.clientX - frame.left) / frame.width;
      const y = (event.clientY - frame.top) / frame.height;
      this.plots.forEach((plot, index) => {
        const [left, top, width, height] = R.bounds(plot);
        const [across, up] = [(x - left) / width, 1 - (y - top) / height];
        if (across < -0.03 || across > 1.03 || up < -0.05 || up > 1.05) return;
        const wide = (width * frame.width) / (height * frame.height);
        const found = R.nearest(plot, across, up, wide);
        if (found !== null) this.show(index, plot.curves[found.curve].x[found.point], found.curve);
      });
    }

    press(event) {
      const stops = R.stops(this.plots[this.place.plot]);
      const { plot, stop } = this.place;
      const last = stops.length - 1;
      const moves = {
        ArrowRight: () => [plot, Math.min(last, stop + 1)],
        ArrowLeft: () => [plot, stop < 0 ? last : Math.max(0, stop - 1)],
        Home: () => [plot, 0],
        End: () => [plot, last],
        ArrowDown: () => [Math.min(this.plots.length - 1, plot + 1), 0],
        ArrowUp: () => [Math.max(0, plot - 1), 0],
      };
      if (event.key === "Escape") return this.clear();
      if (!(event.key in moves)) return;
      event.preventDefault();
      const [to, at] = moves[event.key]();
      const there = R.stops(this.plots[to]);
      if (there.length) this.show(to, there[at], null);
    }

    show(index, x, nearest) {
      const plot = this.plots[index];
      const readings = R.readings(plot, x);
      const [left, top, width, height] = R.bounds(plot);
      const across = (at) => 100 * (left + width * R.share(plot.x, at));
      const up = (y) => 100 * (top + height * (1 - R.share(plot.y, y)));
      const at = `left: ${across(x)}%; top: ${100 * top}%; height: ${100 * height}%`;
      const dots = readings.map((one) =>
        made("div", { class: "dot", style: `left: ${across(one.x)}%; top: ${up(one.y)}%; background: ${one.colour}` }),
      );
      this.pointer.replaceChildren(made("div", { class: "rule", style: at }), ...dots);
      const name = nearest === null ? null : plot.curves[nearest].name;
      const lines = readings.map((one) => {
        const where = one.here ? "" : ` at ${R.told(one.x)}`;
        const kind = one.name === name ? { class: "nearest" } : {};
        const swatch = made("span", { class: "swatch", style: `background: ${one.colour}` });
        return made("li", kind, swatch, `${one.name} ${R.saidOf(one)}${where}`);
      });
      for (const [name, y] of plot.baselines) lines.push(made("li", {}, made("span", { class: "swatch" }), `${name} ${R.told(y)}`));
      const head = [plot.title, `${plot.x.label} ${R.told(x)}`, plot.y.label].filter(Boolean).join(" · ");
      this.reading.replaceChildren(head, made("ul", {}, ...lines));
      this.place = { plot: index, stop: R.stops(plot).indexOf(x) };
      const values = readings.map((one) => `${one.name} ${R.saidOf(one)}${one.here ? "" : ` at ${R.told(one.x)}`}`);
      this.announce(this.place.stop, `${head}: ${values.join(", ")}`);
    }
  }

  R.startCurves = () => document.querySelectorAll(".curves").forEach((holder) => new Reader(holder));
})((globalThis.recollectReport ??= {}));
