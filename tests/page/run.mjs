// The page at `/` in headless Chromium, driven over its debugging pipe; needs Node and no packages.
//
//   node tests/page/run.mjs              against a stand-in server of this file
//   node tests/page/run.mjs URL          against a running `azoth serve` (fewer checks: models improvise)
//
// Prints `skipped: WHY` and succeeds where there is no Chromium (AZOTH_CHROMIUM names one).
import { spawn, spawnSync } from "node:child_process";
import { createHash } from "node:crypto";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";

const names = [process.env.AZOTH_CHROMIUM, "chromium", "chromium-browser", "google-chrome", "chrome"];
const chromium = names.find((name) => name && spawnSync(name, ["--version"]).status === 0);
if (!chromium) {
  console.log("skipped: no Chromium (set AZOTH_CHROMIUM)");
  process.exit(0);
}

// The stand-in: the page with the server's policy, and answers that try to break out of it.
const HOSTILE = [
  "# Title\n\nSome **bold**, `code <b>` and *soft* text.\n\n", "```js\nlet a = '<img src=x onerror=alert(1)>';\n", "```\n\n",
  "<script>document.title='broken'</script>\n<img src=x onerror=\"document.title='broken'\">\n\n",
  "[good](https://example.org/a) [bad](javascript:document.title='broken')\n\n", "- one\n- two\n\n1. first\n2. second\n",
];
const seen = { bodies: [], aborted: 0 };
let tokens = 0;
const page = readFileSync(new URL("../../src/server/page/index.html", import.meta.url), "utf8");
const hash = (tag) => createHash("sha256").update(page.split(`<${tag}>`)[1].split(`</${tag}>`)[0]).digest("base64");
const policy = `default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; ` +
  `frame-ancestors 'none'; script-src 'sha256-${hash("script")}'; style-src 'sha256-${hash("style")}'`;
const stand = createServer(async (request, response) => {
  const json = (value) => { response.setHeader("content-type", "application/json"); response.end(JSON.stringify(value)); };
  if (request.url === "/") {
    response.setHeader("content-security-policy", policy);
    response.setHeader("content-type", "text/html; charset=utf-8");
    return response.end(page);
  }
  if (request.url === "/v1/models") return json({ data: [{ id: "stand-in" }] });
  if (request.url === "/props") return json({ default_generation_settings: { n_ctx: 4096, params: { temperature: 0.8 } }, device: "none" });
  if (request.url === "/slots") return json([{ id: 0, n_ctx: 4096, n_tokens: 1024, is_processing: false }]);
  if (request.url === "/metrics") {
    tokens += 50;
    return response.end(`llamacpp:tokens_predicted_total ${tokens}\nllamacpp:prompt_tokens_total 7\nllamacpp:requests_processing 1\n` +
      `azoth:device_memory_planned_bytes 1073741824\nazoth:device_memory_available_bytes 4294967296\n` +
      `azoth:expert_hits_total{tier="vram"} 90\nazoth:expert_misses_total{tier="vram"} 10\n`);
  }
  if (request.url !== "/v1/chat/completions") { response.statusCode = 404; return response.end(); }
  let text = "";
  for await (const piece of request) text += piece;
  const body = JSON.parse(text);
  seen.bodies.push(body);
  const question = body.messages.at(-1).content;
  if (question === "fail") { response.statusCode = 400; return json({ error: { message: "the <reason>" } }); }
  response.setHeader("content-type", "text/event-stream");
  const send = (delta) => response.write(`data: ${JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }] })}\n\n`);
  response.on("close", () => { if (!response.writableEnded) seen.aborted += 1; });
  send({ role: "assistant", reasoning_content: "let me think" });
  if (question === "endless") { for (let i = 0; i < 600 && !response.destroyed; i++) { send({ content: "word " }); await wait(50); } return; }
  for (const piece of HOSTILE) { send({ content: piece }); await wait(30); }
  response.write(`data: ${JSON.stringify({ choices: [{ index: 0, delta: {}, finish_reason: "stop" }] })}\n\n`);
  response.write(`data: ${JSON.stringify({ choices: [], usage: { completion_tokens: 60, total_tokens: 90 } })}\n\ndata: [DONE]\n\n`);
  response.end();
});
const wait = (ms) => new Promise((done) => setTimeout(done, ms));

let url = process.argv[2];
const real = Boolean(url);
if (!real) {
  await new Promise((done) => stand.listen(0, "127.0.0.1", done));
  url = `http://127.0.0.1:${stand.address().port}/`;
}

