// Looks recipes up in the table, writes them out, and follows their links.
const R = globalThis.recollect;
const table = new R.Table(input.table);
const plain = (text) => {
  try {
    return table.fromLink(text);
  } catch (error) {
    return { error: error.message };
  }
};
answer({
  recipes: input.recipes.map((recipe) => ({
    result: table.result(recipe),
    python: table.python(recipe),
    toml: table.toml(recipe),
    link: table.link(recipe),
    back: table.fromLink(table.link(recipe)),
  })),
  links: input.links.map(plain),
});
