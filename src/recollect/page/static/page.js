// The page: the associations to write, one recipe or two, and the address that names them.
(function (R) {
  "use strict";

  const PACE = 350; // milliseconds between two associations, when they are written by themselves
  const START = "gated_delta_net";
  const BESIDE = "linear_attention";
  const { COUNT, field, select, slider, element: make } = R;

  class App {
    constructor(root, data) {
      Object.assign(this, { root, table: new R.Table(data), written: 0, seed: 1, kind: "random", timer: null });
      this.pairs = R.drawPairs(this.seed, COUNT, this.kind);
      this.panels = [];
      this.trouble = make("div", { class: "error", id: "trouble", role: "alert" });
      this.place = make("div", { id: "panels" });
      root.replaceChildren(this.trouble, this.controls(), this.place);
      this.open();
      window.addEventListener("hashchange", () => {
        if (window.location.hash !== this.hash) this.open();
      });
    }

    controls() {
      const button = (id, text, act, attributes = {}) =>
        make("button", { type: "button", id, onclick: act, ...attributes }, text);
      this.playButton = button("play", "Play", () => this.play(), { "aria-pressed": "false" });
      this.twoButton = button("two", "Two recipes side by side", () => this.two(), { "aria-pressed": "false" });
      this.position = slider("written", { min: 0, max: COUNT, step: 1 }, (n) => this.go(n));
      this.shown = make("output", { for: "written" });
      const kinds = select("kind", Object.entries(R.KINDS), (kind) => {
        this.kind = kind;
        this.draw();
      });
      return make("section", { class: "shared", "aria-label": "Associations to write" },
        make("div", { class: "bar" },
          button("next", "Write one", () => this.go(this.written + 1), { class: "main" }),
          this.playButton, button("back", "Take one back", () => this.go(this.written - 1)),
          button("restart", "Start over", () => this.go(0)),
          button("again", "Draw others", () => {
            this.seed += 1;
            this.draw();
          }), this.twoButton),
        make("div", { class: "bar" }, field("Associations", kinds),
          make("div", { class: "field grow" }, make("label", { for: "written" }, "Written: ", this.shown), this.position)));
    }

    draw() {
      this.pairs = R.drawPairs(this.seed, COUNT, this.kind);
      for (const panel of this.panels) panel.run();
    }

    go(n) {
      this.written = Math.max(0, Math.min(COUNT, n));
      this.position.value = String(this.written);
      this.shown.textContent = `${this.written} of ${COUNT}`;
      for (const panel of this.panels) panel.showStep();
      if (this.written === COUNT && this.timer !== null) this.play();
    }

    play() {
      const starts = this.timer === null;
      if (starts && this.written === COUNT) this.go(0);
      if (starts) this.timer = setInterval(() => this.go(this.written + 1), PACE);
      else {
        clearInterval(this.timer);
        this.timer = null;
      }
      this.playButton.setAttribute("aria-pressed", String(starts));
      this.playButton.textContent = starts ? "Pause" : "Play";
    }

    // -- one or two recipes ----------------------------------------------------------------------------

    show(recipes) {
      this.quiet = true; // while panels are made, the address stays
      this.panels = [];
      recipes.forEach((one, i) => this.panels.push(new R.Panel(this, "ab"[i], one)));
      this.place.replaceChildren(...this.panels.map((panel) => panel.node));
      this.place.setAttribute("class", recipes.length > 1 ? "two" : "one");
      this.twoButton.setAttribute("aria-pressed", String(recipes.length > 1));
      this.go(this.written);
      this.quiet = false;
    }

    two() {
      const recipes = this.panels.map(({ recipe, preset }) => ({ recipe, preset }));
      const other = [BESIDE, ...this.table.byName.keys()].find((name) => this.table.byName.has(name));
      this.show(recipes.length > 1 ? [recipes[0]] : [...recipes, { recipe: this.table.ofPreset(other), preset: other }]);
      this.changed();
    }

    // -- links ---------------------------------------------------------------------------------------------

    // From "#recipe=...&with=...".
    open() {
      const parts = new Map(window.location.hash.replace(/^#/, "").split("&").map((part) => {
        const [name, ...rest] = part.split("=");
        return [name, rest.join("=")];
      }));
      const wanted = ["recipe", "with"].filter((name) => parts.has(name)).map((name) => parts.get(name));
      this.trouble.replaceChildren();
      let recipes = [];
      try {
        recipes = wanted.map((text) => this.table.fromLink(text));
      } catch (error) {
        this.trouble.replaceChildren(error.message);
        recipes = [];
      }
      if (recipes.length === 0) {
        const name = this.table.byName.has(START) ? START : this.table.data.presets[0].name;
        recipes = [{ recipe: this.table.ofPreset(name), preset: name }];
      }
      this.show(recipes);
      if (this.trouble.textContent === "") this.changed(); // a link that is wrong stays to be looked at
    }

    // The address follows what is shown.
    changed() {
      if (this.quiet) return;
      this.trouble.replaceChildren();
      const links = this.panels.map((panel) => this.table.link(panel.recipe, panel.preset));
      this.hash = `#${links.map((link, i) => `${["recipe", "with"][i]}=${link}`).join("&")}`;
      try {
        window.history.replaceState(null, "", this.hash);
      } catch {
        window.location.hash = this.hash; // where the page is a file, some browsers refuse the other
      }
    }

    // The address of one panel's recipe.
    link(panel) {
      const page = window.location.href.split("#")[0];
      return `${page}#recipe=${this.table.link(panel.recipe, panel.preset)}`;
    }
  }

  R.start = function () {
    const data = JSON.parse(document.getElementById("table").textContent);
    const made = document.getElementById("made");
    made.textContent = `Made by recollect page, version ${data.version}: ${data.presets.length} systems of one recipe, and their neighbours by one knob.`;
    R.app = new App(document.getElementById("app"), data);
  };
})((globalThis.recollect ??= {}));
