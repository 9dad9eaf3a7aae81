// A matrix memory W [V, K], written one association at a time, in double precision:
//
//   Z  = α W where the decay acts before the step, else W      where the error is measured
//   G  = Σ_(i>t−c) e_i k_iᵀ,  e_i = Z k_i − v_i, or −v_i for the dot product
//   S  = θ S − η G,  W ← α W + S                               θ = 0 without momentum
//
// η of the implicit step is δ/(1 + δ‖k‖²), of the flow (1 − exp(−δ‖k‖²))/‖k‖², of the normalised
// step δ/‖k‖². Momentum "of the value" lets v kᵀ alone pass through S. tests/page holds it to rc.recall.
(function (R) {
  "use strict";

  R.SIZE = 16;

  const isNumber = (value) => typeof value === "number";

  // Return the parts of a recipe (six members as data) that run here, and the titles of the members
  // that the default replaces. Constants of the recipe are fixed, and other numbers have sliders.
  R.spec = function (recipe) {
    const spec = { linear: true, window: 1, when: "never", step: "gradient", fixed: {}, replaced: [] };
    const parts = {
      memory: (m) => m.member === "Matrix" && plainRead(m.read),
      features: (m) => m.member === "Identity",
      bias: (m) => readBias(m, spec),
      context: (m) => readContext(m, spec),
      retention: (m) => readRetention(m, spec),
      algorithm: (m) => readAlgorithm(m, spec),
    };
    for (const [choice, fits] of Object.entries(parts)) {
      const member = recipe[choice];
      if (!fits(member)) spec.replaced.push(`${choice}.${member.member}`);
    }
    if (!spec.linear) {
      if (["implicit", "flow", "normalized", "value"].includes(spec.step)) {
        spec.step = "gradient"; // these ask for an error that knows the prediction
      }
    }
    return spec;
  };

  const plainRead = (read) =>
    read?.normalize === "none" && read.when === "after" && read.bonus === 0 && !read.transposed;

  function readBias(member, spec) {
    spec.linear = member.member !== "DotProduct";
    return member.member === "DotProduct" || (member.member === "L2" && member.probe === null);
  }

  function readContext(member, spec) {
    if (member.member !== "Window") return member.member === "Online";
    if (Number.isInteger(member.size)) spec.window = member.size;
    return spec.window === member.size;
  }

  function readRetention(member, spec) {
    if (member.member === "Keep") return true;
    if (member.member !== "Decay" || member.alpha === "input_scaled") return false;
    spec.when = member.when;
    if (isNumber(member.alpha)) spec.fixed.decay = member.alpha;
    return true;
  }

  function readAlgorithm(member, spec) {
    const plain = {
      GradientDescent: () =>
        member.batch_size === 1 && member.updates_per_token === 1 && member.reduction === "sum" &&
        !member.normalized_steps && member.erasure === 0,
      Momentum: () =>
        member.batch_size === 1 && !member.normalized_steps && member.outer_lr === 1 &&
        member.erasure === 0,
      Implicit: () => true,
      Flow: () => true,
      NLMS: () => true,
    }[member.member];
    if (plain === undefined || !plain()) return false;
    if (isNumber(member.lr)) spec.fixed.lr = member.lr;
    const steps = { Implicit: "implicit", Flow: "flow", NLMS: "normalized", Momentum: member.momentum_on };
    spec.step = steps[member.member] ?? "gradient";
    spec.momentum = member.member === "Momentum";
    if (spec.momentum && isNumber(member.momentum)) spec.fixed.momentum = member.momentum;
    return true;
  }

  // Where the sliders begin: what the recipe fixes, else values at which keys of length 1 behave.
  R.startingNumbers = function (spec) {
    const likeness = (1 + Math.sqrt(spec.window / R.SIZE)) ** 2; // of the largest direction of c keys
    const momentum = spec.fixed.momentum ?? (spec.momentum ? 0.5 : 0);
    const safe = spec.linear && spec.window > 1 ? 1 / likeness : 1;
    return {
      lr: spec.fixed.lr ?? Math.round(100 * safe * (1 - momentum)) / 100,
      decay: spec.when === "never" ? 1 : spec.fixed.decay ?? 0.95,
      momentum,
      window: spec.window,
    };
  };

  R.createMemory = (K = R.SIZE, V = R.SIZE) => ({
    K,
    V,
    W: new Float64Array(V * K),
    S: new Float64Array(V * K),
    past: [],
  });

  R.read = function (memory, query) {
    const { K, V, W } = memory;
    const out = new Float64Array(V);
    for (let i = 0; i < V; i++) {
      let sum = 0;
      for (let j = 0; j < K; j++) sum += W[i * K + j] * query[j];
      out[i] = sum;
    }
    return out;
  };

  // One association: numbers are lr, decay, momentum and window, of this token.
  R.write = function (memory, spec, key, value, numbers) {
    const { K, V, W, S, past } = memory;
    const alpha = spec.when === "never" ? 1 : numbers.decay;
    const theta = spec.momentum ? numbers.momentum : 0;
    const eta = stepSize(spec.step, numbers.lr, key);
    past.push([key, value]);
    const seen = past.slice(Math.max(0, past.length - numbers.window));
    const before = spec.when === "before" ? alpha : 1;
    const through = new Float64Array(V * K); // what passes through the momentum
    const direct = new Float64Array(V * K); // what does not
    for (const [k, v] of seen) {
      const predicted = spec.linear ? R.read(memory, k) : null;
      for (let i = 0; i < V; i++) {
        const kept = predicted === null ? 0 : before * predicted[i];
        for (let j = 0; j < K; j++) {
          const at = i * K + j;
          if (spec.step === "value") {
            through[at] += v[i] * k[j];
            direct[at] -= kept * k[j];
          } else {
            through[at] -= (kept - v[i]) * k[j];
          }
        }
      }
    }
    for (let at = 0; at < W.length; at++) {
      S[at] = theta * S[at] + eta * through[at];
      W[at] = alpha * W[at] + S[at] + eta * direct[at];
    }
  };

  function stepSize(step, lr, key) {
    if (!["implicit", "flow", "normalized"].includes(step)) return lr;
    const square = key.reduce((sum, x) => sum + x * x, 0);
    if (step === "implicit") return lr / (1 + lr * square);
    if (step === "flow") return square > 0 ? -Math.expm1(-lr * square) / square : lr;
    return square > 0 ? lr / square : 0;
  }

  // -- associations to write ------------------------------------------------------------------

  // Uniform numbers in (0, 1), the same for the same seed (mulberry32).
  function generator(seed) {
    let state = seed >>> 0;
    return function () {
      state = (state + 0x6d2b79f5) >>> 0;
      let x = state;
      x = Math.imul(x ^ (x >>> 15), x | 1);
      x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
      return (((x ^ (x >>> 14)) >>> 0) + 0.5) / 4294967296;
    };
  }

  function unit(vector) {
    const length = Math.sqrt(vector.reduce((sum, x) => sum + x * x, 0));
    return vector.map((x) => x / length);
  }

  R.KINDS = {
    random: "random keys",
    orthogonal: "16 orthogonal keys, then random ones",
    rewritten: "eight keys, written again with new values",
  };

  // Pairs {key, value, of}: all keys and values of length 1; ``of`` numbers the key.
  R.drawPairs = function (seed, count, kind) {
    const uniform = generator(seed);
    const normal = () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
    const vector = () => unit(Array.from({ length: R.SIZE }, normal));
    const keys = [];
    const pairs = [];
    for (let t = 0; t < count; t++) {
      const of = kind === "rewritten" ? t % 8 : t;
      if (keys[of] === undefined) {
        let key = vector();
        if (kind === "orthogonal" && of < R.SIZE) {
          for (let pass = 0; pass < 2; pass++) { // twice, for the digits
            for (const other of keys) {
              const along = key.reduce((sum, x, j) => sum + x * other[j], 0);
              key = key.map((x, j) => x - along * other[j]);
            }
          }
          key = unit(key);
        }
        keys[of] = key;
      }
      pairs.push({ key: keys[of], value: vector(), of });
    }
    return pairs;
  };

  // -- what is measured -----------------------------------------------------------------------

  const distance = (a, b) => Math.sqrt(a.reduce((sum, x, i) => sum + (x - b[i]) ** 2, 0));

  // Of the first n pairs those whose key was not written again, each with its error now and whether
  // its value is the nearest of all of these.
  R.recalled = function (memory, pairs, n) {
    const latest = new Map();
    for (let t = 0; t < n; t++) latest.set(pairs[t].of, t);
    const standing = [...latest.values()].sort((a, b) => a - b);
    return standing.map((t) => {
      const found = R.read(memory, pairs[t].key);
      const own = distance(found, pairs[t].value);
      const right = standing.every((s) => s === t || distance(found, pairs[s].value) > own);
      return { t, age: n - 1 - t, error: own, right };
    });
  };

  // All pairs, one after the other: errors ‖W k − v‖ of each before and after its own write, the
  // share of pairs recalled, and W, after each. Entry 0 is the empty memory.
  R.journey = function (spec, numbers, pairs) {
    const memory = R.createMemory();
    const steps = [{ W: memory.W.slice(), share: null, before: null, after: null }];
    pairs.forEach(({ key, value }, t) => {
      const before = distance(R.read(memory, key), value);
      R.write(memory, spec, key, value, numbers);
      const after = distance(R.read(memory, key), value);
      const found = R.recalled(memory, pairs, t + 1);
      const share = found.filter((one) => one.right).length / found.length;
      steps.push({ W: memory.W.slice(), before, after, share, found });
    });
    return steps;
  };
})((globalThis.recollect ??= {}));
