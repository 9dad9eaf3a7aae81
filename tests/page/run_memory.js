// Writes the associations of each case one by one, and reads each query after its token.
const R = globalThis.recollect;
answer(
  input.map(({ recipe, keys, values, queries, numbers }) => {
    const spec = R.spec(recipe);
    const memory = R.createMemory(keys[0].length, values[0].length);
    const read = keys.map((key, t) => {
      R.write(memory, spec, key, values[t], { ...numbers[t], window: spec.window, ...spec.fixed });
      return Array.from(R.read(memory, queries[t]));
    });
    return { replaced: spec.replaced, read };
  }),
);