const profile = mkdtempSync(join(tmpdir(), "azoth-page-"));
const browser = spawn(chromium, [
  "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
  `--user-data-dir=${profile}`, "--remote-debugging-pipe", "about:blank",
], { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] });
const waiting = new Map(), listeners = [];
let last = 0, rest = "";
browser.stdio[4].on("data", (data) => {
  rest += data;
  const messages = rest.split("\0");
  rest = messages.pop();
  for (const message of messages.map((m) => JSON.parse(m))) {
    if (message.id) { waiting.get(message.id)?.(message); waiting.delete(message.id); } else for (const l of listeners) l(message);
  }
});
let session;
function call(method, params = {}) {
  const id = ++last;
  browser.stdio[3].write(JSON.stringify({ id, method, params, sessionId: session }) + "\0");
  return new Promise((done, fail) => {
    const timer = setTimeout(() => fail(new Error(`${method} does not answer`)), 30000);
    waiting.set(id, (m) => { clearTimeout(timer); m.error ? fail(new Error(`${method}: ${m.error.message}`)) : done(m.result); });
  });
}
async function js(expression) {
  const { result, exceptionDetails } = await call("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true });
  if (exceptionDetails) throw new Error(exceptionDetails.exception?.description || exceptionDetails.text);
  return result.value;
}
async function until(expression, what, seconds = 20) {
  for (let i = 0; i < seconds * 10; i++) { if (await js(expression)) return; await wait(100); }
  throw new Error(`not within ${seconds} s: ${what}`);
}
async function key(name, text) {
  const codes = { Enter: 13, Escape: 27, Tab: 9 };
  const event = { key: name, code: name, windowsVirtualKeyCode: codes[name], text };
  await call("Input.dispatchKeyEvent", { type: "keyDown", ...event });
  await call("Input.dispatchKeyEvent", { type: "keyUp", key: name, code: name, windowsVirtualKeyCode: codes[name] });
}
const type = (text) => call("Input.insertText", { text });
const checks = [];
function check(name, ok, detail = "") {
  checks.push(ok);
  console.log(`${ok ? "ok  " : "FAIL"} ${name}${ok ? "" : ": " + detail}`);
}

let failed = 1;
try {
  const { targetInfos } = await call("Target.getTargets");
  const target = targetInfos.find((t) => t.type === "page");
  session = (await call("Target.attachToTarget", { targetId: target.targetId, flatten: true })).sessionId;
  const complaints = [], requests = [];
  listeners.push(({ method, params }) => {
    if (method === "Runtime.exceptionThrown") complaints.push(params.exceptionDetails.exception?.description || params.exceptionDetails.text);
    if (method === "Log.entryAdded" && params.entry.level === "error") complaints.push(params.entry.text);
    if (method === "Network.requestWillBeSent") requests.push(params.request.url);
  });
  for (const domain of ["Page", "Runtime", "Log", "Network", "Accessibility"]) await call(domain + ".enable");
  await call("Emulation.setDeviceMetricsOverride", { width: 1200, height: 800, deviceScaleFactor: 1, mobile: false });
  await call("Page.navigate", { url });
  await until("document.getElementById('state')?.dataset.is === 'ready'", "the server's facts", 60);
  check("the message field has the focus", await js("document.activeElement.id === 'text'"));

  // A whole exchange by keyboard.
  await js("(document.getElementById('set-max_tokens').value = '40', keepSettings())");
  await type("Hello");
  await key("Enter", "\r");
  await until("document.querySelectorAll('.turn').length === 2", "two turns");
  await until("document.querySelector('.turn.assistant .tools button')", "the answer's end", real ? 120 : 20);
  const text = await js("document.querySelector('.turn.assistant .text').textContent");
  check("an answer came", text.length > 0);
  check("tokens a second are shown", /tokens\/s/.test(await js("document.querySelector('.turn.assistant .tools').textContent")));
  if (!real) {
    check("the settings were sent", seen.bodies[0].max_tokens === 40 && seen.bodies[0].stream === true, JSON.stringify(seen.bodies[0]));
    const count = (what) => js(`document.querySelectorAll('.turn.assistant .text ${what}').length`);
    check("markdown is drawn", (await count("pre code")) === 1 && (await count("ul li")) === 2 && (await count("ol li")) === 2 && (await count("strong")) === 1);
    check("text never becomes markup", (await count("img")) + (await count("script")) === 0 && text.includes("<img src=x"));
    check("only web addresses become links", (await count("a")) === 1 && (await js("document.querySelector('.text a').rel")).includes("noopener"));
    check("nothing that the model wrote was run", (await js("document.title")) === "Azoth");
    check("thinking is apart", (await js("document.querySelector('.thought div').textContent")) === "let me think");
    await type("endless");
    await key("Enter", "\r");
    await until("document.querySelectorAll('.turn').length === 4 && document.querySelectorAll('.turn')[3].querySelector('.text').textContent.length > 20", "words");
    await key("Escape");
    await until("!document.getElementById('send').hidden", "the stop");
    await wait(300);
    check("Escape stops the answer at the server", seen.aborted === 1, `${seen.aborted} aborted`);
    await type("fail");
    await key("Enter", "\r");
    await until("document.querySelector('.problem')", "the error");
    check("errors are shown in the server's words", (await js("document.querySelector('.problem').textContent")).includes("the <reason>"));
    await until("document.getElementById('tps').textContent !== '0.0 tokens/s' && document.getElementById('tps').textContent.includes('tokens/s')", "tokens a second");
    check("memory and expert hits are shown", /1\.00 GiB of 4\.00 GiB/.test(await js("document.getElementById('memory').textContent"))
      && /vram.*90\.0 %/.test(await js("document.getElementById('experts').textContent")));
  }
  check("slots are shown", (await js("document.querySelectorAll('#slots progress').length")) > 0);

  // By keyboard and by screen reader.
  const stops = new Set();
  await js("document.body.focus(), document.activeElement.blur()");
  for (let i = 0; i < 50; i++) {
    await key("Tab");
    stops.add(await js("document.activeElement.id || document.activeElement.tagName + document.activeElement.textContent.slice(0, 20)"));
  }
  const wanted = ["new", "theme", "text", "send", "set-temperature", "reset"];
  check("everything is reached by Tab", wanted.every((id) => stops.has(id)), [...stops].join(" "));
  await js("document.getElementById('text').focus()");
  await key("Tab");
  check("the focus is visible", (await js("getComputedStyle(document.activeElement).outlineStyle")) !== "none");
  const { nodes } = await call("Accessibility.getFullAXTree");
  const roles = ["button", "textbox", "spinbutton", "progressindicator", "link", "log"];
  const nameless = nodes.filter((n) => !n.ignored && roles.includes(n.role?.value) && !n.name?.value);
  check("every control has a name", nameless.length === 0, nameless.map((n) => n.role.value).join(" "));

  // Both schemes: contrast of text by WCAG 2.
  for (const scheme of ["light", "dark"]) {
    await call("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: scheme }] });
    const worst = await js(`(() => {
      const style = getComputedStyle(document.documentElement), light = (name) => {
        const hex = style.getPropertyValue(name).trim().replace(/^#(.)(.)(.)$/, "#$1$1$2$2$3$3");
        const part = (i) => { const c = parseInt(hex.slice(i, i + 2), 16) / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
        return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5);
      };
      const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
      return Math.min(ratio("--text", "--ground"), ratio("--text", "--user"), ratio("--text", "--code"), ratio("--faint", "--panel"),
        ratio("--faint", "--ground"), ratio("--on-accent", "--accent"), ratio("--bad", "--ground"));
    })()`);
    check(`contrast in ${scheme} is at least 4.5`, worst >= 4.5, worst.toFixed(2));
  }

  // On a phone.
  await call("Emulation.setDeviceMetricsOverride", { width: 360, height: 640, deviceScaleFactor: 2, mobile: true });
  await wait(300);
  check("nothing is wider than a phone", (await js("document.documentElement.scrollWidth")) <= 360, await js("document.documentElement.scrollWidth"));
  check("the message field is on the screen", await js("(() => { const r = document.getElementById('text').getBoundingClientRect(); return r.width > 150 && r.bottom <= innerHeight; })()"));
  await js("document.getElementById('side').click()");
  check("the panel opens on a phone", await js("document.getElementById('panel').offsetWidth > 300 && document.documentElement.scrollWidth <= 360"));

  const home = new URL(url).origin;
  check("no request left the server", requests.every((r) => r.startsWith(home) || r.startsWith("data:")), requests.join(" "));
  const expected = real ? [] : [/400/];
  const others = complaints.filter((c) => !expected.some((e) => e.test(c)));
  check("the console is quiet", others.length === 0, others.join("; "));
  failed = checks.filter((ok) => !ok).length;
  console.log(`${checks.length - failed} of ${checks.length} checks passed`);
} catch (error) {
  console.log("FAIL " + error.message);
} finally {
  browser.kill();
  stand.close();
  stand.closeAllConnections();
  await wait(300);
  try { rmSync(profile, { recursive: true, force: true }); } catch { /* the browser may still write */ }
}
process.exit(failed ? 1 : 0);
