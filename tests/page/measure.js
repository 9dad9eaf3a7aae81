const R = globalThis.recollect;
const numbers = { lr: 1, decay: 0.9, momentum: 0, window: 1 };
const delta = { linear: true, window: 1, when: "never", step: "gradient", fixed: {} };
const sum = { ...delta, linear: false };
const decayed = { ...delta, when: "after" };
const unit = (i) => Array.from({ length: R.SIZE }, (_, j) => (i === j ? 1 : 0));
const steps = R.journey(delta, numbers, R.drawPairs(1, 17, "orthogonal"));
// One key twice, with two values at right angles.
const twice = [{ key: unit(0), value: unit(0), of: 0 }, { key: unit(0), value: unit(1), of: 0 }];
const two = [{ key: unit(0), value: unit(0), of: 0 }, { key: unit(1), value: unit(1), of: 1 }];
const last = (spec, pairs) => R.journey(spec, numbers, pairs)[2].found[0].error;
answer({
  delta: {
    share: steps.map((step) => step.share),
    after: steps.map((step) => step.after),
    found16: steps[16].found,
  },
  rewritten: { delta: last(delta, twice), sum: last(sum, twice) },
  decayed: last(decayed, two),
  empty: steps[1].before,
});
