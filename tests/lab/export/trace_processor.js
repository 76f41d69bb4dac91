// Perfetto's trace_processor, as the WebAssembly its viewer runs it as, behind a Unix socket:
// `node trace_processor.js FOLDER SOCKET`. FOLDER holds the viewer's engine_bundle.js and *.wasm.
// The engine takes this for a browser's worker; its bytes are passed on as they are.
"use strict";
const fs = require("fs");
const net = require("net");
const path = require("path");
const vm = require("vm");

const [folder, socket] = process.argv.slice(2);

class XMLHttpRequest {
  open(method, name) {
    this.file = path.join(folder, path.basename(name));
  }
  send() {
    this.response = new Uint8Array(fs.readFileSync(this.file)).buffer;
  }
}

const console_ = { log() {}, warn: console.error, error: console.error };
const worker = { console: console_, XMLHttpRequest, WorkerGlobalScope: class {} };
Object.assign(worker, { performance, crypto, setTimeout, clearTimeout, TextDecoder, TextEncoder, URL });
Object.assign(worker, { Uint8Array, self: worker, location: { href: "file:///" } });
vm.createContext(worker);
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), worker);

const server = net.createServer((connection) => {
  const port = { postMessage: (reply) => connection.write(Buffer.from(reply)) };
  worker.onmessage({ data: port });
  connection.on("data", (request) => port.onmessage({ data: new Uint8Array(request) }));
  connection.on("close", () => process.exit(0));
});
setImmediate(() => server.listen(socket)); // the engine's own start waits for its first turn
