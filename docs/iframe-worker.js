// The search of a page opened from the file system: browsers refuse it workers, so a hidden frame runs the script of one.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.inside = new Promise(ready => frame.addEventListener("load", () => {
        const inside = frame.contentWindow, script = inside.document.createElement("script");
        inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
        script.addEventListener("load", () => ready(inside));
        script.src = address;
        inside.document.body.append(script);
      }, {once: true}));
      document.body.append(frame);
    }
    postMessage(data) {
      this.inside.then(inside => inside.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
