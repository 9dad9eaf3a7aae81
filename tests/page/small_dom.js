// As much of a document as the page's scripts use, for node: elements, events, selects, a location.
class TextNode {
  constructor(text) {
    this.textContent = text;
  }
}

class Element {
  constructor(tag) {
    Object.assign(this, { tagName: tag, attributes: new Map(), childNodes: [], listeners: new Map(), parentNode: null });
  }
  setAttribute(name, value) {
    this.attributes.set(name, String(value));
  }
  getAttribute(name) {
    return this.attributes.get(name) ?? null;
  }
  get id() {
    return this.getAttribute("id") ?? "";
  }
  append(...nodes) {
    for (const node of nodes) {
      const one = node instanceof Element || node instanceof TextNode ? node : new TextNode(String(node));
      one.parentNode = this;
      this.childNodes.push(one);
    }
  }
  replaceChildren(...nodes) {
    for (const node of this.childNodes) node.parentNode = null;
    this.childNodes = [];
    this.append(...nodes);
  }
  get textContent() {
    return this.childNodes.map((node) => node.textContent).join("");
  }
  set textContent(text) {
    this.replaceChildren(...(text === "" ? [] : [text]));
  }
  *descendants() {
    for (const node of this.childNodes) {
      if (!(node instanceof Element)) continue;
      yield node;
      yield* node.descendants();
    }
  }
  // By tag names, by #id, by .class, and lists of these.
  querySelectorAll(selector) {
    const one = (node, what) => {
      if (what.startsWith("#")) return node.id === what.slice(1);
      if (what.startsWith(".")) return (node.getAttribute("class") ?? "").split(" ").includes(what.slice(1));
      return node.tagName === what;
    };
    return [...this.descendants()].filter((node) => selector.split(",").some((what) => one(node, what.trim())));
  }
  querySelector(selector) {
    return this.querySelectorAll(selector)[0] ?? null;
  }
  addEventListener(name, listener) {
    this.listeners.set(name, [...(this.listeners.get(name) ?? []), listener]);
  }
  dispatchEvent(event) {
    if (this.disabled) return;
    for (const listener of this.listeners.get(event.type) ?? []) listener(event);
  }
  click() {
    this.dispatchEvent({ type: "click" });
  }
  focus() {
    document.activeElement = this;
  }
  get disabled() {
    return this.attributes.has("disabled");
  }
  set disabled(is) {
    if (is) this.attributes.set("disabled", "");
    else this.attributes.delete("disabled");
  }
  get options() {
    return this.querySelectorAll("option");
  }
  get value() {
    if (this.tagName === "select") {
      const values = this.options.map((option) => option.value);
      return values.includes(this.chosen) ? this.chosen : (values[0] ?? "");
    }
    return this.chosen ?? this.getAttribute("value") ?? "";
  }
  set value(value) {
    this.chosen = String(value);
  }
}

globalThis.Event = class {
  constructor(type) {
    this.type = type;
  }
};
globalThis.document = {
  documentElement: new Element("html"),
  activeElement: null,
  createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
  getElementById: (id) => document.documentElement.querySelector(`#${id}`),
  querySelectorAll: (selector) => document.documentElement.querySelectorAll(selector),
  querySelector: (selector) => document.documentElement.querySelector(selector),
};
let hash = "";
const whenHashChanges = [];
globalThis.window = {
  addEventListener: (name, listener) => name === "hashchange" && whenHashChanges.push(listener),
  history: { replaceState: (state, title, address) => (hash = address) },
  location: {
    get href() {
      return `file:///page.html${hash}`;
    },
    get hash() {
      return hash;
    },
    set hash(value) {
      hash = value.startsWith("#") ? value : `#${value}`;
      setTimeout(() => whenHashChanges.forEach((listener) => listener()), 0);
    },
  },
};
Object.defineProperty(globalThis, "navigator", { value: {}, configurable: true });
globalThis.location = window.location;
for (const [tag, id] of [["main", "app"], ["p", "made"], ["script", "table"]]) {
  const node = new Element(tag);
  node.setAttribute("id", id);
  document.documentElement.append(node);
}
