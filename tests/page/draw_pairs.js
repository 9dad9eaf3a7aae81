const R = globalThis.recollect;
const { seed, count } = input;
answer({
  kinds: Object.fromEntries(Object.keys(R.KINDS).map((kind) => [kind, R.drawPairs(seed, count, kind)])),
  again: R.drawPairs(seed, count, "random"),
  other: R.drawPairs(seed + 1, count, "random"),
});
