/* Search in a site that is opened from files: browsers refuse workers there, so their script runs in a hidden frame.
   Of a worker, the search uses the constructor, postMessage, message events and importScripts; more is not offered. */
"use strict";

if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      this.receive = (event) => {
        if (event.source !== this.frame.contentWindow) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      addEventListener("message", this.receive);
      const setup =
        "self.postMessage = (data) => parent.postMessage(data, '*');" +
        "self.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((resolve) => {" +
        "  const script = document.createElement('script');" +
        "  script.src = url; script.onload = resolve; document.body.append(script); })), Promise.resolve());";
      const address = new URL(url, location.href).href.replaceAll('"', "%22");
      this.frame.srcdoc = `<body><script>${setup}</script><script src="${address}"></script></body>`;
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.loaded.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })),
      );
    }

    terminate() {
      removeEventListener("message", this.receive);
      this.frame.remove();
    }
  };
}
