"use strict";
// The conversation: sends questions, shows and stores the turns, and handles keys, buttons and settings.

const form = $("form"), question = $("question"), set = $("set").elements;
let talk = newTalk();
let run = null;  // the question under way: {talk, turn, view, stop}

const EXAMPLES = ["What are the benefits of regular exercise?", "How can I prepare for a job interview?", "Write a short poem about the sea.",
  "Write a Python function that counts the words of a text."];

const REST = "Continue where you stopped, and repeat nothing.";

// --- the token, if the server needs one: stored until the window is closed ---

function storage() { try { return sessionStorage; } catch { return storage.ours ??= {}; } }
const shown = () => storage().token ? {authorization: `Bearer ${storage().token}`} : {};

$("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  storage().token = $("token").value.trim();
  $("token").value = "";
  look();
});

// --- asking ---

function submit() {
  if (run || !form.reportValidity()) return;
  if (!$("set").checkValidity()) { openSettings(); $("set").reportValidity(); return; }
  const text = question.value.trim();
  if (!text) return;
  talk.turns.push({role: "user", content: text});
  question.value = "";
  fit();
  answer(form.elements.mode.value);
}

// Answers the last question of the conversation. again: whether the question was answered before, so that the new
// answer should differ.
async function answer(mode, again = false) {
  talk.turns.push({...newAnswer(), mode});
  await write((mine) => send(mine, again));
}

// Writes the last turn of the conversation. ask: sends what is asked for, and returns the stream.
async function write(ask) {
  const turn = talk.turns.at(-1), stop = new AbortController();
  const view = new Answer(turn, {live: true, retry, more, again: (other) => retry(other ?? turn.mode, true)});
  const mine = run = {talk, turn, view, stop};
  keepTalk(talk);
  show();
  follow(view, !turn.content);
  setBusy(true);
  try {
    await listen(await ask(mine), view);
  } catch (error) {
    if (stop.signal.aborted) view.end("stopped");
    else view.end("failed", error);
  }
  run = null;
  keepTalk(mine.talk);
  setBusy(false);
  listTalks();
  settle(mine);
}

// mode: the mode of the new answer; that of the form unless given.
function retry(mode = form.elements.mode.value, again = false) {
  if (run) return;
  while (talk.turns.at(-1)?.role === "assistant") talk.turns.pop();
  answer(mode, again);
}

// Continues an answer that its limit cut: a direct one where it stopped, in the same turn. Sections of a planned one may
// have been cut in several places, so its rest is asked for as a further turn.
function more() {
  if (run) return;
  const turn = talk.turns.at(-1);
  if (!turn.parts.some((one) => one.id)) {
    Object.assign(turn, {state: "writing", figures: null, continued: true});
    for (const part of turn.parts) part.state = "writing";
    write(sendRest);
    return;
  }
  talk.turns.push({role: "user", content: REST});
  answer("direct");
}

// Makes the page follow a direct answer as it grows, but not a planned one. fresh: whether the answer begins; its question
// is then scrolled to the top.
function follow(view, fresh) {
  $("turns").dataset.follows = "yes";
  if (fresh) view.box.previousElementSibling?.scrollIntoView({block: "start"});
}

function settle({turn}) {
  delete $("turns").dataset.follows;
  const ends = {stop: "The answer is complete.", length: "The answer is complete: it was cut.", stopped: "The answer is not complete: stopped.", failed: "The answer is not complete: failed."};
  $("announcement").textContent = ends[turn.state] ?? "";
}

const system = () => set.system.value.trim() ? [{role: "system", content: set.system.value.trim()}] : [];

function body(messages, {turn}, again) {
  const fields = {
    messages: [...system(), ...messages],
    temperature: set.temperature.valueAsNumber, stream: true,
    specsot: {mode: turn.mode, max_parallel: set.max_parallel.valueAsNumber, branches: true},
  };
  // Without a limit of the user, a first question may take as many tokens as the context holds. With earlier turns
  // the limit is always sent, so that the oldest turns give way.
  if (messages.length > 1 || set.max_tokens.value !== set.max_tokens.defaultValue) fields.max_tokens = set.max_tokens.valueAsNumber;
  if (again && !fields.temperature && !set.seed.value) fields.temperature = turn.temperature = .7;  // temperature 0 would write the same answer again
  if (set.top_p.value) fields.top_p = set.top_p.valueAsNumber;
  if (set.thinking.value) fields.reasoning_effort = set.thinking.value;
  if (set.finish_within_s.value) fields.specsot.finish_within_s = set.finish_within_s.valueAsNumber;
  return withSeed(fields);
}

// Returns the fields as JSON, with the seed of the settings.
function withSeed(fields) {
  const text = JSON.stringify(fields), seed = set.seed.value;
  return seed ? `${text.slice(0, -1)},"seed":${BigInt(seed)}}` : text;  // a seed has more digits than a JavaScript number
}

