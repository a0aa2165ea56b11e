// A worker in a hidden frame. Browsers run no worker for a page that is opened as a file, and the search is one. Material's
// plugin "offline" takes a script of this kind from the network unless a file with this name is given.
if (location.protocol === "file:")
	window.Worker = class extends EventTarget {
		constructor(url) {
			super();
			const frame = document.createElement("iframe"), script = document.createElement("script");
			frame.hidden = true;
			document.body.append(frame);
			this.inner = frame.contentWindow;
			this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
			this.loaded = new Promise((done) => script.addEventListener("load", done));
			script.src = url;
			this.inner.document.body.append(script);
		}
		async postMessage(data) {
			await this.loaded;
			this.inner.dispatchEvent(new MessageEvent("message", { data }));
		}
	};
