// A small page as the reports write it, its table sorted and its curves read by the keyboard.
globalThis.matchMedia = () => ({ matches: false, addEventListener() {} });
const el = (tag, attributes, ...children) => {
  const node = new Element(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
const row = (cells) =>
  el("tr", {}, ...cells.map(([text, number]) => el("td", number === null ? {} : { "data-sort": number }, text)));
const table = el(
  "table",
  {},
  el("thead", {}, el("tr", {}, ...input.columns.map((name) => el("th", {}, name)))),
  el("tbody", {}, ...input.rows.map(row)),
);
const image = el("img", { alt: "what it shows" });
const data = el("script", { class: "plots" }, JSON.stringify(input.plots));
const reading = el("div", { class: "reading" });
const holder = el("div", { class: "curves" }, el("div", { class: "drawing" }, image), reading, data);
document.documentElement.append(table, holder);
globalThis.recollectReport.startTables();
globalThis.recollectReport.startCurves();

const headings = table.querySelectorAll("th");
const state = () => ({
  order: table.querySelector("tbody").querySelectorAll("tr").map((one) => one.childNodes[0].textContent),
  sorted: headings.map((one) => one.getAttribute("aria-sort")),
});
const sorts = input.clicks.map((column) => {
  headings[column].querySelector("button").click();
  return state();
});
const pointer = holder.querySelector(".pointer");
const says = () => [pointer.getAttribute("aria-valuenow"), pointer.getAttribute("aria-valuetext"), reading.textContent];
const keys = input.keys.map((key) => {
  pointer.dispatchEvent({ type: "keydown", key, preventDefault() {} });
  return says();
});
pointer.getBoundingClientRect = () => ({ left: 0, top: 0, width: 1000, height: 500 });
pointer.dispatchEvent({ type: "pointermove", clientX: input.at[0], clientY: input.at[1] });
answer({ sorts, keys, pointed: says(), dots: pointer.querySelectorAll(".dot").length });
