// What somebody does with the page, and what is seen then: in a browser, or in the small document.
// Returns names of what was checked; throws where something else is seen.
async function scenario() {
  const checked = [];
  const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
  const at = (id) => {
    const node = document.getElementById(id);
    if (node === null) throw new Error(`there is no #${id}`);
    return node;
  };
  const see = (name, holds, found) => {
    if (!holds) throw new Error(`${name}: ${found}`);
    checked.push(name);
  };
  const text = (id) => at(id).textContent;
  const choose = (id, value) => {
    at(id).value = value;
    if (at(id).value !== value) throw new Error(`#${id} has no ${value}`);
    at(id).dispatchEvent(new Event("change"));
  };
  const option = (id, part) => [...at(id).options].find((one) => one.textContent.includes(part));
  const move = (id, value) => {
    at(id).value = String(value);
    at(id).dispatchEvent(new Event("input"));
  };
  const title = (letter) => at(`${letter}-panel`).querySelector("h2").textContent;
  const says = (letter, label) => {
    const nodes = [...at(`${letter}-said`).querySelectorAll("dt,dd")];
    const place = nodes.findIndex((node) => node.textContent === label);
    return place < 0 ? null : nodes[place + 1].textContent;
  };

  see("starts with a system", title("a") === "Gated DeltaNet" && location.hash === "#recipe=gated_delta_net", title("a"));
  see("explains it", says("a", "write") === "W_t = α_t W_(t−1) − η_t (α_t W_(t−1) k_t) k_tᵀ + η_t v_t k_tᵀ", says("a", "write"));
  see("runs it", text("a-runs").startsWith("This recipe itself"), text("a-runs"));

  // A knob: another system, its name, its link.
  choose("a-retention", "Keep");
  see("one knob is another system", title("a") === "DeltaNet" && at("a-system").value === "delta_net", title("a"));
  see("the address follows", location.hash === "#recipe=delta_net", location.hash);
  see("without decay its slider rests", at("a-decay").disabled && !at("a-lr").disabled, "");
  at("a-decay").value = "0.9";

  // A neighbour that no system is.
  choose("a-algorithm", "Muon");
  see("a neighbour has no name", title("a") === "Recipe A" && text("a-status").startsWith("One knob from"), text("a-status"));
  see("a neighbour is explained", says("a", "engine").startsWith("deep"), says("a", "engine"));
  see("what does not run is named", text("a-runs").includes("In place of algorithm.Muon"), text("a-runs"));
  see("its link is data", decodeURIComponent(location.hash) === '#recipe={"algorithm":{"member":"Muon"}}', location.hash);

  // An option of a member, with the focus kept where it was.
  choose("a-algorithm", "GradientDescent");
  at("a-algorithm-updates_per_token").focus();
  choose("a-algorithm-updates_per_token", [...at("a-algorithm-updates_per_token").options].find((one) => one.textContent.startsWith("2")).value);
  see("an option is turned", text("a-code").includes("GradientDescent(updates_per_token=2)"), text("a-code"));
  see("the focus stays", document.activeElement === at("a-algorithm-updates_per_token"), "");
  choose("a-system", "delta_net");

  // What cannot be.
  const impossible = option("a-algorithm", "does not fit");
  see("the select says what does not fit", impossible !== undefined, "");
  choose("a-algorithm", impossible.value);
  see("the sentence is shown", /^These do not fit: \S+ /.test(text("a-error")), text("a-error"));
  see("nothing is explained", says("a", "engine") === null, "");
  choose("a-algorithm", "GradientDescent");
  see("the sentence goes", text("a-error") === "", text("a-error"));

  // Further away than one knob.
  choose("a-algorithm", "Muon");
  choose("a-memory", "GatedMLP");
  see("far away is said", text("a-said").includes("further away"), text("a-said"));
  choose("a-system", "delta_net");

  // Writing one by one.
  const strength = () => [...at("a-panel").querySelectorAll("rect")].map((cell) => cell.getAttribute("fill-opacity")).join();
  const empty = strength();
  at("next").click();
  at("next").click();
  at("a-next").click();
  see("three are written", text("a-now").startsWith("After 3 of 48"), text("a-now"));
  see("the step of one is exact", / to 0;/.test(text("a-now")), text("a-now"));
  see("W is drawn", strength() !== empty && at("a-panel").querySelectorAll("rect").length === 256, "");
  move("a-lr", 0.5);
  see("a smaller step leaves an error", !/ to 0;/.test(text("a-now")), text("a-now"));
  move("written", 40);
  see("forty are written", text("a-now").startsWith("After 40 of 48"), text("a-now"));
  at("back").click();
  see("one is taken back", text("a-now").startsWith("After 39 of 48"), text("a-now"));
  choose("kind", "orthogonal");
  move("a-lr", 1);
  move("written", 16);
  see("sixteen orthogonal keys are all recalled", text("a-now").includes("16 of 16 pairs are recalled"), text("a-now"));
  move("a-lr", 2);
  choose("a-system", "gated_delta_net");
  const ages = [...at("a-panel").querySelectorAll("svg")][3].getAttribute("aria-label");
  see("decay forgets: 1 − 0.95¹⁵ of the oldest", ages === "Error by age: 0 of the newest, 0.537 of the oldest.", ages);
  at("play").click();
  await wait(900);
  at("play").click();
  see("it plays", /After 1[78] of 48/.test(text("a-now")), text("a-now"));

  // Two side by side, and links of both.
  at("two").click();
  see("two stand side by side", title("b") === "linear attention", title("b"));
  see("the link names both", location.hash === "#recipe=gated_delta_net&with=linear_attention", location.hash);
  see("both memories are at the same pair", text("a-now").slice(0, 8) === text("b-now").slice(0, 8), text("b-now"));
  choose("b-bias", "L2");
  see("the second is turned alone", says("b", "problem").includes("‖W k_t − v_t‖²") && title("a") === "Gated DeltaNet", says("b", "problem"));
  at("two").click();
  see("one is left", document.getElementById("b-panel") === null, "");
  location.hash = "#recipe=titans&with=delta_net";
  await wait(60);
  see("a link opens two", title("a").startsWith("Titans") && title("b") === "DeltaNet", title("a"));
  location.hash = '#recipe={"retention":{"member":"Decay","when":"before"}}';
  await wait(60);
  see("a link of data opens its system", title("a") === "Gated DeltaNet", title("a"));
  location.hash = "#recipe=nobody";
  await wait(60);
  see("a bad link is one sentence", text("trouble") === "This page knows no system named nobody: choose one below.", text("trouble"));
  see("and stays in the address", location.hash === "#recipe=nobody", location.hash);
  choose("a-system", "bilinear_gated_attention");
  see("until something is chosen", text("trouble") === "" && location.hash === "#recipe=bilinear_gated_attention", text("trouble"));
  location.hash = '#recipe={"memory":{"member":"Matrix","read":null},"algorithm":{"member":"Momentum","lr":"x"}}';
  await wait(60);
  see("a link of nonsense is only unknown", text("a-said").includes("further away"), text("a-said"));
  choose("a-system", "bilinear_gated_attention");

  // Copies.
  let copied = null;
  const clipboard = { writeText: async (what) => (copied = what) };
  Object.defineProperty(navigator, "clipboard", { value: clipboard, configurable: true });
  see("TOML cannot say None", at("a-toml").disabled, "");
  choose("a-system", "gated_delta_net");
  at("a-toml").click();
  await wait(20);
  see("TOML is copied", copied === 'retention = { member = "Decay", when = "before" }\n', copied);
  at("a-python").click();
  await wait(20);
  see("Python is copied", copied.includes('rc.retention.Decay(when="before")') && text("a-copied") === "Copied as Python.", copied);
  at("a-link").click();
  await wait(20);
  see("the link is copied", copied.endsWith("#recipe=gated_delta_net"), copied);
  clipboard.writeText = async () => {
    throw new Error("refused");
  };
  at("a-python").click();
  await wait(20);
  see("a refused copy is said", text("a-copied").includes("select the text above"), text("a-copied"));

  // Names for those who do not see.
  const labels = new Set([...document.querySelectorAll("label")].map((node) => node.getAttribute("for")));
  const nameless = [...document.querySelectorAll("select,input,button")].filter((node) =>
    !(labels.has(node.id) || node.getAttribute("aria-label") || (node.tagName.toLowerCase() === "button" && node.textContent)));
  see("every control has a name", nameless.length === 0, nameless.map((node) => node.id));
  const pictures = [...document.querySelectorAll("svg")];
  see("every picture says what it shows", pictures.length === 4 && pictures.every((node) =>
    node.getAttribute("role") === "img" && node.getAttribute("aria-label").length > 12), pictures.length);
  const ids = [...document.querySelectorAll("select,input,button,section,p,div")].map((node) => node.id).filter((id) => id !== "");
  see("no id occurs twice", new Set(ids).size === ids.length, ids.length);
  return checked;
}
