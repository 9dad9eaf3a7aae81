// The table of recipes: looking a recipe up, turning a knob, and writing it out.
(function (R) {
  "use strict";

  // Plain data as one text, the same for the same data.
  function keyOf(value) {
    if (Array.isArray(value)) return `[${value.map(keyOf).join()}]`;
    if (value !== null && typeof value === "object") {
      const names = Object.keys(value).sort();
      return `{${names.map((name) => `${JSON.stringify(name)}:${keyOf(value[name])}`).join()}}`;
    }
    return JSON.stringify(value);
  }
  R.keyOf = keyOf;

  R.Table = class {
    constructor(data) {
      this.data = data;
      this.choices = data.choices.map((choice) => choice.name);
      this.results = new Map(); // of a recipe's key: place of an explanation, or −e − 1 of an error
      this.presets = new Map(); // of a recipe's key: presets that state it
      this.byName = new Map(data.presets.map((preset) => [preset.name, preset]));
      this.near = new Map(); // of a recipe's key: presets one knob away
      this.keys = data.choices.map((choice) => choice.settings.map(keyOf));
      for (const preset of data.presets) this.place(preset);
    }

    place(preset) {
      const keys = preset.recipe.map((setting, i) => this.keys[i][setting]);
      const own = keys.join("|");
      if (!this.results.has(own)) this.results.set(own, preset.explanation);
      this.presets.set(own, [...(this.presets.get(own) ?? []), preset]);
      preset.around.forEach((results, i) => {
        const choice = this.data.choices[i];
        const firsts = choice.members.map((member) => member.first);
        const settings = [...firsts, ...choice.near[preset.recipe[i]]];
        settings.forEach((setting, n) => {
          const key = keys.map((one, at) => (at === i ? this.keys[i][setting] : one)).join("|");
          if (!this.results.has(key)) this.results.set(key, results[n]);
          if (key === own) return;
          const names = this.near.get(key) ?? [];
          if (!names.includes(preset.name)) this.near.set(key, [...names, preset.name]);
        });
      });
    }

    // -- recipes: objects of six members as data ------------------------------------------------

    key(recipe) {
      return this.choices.map((choice) => keyOf(recipe[choice])).join("|");
    }

    ofPreset(name) {
      const preset = this.byName.get(name);
      if (preset === undefined) return null;
      const setting = (choice, i) => choice.settings[preset.recipe[i]];
      return Object.fromEntries(this.data.choices.map((x, i) => [x.name, setting(x, i)]));
    }

    choice(name) {
      return this.data.choices[this.choices.indexOf(name)];
    }

    member(choice, name) {
      return this.choice(choice).members.find((member) => member.name === name);
    }

    first(choice, name) {
      return this.choice(choice).settings[this.member(choice, name).first];
    }

    default(choice) {
      return this.choice(choice).settings[this.choice(choice).default];
    }

    // What is known of a recipe: {presets, near} and lines by label, or the error, or neither.
    result(recipe, presetName = null) {
      const key = this.key(recipe);
      const presets = this.presets.get(key) ?? [];
      const found = { presets, near: this.near.get(key) ?? [], lines: null, error: null };
      const chosen = presets.find((preset) => preset.name === presetName) ?? presets[0];
      const result = chosen === undefined ? this.results.get(key) : chosen.explanation;
      if (result === undefined) return found;
      if (result < 0) found.error = this.data.errors[-result - 1];
      else found.lines = this.explanation(result);
      return found;
    }

    explanation(place) {
      const { explanations, blocks, lines, labels } = this.data;
      return explanations[place].map((index) => {
        const [label, ...block] = blocks[index];
        return [labels[label], block.map((line) => lines[line])];
      });
    }

    // -- written out ------------------------------------------------------------------------------

    // Fields of a member that are not at their defaults.
    said(member) {
      const { defaults } = this.data.classes[member.member];
      return Object.entries(member).filter(
        ([name, value]) => name !== "member" && !(Object.hasOwn(defaults, name) && keyOf(value) === keyOf(defaults[name])),
      );
    }

    brief(value) {
      if (Array.isArray(value)) {
        const items = value.map((one) => this.brief(one)).join(", ");
        return value.length === 1 ? `(${items},)` : `(${items})`;
      }
      if (value !== null && typeof value === "object") {
        const fields = this.said(value).map(([name, one]) => `${name}=${this.brief(one)}`);
        return `${value.member}(${fields.join(", ")})`;
      }
      return value === null ? "None" : value === true ? "True" : value === false ? "False" : JSON.stringify(value);
    }

    // Choices of a recipe that are not at their defaults, each with what it says.
    turned(recipe) {
      return this.choices.filter((choice) => keyOf(recipe[choice]) !== keyOf(this.default(choice)));
    }

    python(recipe) {
      // Members stand under rc and their choice: Decay( becomes rc.retention.Decay(.
      const rooted = (value) =>
        this.brief(value).replace(/"(?:[^"\\]|\\.)*"|\b([A-Z]\w*)\(/g, (found, name) => {
          const room = name === undefined ? null : this.data.classes[name].room;
          return room === null ? found : `rc.${room}.${name}(`;
        });
      const lines = this.turned(recipe).map((choice) => `    ${choice}=${rooted(recipe[choice])},\n`);
      const call = lines.length === 0 ? "rc.Recipe()" : `rc.Recipe(\n${lines.join("")})`;
      return `import recollect as rc\n\nrecipe = ${call}\n`;
    }

    // null where a field holds nothing by choice, which TOML cannot say.
    toml(recipe) {
      const inline = (value) => {
        if (value === null) return null;
        if (Array.isArray(value)) {
          const items = value.map(inline);
          return items.includes(null) ? null : `[${items.join(", ")}]`;
        }
        if (typeof value !== "object") return JSON.stringify(value);
        const fields = [["member", value.member], ...this.said(value)].map(([name, one]) => [name, inline(one)]);
        if (fields.some(([, text]) => text === null)) return null;
        return `{ ${fields.map(([name, text]) => `${name} = ${text}`).join(", ")} }`;
      };
      const lines = this.turned(recipe).map((choice) => [choice, inline(recipe[choice])]);
      if (lines.some(([, text]) => text === null)) return null;
      return lines.map(([choice, text]) => `${choice} = ${text}\n`).join("");
    }

    // -- links --------------------------------------------------------------------------------------

    // What stands after "#recipe=": a system's name, or what of a recipe is not at its default.
    link(recipe, presetName = null) {
      const presets = this.presets.get(this.key(recipe)) ?? [];
      const named = presets.find((preset) => preset.name === presetName) ?? presets[0];
      if (named !== undefined) return named.name;
      const short = (value) => {
        if (Array.isArray(value)) return value.map(short);
        if (value === null || typeof value !== "object") return value;
        const fields = this.said(value).map(([name, one]) => [name, short(one)]);
        return { member: value.member, ...Object.fromEntries(fields) };
      };
      const said = this.turned(recipe).map((choice) => [choice, short(recipe[choice])]);
      return encodeURIComponent(JSON.stringify(Object.fromEntries(said)));
    }

    // The recipe of a link and the system it names, if it does. Throws an Error of one sentence.
    fromLink(text) {
      let decoded;
      try {
        decoded = decodeURIComponent(text);
      } catch {
        throw new Error("This link is not whole: copy it again, with everything after #recipe=.");
      }
      if (!decoded.startsWith("{")) {
        const recipe = this.ofPreset(decoded);
        if (recipe === null) throw new Error(`This page knows no system named ${decoded}: choose one below.`);
        return { recipe, preset: decoded };
      }
      let said;
      try {
        said = JSON.parse(decoded);
      } catch {
        throw new Error("The recipe of this link is not JSON: copy the link again, whole.");
      }
      const recipe = {};
      for (const choice of this.choices) {
        recipe[choice] = Object.hasOwn(said, choice) ? this.full(said[choice], choice) : this.default(choice);
      }
      const unknown = Object.keys(said).find((name) => !this.choices.includes(name));
      if (unknown !== undefined) {
        throw new Error(`A recipe has no choice ${unknown}; it has ${this.choices.join(", ")}.`);
      }
      return { recipe, preset: null };
    }

    // A member of a link, with its defaults.
    full(value, choice = null) {
      if (choice !== null && (value === null || typeof value !== "object" || Array.isArray(value))) {
        throw new Error(`${choice} of this link is no member: say it as {"member": "..."}.`);
      }
      if (Array.isArray(value)) return value.map((one) => this.full(one));
      if (value === null || typeof value !== "object") return value;
      const known = Object.hasOwn(this.data.classes, value.member);
      if (!known || (choice !== null && this.member(choice, value.member) === undefined)) {
        const has = choice === null ? "" : `; ${choice} has ${this.choice(choice).members.map((m) => m.name).join(", ")}`;
        throw new Error(`This page knows no member named ${value.member}${has}.`);
      }
      const base = choice === null
        ? { member: value.member, ...this.data.classes[value.member].defaults }
        : this.first(choice, value.member);
      const { fields } = this.data.classes[value.member];
      for (const name of Object.keys(value)) {
        if (name !== "member" && !fields.includes(name)) throw new Error(`${value.member} has no field ${name}.`);
      }
      const missing = fields.find((name) => !Object.hasOwn(base, name) && !Object.hasOwn(value, name));
      if (missing !== undefined) throw new Error(`${value.member} needs ${missing}, which is missing.`);
      const given = Object.entries(value).map(([name, one]) => [name, this.full(one)]);
      return { ...base, ...Object.fromEntries(given) };
    }
  };
})((globalThis.recollect ??= {}));
