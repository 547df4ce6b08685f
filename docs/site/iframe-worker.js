// Search in a site that was opened from disk. Browsers refuse web workers to pages of file:, and the theme's search is
// one. There it runs in a hidden frame instead, with the three functions of a worker that it uses; the name is the one
// that the theme looks for. (The theme would load such a script from the network.)
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      const load = source => new Promise((done, failed) => {
        const script = this.inside.document.createElement("script")
        script.onload = done
        script.onerror = failed
        script.src = source
        this.inside.document.body.append(script)
      })
      this.inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = load(address)
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
  window.Worker = window.IFrameWorker
}
