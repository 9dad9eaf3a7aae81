// What the pure parts of the reports' scripts make of data.
const R = globalThis.recollectReport;
answer(input.map(([name, ...given]) => R[name](...given)));
