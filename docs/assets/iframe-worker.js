// The search of pages that are opened as files: browsers refuse workers there, so that its script
// runs in a hidden frame of the page. The theme looks for the name IFrameWorker.
"use strict";

if (window.location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.document.open();
      inner.document.write("<!doctype html><body></body>");
      inner.document.close();
      inner.postMessage = (data) => setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      inner.importScripts = (...urls) => Promise.all(urls.map(load));
      this.frame = frame;
      this.ready = load(url);

      function load(source) {
        return new Promise((done, failed) => {
          const script = inner.document.createElement("script");
          script.onload = done;
          script.onerror = failed;
          script.src = source;
          inner.document.body.append(script);
        });
      }
    }

    postMessage(data) {
      this.ready.then(() => {
        const { contentWindow } = this.frame;
        contentWindow.dispatchEvent(new contentWindow.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
}
