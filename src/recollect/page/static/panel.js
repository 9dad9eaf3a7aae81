// One recipe of the page: its knobs and what it is on one side, a memory at work on the other.
(function (R) {
  "use strict";

  const COUNT = 48; // associations that there are to write
  const make = R.element;

  // A label above what it names.
  function field(text, control, className = "field") {
    return make("div", { class: className }, make("label", { for: control.getAttribute("id") }, text), control);
  }

  // Options [value, text] or [group, [[value, text]]]; the listener is told the value chosen.
  function select(id, options, chosen) {
    const node = make("select", { id, onchange: () => chosen(node.value) });
    const one = ([value, text]) =>
      Array.isArray(text)
        ? make("optgroup", { label: value }, ...text.map(one))
        : make("option", { value }, text);
    node.append(...options.map(one));
    return node;
  }

  function slider(id, { min, max, step }, moved) {
    const node = make("input", { id, type: "range", min, max, step, oninput: () => moved(Number(node.value)) });
    return node;
  }

  const SLIDERS = {
    lr: { text: "step η", min: 0, max: 2, step: 0.01 },
    decay: { text: "decay α", min: 0.5, max: 1, step: 0.005 },
    momentum: { text: "momentum θ", min: 0, max: 0.95, step: 0.01 },
    window: { text: "window c", min: 1, max: 16, step: 1 },
  };

  // -- one recipe -----------------------------------------------------------------------------------

  Object.assign(R, { COUNT, field, select, slider });

  R.Panel = class {
    constructor(app, letter, { recipe, preset }) {
      Object.assign(this, { app, letter, table: app.table, knobs: new Map(), sliders: new Map() });
      this.id = (name) => `${letter}-${name}`;
      const knobs = make("div", { class: "turned" }, this.system(), this.status(), this.makeKnobs());
      const work = make("div", { class: "work" }, ...this.makeWork());
      const told = make("div", { class: "told" }, this.makeSaid(), this.makeCode());
      this.title = make("h2", {});
      this.node = make("section", { class: "panel", id: this.id("panel"), "aria-label": `Recipe ${letter}` },
        this.title, make("div", { class: "halves" }, knobs, work, told));
      this.set(recipe, preset);
    }

    system() {
      const families = new Map();
      for (const { name, title, family } of this.table.data.presets) {
        families.set(family, [...(families.get(family) ?? []), [name, title]]);
      }
      this.presets = select(this.id("system"), [["", "none: a recipe of your own"], ...families], (name) => {
        if (name !== "") this.set(this.table.ofPreset(name), name);
      });
      return field("Start from a system", this.presets);
    }

    status() {
      this.about = make("p", { class: "status", id: this.id("status"), role: "status" });
      this.problem = make("div", { class: "error", id: this.id("error"), role: "alert" });
      return make("div", {}, this.about, this.problem);
    }

    makeKnobs() {
      const all = this.table.data.choices.map(({ name, asks, members }) => {
        const options = members.map((member) => [member.name, member.name]);
        const main = select(this.id(name), options, (member) => this.turn(name, this.table.first(name, member)));
        main.setAttribute("aria-describedby", this.id(`${name}-asks`));
        main.setAttribute("aria-label", name);
        const fields = make("div", { class: "options" });
        this.knobs.set(name, { main, fields });
        return make("fieldset", { class: "knob" }, make("legend", {}, name),
          make("p", { class: "asks", id: this.id(`${name}-asks`) }, asks), main, fields);
      });
      return make("div", { class: "knobs" }, ...all);
    }

    makeSaid() {
      this.said = make("div", { id: this.id("said") });
      return make("div", {}, make("h3", {}, "What it is"), this.said);
    }

    makeCode() {
      this.code = make("pre", { id: this.id("code"), tabindex: "0", "aria-label": "The recipe as Python" });
      this.copied = make("p", { class: "status", id: this.id("copied"), role: "status" });
      const button = (name, text, what) =>
        make("button", { type: "button", id: this.id(name), onclick: () => this.copy(what(), text) }, `Copy as ${text}`);
      this.tomlButton = button("toml", "TOML", () => this.table.toml(this.recipe));
      return make("div", {}, make("h3", {}, "As code"), this.code,
        make("div", { class: "bar" }, button("python", "Python", () => this.table.python(this.recipe)),
          this.tomlButton, button("link", "link", () => this.app.link(this))), this.copied);
    }

    makeWork() {
      this.runs = make("p", { class: "status", id: this.id("runs") });
      const sliders = Object.entries(SLIDERS).map(([name, { text, ...range }]) => {
        const node = slider(this.id(name), range, (value) => this.slide(name, value));
        const shown = make("output", { for: this.id(name) });
        this.sliders.set(name, { node, shown });
        return make("div", { class: "field" }, make("label", { for: this.id(name) }, `${text} `, shown), node);
      });
      this.map = new R.HeatMap(R.SIZE, "");
      const along = { from: 0, to: COUNT, label: "pairs written" };
      this.errors = new R.LineChart({ label: "", x: along, y: { most: null } });
      this.shares = new R.LineChart({ label: "", x: along, y: { most: 1, percent: true } });
      this.ages = new R.LineChart({ label: "", x: { from: 0, to: COUNT, label: "pairs written since" }, y: { most: null } });
      const figure = (picture, title, ...caption) =>
        make("figure", {}, make("h4", {}, title), picture.node, make("figcaption", {}, ...caption));
      const key = (kind, text) => make("span", {}, make("span", { class: kind, "aria-hidden": "true" }), `${text} `);
      this.largest = make("span", {});
      this.now = make("p", { class: "status", id: this.id("now"), role: "status" });
      const button = (name, text, by) =>
        make("button", { type: "button", id: this.id(name), onclick: () => this.app.go(this.app.written + by) }, text);
      const steps = make("div", { class: "bar" }, button("next", "Write one", 1), button("back", "Take one back", -1));
      return [make("h3", {}, "The memory at work"), this.runs, make("div", { class: "sliders" }, ...sliders), steps, this.now,
        make("div", { class: "pictures" },
          figure(this.map, "W, rows are values, columns keys", key("square", "above 0"), key("square negative", "below 0"), this.largest),
          figure(this.errors, "Error of each pair, ‖W k − v‖", key("key", "before its write"), key("key other", "after it")),
          figure(this.shares, "Pairs recalled, of those written", "its value is the nearest of all; dotted: as many pairs as features"),
          figure(this.ages, "Forgetting: error by age", "of every pair that stands, now; values have length 1, so 1 is nothing kept"))];
    }

    // -- turning ------------------------------------------------------------------------------------

    turn(choice, member) {
      this.set({ ...this.recipe, [choice]: member }, this.preset, choice);
    }

    set(recipe, preset = null) {
      const before = this.spec === undefined ? null : R.keyOf(this.spec);
      Object.assign(this, { recipe, preset });
      this.result = this.table.result(recipe, preset);
      this.preset = this.result.presets.some((one) => one.name === preset) ? preset : this.result.presets[0]?.name ?? null;
      this.spec = R.spec(recipe);
      if (before !== R.keyOf(this.spec)) this.numbers = R.startingNumbers(this.spec);
      this.showRecipe();
      this.run();
      this.app.changed();
    }

    slide(name, value) {
      this.numbers[name] = value;
      this.run();
    }

    // -- what it is -----------------------------------------------------------------------------------

    showRecipe() {
      const { presets, near, lines, error } = this.result;
      const own = presets.find((one) => one.name === this.preset);
      this.title.textContent = own === undefined ? `Recipe ${this.letter.toUpperCase()}` : own.title;
      this.presets.value = this.preset ?? "";
      const beside = near.slice(0, 4).join(", ") + (near.length > 4 ? ` and ${near.length - 4} more` : "");
      this.about.textContent = own !== undefined
        ? own.summary
        : near.length > 0 ? `One knob from ${beside}.` : "More than one knob from every system of the zoo.";
      this.problem.replaceChildren(...(error === null ? [] : [make("strong", {}, "These do not fit: "), error]));
      for (const choice of this.table.choices) this.showKnob(choice);
      const origin = own === undefined ? [] : [["from", [own.source]], ["fidelity", own.fidelity]];
      this.said.replaceChildren(this.explained(lines === null ? null : [...lines, ...origin], error));
      this.code.textContent = this.table.python(this.recipe);
      const toml = this.table.toml(this.recipe);
      this.tomlButton.disabled = toml === null;
      this.tomlButton.setAttribute("title", toml === null ? "A field holds None, which TOML cannot say: copy as Python" : "");
      this.copied.textContent = "";
      const missing = this.spec.replaced.join(", ");
      this.runs.textContent = missing === ""
        ? "This recipe itself, on a matrix of 16 × 16, its numbers the same at every token."
        : `This page runs matrix memories only. In place of ${missing} it takes the default: what moves here is not this recipe.`;
    }

    showKnob(choice) {
      const { main, fields } = this.knobs.get(choice);
      const member = this.recipe[choice];
      const { members } = this.table.choice(choice);
      members.forEach(({ name, first }, i) => {
        const here = name === member.member;
        const other = this.table.choice(choice).settings[first];
        const option = main.options[i];
        option.textContent = name + (here ? "" : this.hint({ ...this.recipe, [choice]: other }));
      });
      main.value = member.member;
      const { fields: all, says } = this.table.member(choice, member.member);
      main.setAttribute("title", says);
      const active = document.activeElement?.getAttribute?.("id") ?? null;
      fields.replaceChildren(...all.map(([name, values]) => this.option(choice, member, name, values)));
      if (active !== null && active.startsWith(this.id(`${choice}-`))) document.getElementById(active)?.focus();
    }

    // What is known of a turn before it is made.
    hint(recipe) {
      const { lines, error } = this.table.result(recipe);
      if (error !== null) return " – does not fit";
      return lines === null ? " – not on this page" : "";
    }

    option(choice, member, name, values) {
      const all = values.some((value) => R.keyOf(value) === R.keyOf(member[name])) ? values : [member[name], ...values];
      const id = this.id(`${choice}-${name}`);
      const options = all.map((value, i) => {
        const here = R.keyOf(value) === R.keyOf(member[name]);
        const turned = { ...this.recipe, [choice]: { ...member, [name]: value } };
        const text = typeof value === "string" ? value : this.table.brief(value);
        return [String(i), text + (here ? "" : this.hint(turned))];
      });
      const node = select(id, options, (i) => this.turn(choice, { ...member, [name]: all[Number(i)] }));
      node.value = String(all.findIndex((value) => R.keyOf(value) === R.keyOf(member[name])));
      node.setAttribute("aria-label", `${choice}: ${name}`);
      return field(name, node);
    }

    explained(lines, error) {
      if (error !== null) return make("p", {}, "Nothing: the choices contradict each other. Turn one of them.");
      if (lines === null) {
        return make("p", { class: "unknown" }, "The page holds every system and its neighbours by one knob, and this " +
          "recipe is further away. Copy it as TOML, and recollect explain FILE.toml says what it is.");
      }
      const mono = new Set(["problem", "write", "read"]);
      const parts = lines.flatMap(([label, block]) => [
        make("dt", {}, label),
        make("dd", { class: mono.has(label) ? "equation" : "" }, ...block.map((line) => make("p", {}, line))),
      ]);
      return make("dl", { class: "says" }, ...parts);
    }

    async copy(text, what) {
      this.code.textContent = text;
      this.code.setAttribute("aria-label", `The recipe as ${what}`);
      try {
        await navigator.clipboard.writeText(text);
        this.copied.textContent = `Copied as ${what}.`;
      } catch {
        this.copied.textContent = "The browser does not let this page copy: select the text above.";
      }
    }

    // -- at work ----------------------------------------------------------------------------------------

    run() {
      const fixed = {
        lr: this.spec.fixed.lr !== undefined,
        decay: this.spec.when === "never" || this.spec.fixed.decay !== undefined,
        momentum: !this.spec.momentum || this.spec.fixed.momentum !== undefined,
        window: this.spec.window === 1,
      };
      for (const [name, { node, shown }] of this.sliders) {
        node.value = String(this.numbers[name]);
        node.disabled = fixed[name];
        shown.textContent = R.short(this.numbers[name]) + (fixed[name] ? " (by the recipe)" : "");
      }
      this.steps = R.journey(this.spec, this.numbers, this.app.pairs);
      this.showStep();
    }

    showStep() {
      const n = this.app.written;
      const at = this.steps[n];
      const after = this.steps.slice(1);
      const upTo = (name) => after.map((step, t) => [t + 1, step[name]]);
      const diverged = at.W.some((x) => !(Math.abs(x) < 1e6));
      const largest = R.short(this.map.show(at.W, `W after ${n} pairs`));
      this.largest.textContent = `largest ${largest}`;
      const name = (x) => (Number.isFinite(x) ? R.short(Math.abs(x) < 1e-9 ? 0 : x) : "beyond every number");
      const said = n === 0 ? "Nothing is written yet."
        : `After ${n} of ${COUNT}: the error of this pair went from ${name(at.before)} to ${name(at.after)}; ` +
          `${at.found.filter((one) => one.right).length} of ${at.found.length} pairs are recalled.`;
      this.now.textContent = said + (diverged ? " The memory diverges: make the step smaller." : "");
      this.errors.show({
        lines: [{ points: upTo("before"), kind: "first" }, { points: upTo("after"), kind: "other" }],
        now: n,
        label: `Error of each pair before and after its write. ${said}`,
      });
      this.shares.show({
        lines: [{ points: upTo("share"), kind: "first" }],
        marks: [{ x: R.SIZE, text: `${R.SIZE} features` }],
        now: n,
        label: `Share of pairs recalled against pairs written: ${[8, 16, 32, COUNT].map((x) =>
          `${Math.round(100 * this.steps[x].share)}% of ${this.steps[x].found.length} after ${x}`).join(", ")}.`,
      });
      const found = n === 0 ? [] : at.found;
      const points = found.map((one) => [one.age, one.error]).sort((a, b) => a[0] - b[0]);
      const ends = points.length === 0 ? "nothing written"
        : `${name(points[0][1])} of the newest, ${name(points[points.length - 1][1])} of the oldest`;
      this.ages.show({ lines: [{ points, kind: "first" }], label: `Error by age: ${ends}.` });
    }
  };
})((globalThis.recollect ??= {}));