// Returns the messages of the conversation, without questions that got no answer.
const messagesOf = (turns) => turns.filter((one, n) => one.content.trim() && (turns[n + 1]?.content ?? "yes").trim()).map(({role, content}) => ({role, content}));

// Returns the messages without the oldest exchanges, if the server refused them because they exceed the context: as many
// as its error requires, estimated by characters. Returns null if that would not help, or for any other error.
function fewer(messages, error) {
  const [, limit, prompt, wanted] = (/length is (\d+) .*\((\d+) in the \w+, (\d+) in/.exec(error?.message) ?? []).map(Number);
  const starts = messages.flatMap((one, n) => n && one.role === "user" ? [n] : []);
  if (error?.code !== "context_length_exceeded" || !starts.length || wanted >= limit) return null;
  const share = (some) => some.reduce((sum, one) => sum + one.content.length, 0) / messages.reduce((sum, one) => sum + one.content.length, 0);
  return messages.slice(starts.find((n) => prompt * share(messages.slice(0, n)) >= prompt + wanted - limit) ?? starts.at(-1));
}

// Sends the conversation and returns the stream of the answer. If it is longer than the model's context, the oldest
// exchanges are left out.
async function send(mine, again) {
  const all = messagesOf(mine.talk.turns.slice(0, -1));
  let messages = all;
  for (;;) {
    const headers = {"content-type": "application/json", ...shown()};
    const response = await fetch("v1/chat/completions", {method: "POST", headers, body: body(messages, mine, again), signal: mine.stop.signal});
    if (response.ok) {
      if (messages !== all) mine.turn.left = "The oldest turns no longer fit the model's context and were left out.";
      return response.body;
    }
    const error = (await response.json().catch(() => ({}))).error;
    messages = fewer(messages, error);
    if (!messages) throw Object.assign(new Error(error?.message ?? response.statusText), {status: response.status});
  }
}

// Returns the stream of the rest of a direct answer. Its prompt is that of the answer, followed by what was written.
async function sendRest({talk: its, turn, stop}) {
  const post = async (path, json) => {
    const headers = {"content-type": "application/json", ...shown()};
    const response = await fetch(path, {method: "POST", headers, body: json, signal: stop.signal});
    if (response.ok) return response;
    const error = (await response.json().catch(() => ({}))).error;
    throw Object.assign(new Error(error?.message ?? response.statusText), {status: response.status});
  };
  const tokenize = async (fields) => (await post("tokenize", JSON.stringify(fields))).json();
  const asked = await tokenize({messages: [...system(), ...messagesOf(its.turns.slice(0, -1))]});
  const written = await tokenize({prompt: turn.content, add_special_tokens: false});
  const prompt = [...asked.tokens, ...written.tokens];
  const most = Math.max(asked.max_model_len - prompt.length, 1);  // if nothing fits, the server says so
  return (await post("v1/completions", withSeed({prompt, max_tokens: Math.min(set.max_tokens.valueAsNumber, most), temperature: set.temperature.valueAsNumber,
    ...(set.top_p.value ? {top_p: set.top_p.valueAsNumber} : {}), stream: true, stream_options: {include_usage: true}}))).body;
}

async function listen(stream, view) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "", done = false;
  for (;;) {
    const {value, done: over} = await reader.read();
    if (over) break;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") { done = true; continue; }
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw Object.assign(new Error(chunk.error.message), {status: 0, reported: true});
      view.receive(chunk, event);
    }
  }
  if (!done) throw new TypeError("the stream broke off");
  if (view.turn.state === "writing") view.end(view.reason);  // a completion has no event that ends it
}

function setBusy(busy) {
  $("ask").hidden = busy;
  $("stop").hidden = !busy;
  ring.running = busy;
  document.body.dataset.is = busy ? "busy" : "idle";
  if (!busy && document.activeElement === document.body && matchMedia("(hover: hover)").matches) question.focus({preventScroll: true});
  look();
}

// --- this conversation, and the stored ones ---

function show() {
  const boxes = talk.turns.map((turn, n) => {
    if (turn.role === "user") return asked(turn, n);
    if (turn === run?.turn) return run.view.box;
    const last = n === talk.turns.length - 1;
    return new Answer(turn, last ? {retry, more, again: (other) => retry(other ?? turn.mode, true)} : {}).box;
  });
  $("turns").replaceChildren(...boxes);
  $("hello").hidden = talk.turns.length > 0;
  document.title = talk.title ? `${talk.title} · SpecSoT` : "SpecSoT";
  listTalks();
}

function asked(turn, n) {
  const edit = make("button", {type: "button", class: "quiet"}, "Edit");
  edit.addEventListener("click", () => {
    if (run) return;
    question.value = turn.content;
    talk.turns.length = n;
    show();
    fit();
    question.focus();
  });
  return make("div", {class: "asked"}, make("p", {dir: "auto"}, turn.content), edit);
}

