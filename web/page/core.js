// SPDX-License-Identifier: Apache-2.0
//
// The C++ core: WebAssembly that is embedded in this page, gzipped and in base64.

let core = null;

function unpacked(id) {
  const text = document.getElementById(id).textContent;
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

/** Starts the core. Resolves as soon as ask() can be called. */
export async function start() {
  const packed = new Blob([unpacked('core-packed')]).stream().pipeThrough(new DecompressionStream('gzip'));
  const wasmBinary = new Uint8Array(await new Response(packed).arrayBuffer());
  core = await globalThis.tesseraCore({wasmBinary});
  core.FS.writeFile('/sample.safetensors', sample());
  core.FS.mkdir('/own');
}

/** The sample's file: the first tokens of one head of a real model. */
export const sample = () => unpacked('sample');

/** Stores a file that the command can read by its path. It stays in this page's memory. */
export function keepFile(name, content) {
  const path = `/own/${name.replace(/[^\w.-]/g, '_')}`;
  core.FS.writeFile(path, content);
  answers.clear();  // answers about a file of this name are stale
  return path;
}

const answers = new Map();

/** Asks the core; throws Error with its message. Answers are cached, because equal questions have equal answers. */
export function ask(question) {
  const text = JSON.stringify(question);
  if (!answers.has(text)) {
    const answer = JSON.parse(core.ccall('tessera_web_answer', 'string', ['string'], [text]));
    if (answer.error !== undefined) throw new Error(answer.error);
    if (answers.size > 60) answers.clear();
    answers.set(text, answer.value);
  }
  return answers.get(text);
}

/** Returns what `tessera ARGS --json` prints. Throws Error with the command's own message. */
export function command(args) {
  const answer = ask({ask: 'command', args: [...args, '--json']});
  if (answer.text === '') throw new Error(answer.errors.trim());
  return JSON.parse(answer.text);
}