function listTalks() {
  $("talks").replaceChildren(...talks().map((one) => {
    const open = make("button", {type: "button", class: "open", "aria-current": one.id === talk.id ? "true" : null, title: one.title}, one.title);
    open.addEventListener("click", () => enter(run?.talk.id === one.id ? run.talk : one));
    const save = make("button", {type: "button", class: "icon", title: "Save as Markdown", "aria-label": `Save as Markdown: ${one.title}`}, "↓");
    save.addEventListener("click", () => download(one));
    const away = make("button", {type: "button", class: "icon", title: "Delete", "aria-label": `Delete: ${one.title}`}, "✕");
    away.addEventListener("click", () => { if (confirm(`Delete "${one.title}"?`)) forget(one); });
    return make("li", {}, open, save, away);
  }));
}

function enter(one) {
  talk = one;
  showSide(false);
  show();
  if (matchMedia("(hover: hover)").matches) question.focus();
  scrollTo({top: talk.turns.length ? document.body.scrollHeight : 0});
}

function forget(one) {
  if (run?.talk.id === one.id) run.stop.abort();
  shelf.remove(TALK + one.id);
  if (one.id === talk.id) enter(newTalk()); else listTalks();
}

function download(one) {
  const link = make("a", {href: URL.createObjectURL(new Blob([asMarkdown(one)], {type: "text/markdown"})), download: `${one.title.replace(/[^\w -]/g, "").trim() || "conversation"}.md`});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// --- settings ---

const FIELDS = ["system", "max_tokens", "max_parallel", "temperature", "top_p", "seed", "finish_within_s", "thinking", "colours"];

function keepSettings() {
  const kept = Object.fromEntries(FIELDS.map((name) => [name, name === "colours" ? set[name].checked : set[name].value]));
  shelf.set(SETTINGS, JSON.stringify({...kept, mode: form.elements.mode.value}));
  document.body.classList.toggle("plain", !set.colours.checked);
}

function takeSettings(kept) {
  for (const name of FIELDS) if (kept?.[name] !== undefined) if (name === "colours") set.colours.checked = kept.colours; else set[name].value = kept[name];
  if (kept?.mode) form.elements.mode.value = kept.mode;
  document.body.classList.toggle("plain", !set.colours.checked);
}

function openSettings() { if (!$("settings").open) $("settings").showModal(); }

$("open-settings").addEventListener("click", openSettings);
$("set").addEventListener("input", () => { if ($("set").checkValidity()) keepSettings(); });
$("settings").addEventListener("close", () => { if (!$("set").checkValidity()) { $("set").reset(); takeSettings(read(SETTINGS)); } });
$("settings").addEventListener("click", (event) => { if (event.target === $("settings")) $("settings").close(); });
$("modes").addEventListener("change", keepSettings);
$("defaults").addEventListener("click", () => { $("set").reset(); form.elements.mode.value = "auto"; keepSettings(); });
$("clear").addEventListener("click", () => {
  if (!confirm(`Delete ${count(talks().length, "conversation")}?`)) return;
  for (const one of talks()) forget(one);
  enter(newTalk());
});

// --- keys, buttons, layout ---

function fit() {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight + 2, innerHeight * .4)}px`;
}

function showSide(open) {
  $("side").classList.toggle("open", open);
  $("menu").setAttribute("aria-expanded", `${open}`);
}

function showRing(open) {
  $("ring").hidden = !open;
  $("state").setAttribute("aria-expanded", `${open}`);
  if (open) look();
}

form.addEventListener("submit", (event) => { event.preventDefault(); submit(); });
question.addEventListener("input", fit);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) { run?.stop.abort(); showSide(false); showRing(false); }
  if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) { event.preventDefault(); enter(newTalk()); }
  if (event.key === "/" && !event.target.closest("input, textarea")) { event.preventDefault(); question.focus(); }
});
$("stop").addEventListener("click", () => run?.stop.abort());
$("new").addEventListener("click", () => enter(newTalk()));
$("menu").addEventListener("click", () => showSide(!$("side").classList.contains("open")));
$("room").addEventListener("click", (event) => { if (!event.target.closest("#menu")) showSide(false); });
$("state").addEventListener("click", () => showRing($("ring").hidden));
$("close-ring").addEventListener("click", () => { showRing(false); $("state").focus(); });
document.addEventListener("visibilitychange", look);
addEventListener("storage", listTalks);  // a conversation changed in another window
addEventListener("pagehide", () => { if (run) keepTalk(run.talk); });

if (shelf.get(THEME)) document.documentElement.dataset.theme = shelf.get(THEME);
$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  shelf.set(THEME, root.dataset.theme);
});
$("examples").append(...EXAMPLES.map((words) => {
  const chip = make("button", {type: "button"}, words);
  chip.addEventListener("click", () => { question.value = words; submit(); });
  return chip;
}));
$("base").textContent = new URL("v1", location).href;
takeSettings(read(SETTINGS));
show();
look();
