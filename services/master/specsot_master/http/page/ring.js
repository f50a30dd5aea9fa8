"use strict";
// Shows the model's name and whether the server is ready and, in a drawer, the ring with the times of its stages.

// onNews(info) is called with every status. The picture of the ring is drawn only while the drawer is open.
const ring = {timer: 0, reachable: true, running: false, plain: null};

async function look() {
  clearTimeout(ring.timer);
  if (!document.hidden) {
    try {
      const response = await fetch("ring", {headers: shown(), signal: AbortSignal.timeout(3000)});
      if (response.status !== 401 && !response.ok) throw new TypeError(response.statusText);
      if (response.ok) meet(await response.json());
      welcome(response.ok);
      ring.reachable = true;
    } catch {
      ring.reachable = false;
      tellState("lost", "the server cannot be reached");
      $("ring").classList.remove("moving");
      $("ring").classList.add("lost");
    }
  }
  clearTimeout(ring.timer);
  ring.timer = setTimeout(look, ring.running && ring.reachable ? 500 : 1500);
}

function welcome(known) {
  if (!known) tellState("waiting", storage().token ? "the token is not known here" : "a token is needed");
  if (!known && $("entry").hidden && !ring.running) setTimeout(() => $("token").focus());
  $("entry").hidden = known;
}

function tellState(state, words) {
  $("state").dataset.is = state;
  if ($("state-words").textContent !== words) $("state-words").textContent = words;  // only if it changed, because a screen reader reads every update
}

function meet(info) {
  const model = info.models[0], steps = {per_second: 0, tokens_per_step: 0, rows_per_step: 0, stages: [], ...info.steps};
  if (info.requests?.running === 0) steps.per_second = 0;  // the server reports the mean of the last seconds, but no request is running
  const stages = info.members.filter((one) => one.kind === "worker" && one.layers).sort((a, b) => a.layers.first - b.layers.first);
  const drafter = info.members.find((one) => one.kind === "drafter");
  const pace = steps.per_second * steps.tokens_per_step;
  tellState(info.ready ? "ready" : "waiting", info.ready ? "ready" : `waiting for ${info.waiting_for.join(", ")}`);
  $("state").dataset.pace = info.ready && pace ? `${pace.toFixed(pace < 10 ? 1 : 0)} tokens/s` : "";
  $("model").textContent = $("model").title = model?.name ?? "";
  const places = new Map(stages.map((one) => [`${one.device} ${one.gpu} ${one.host}`, placeOf(one)]).filter(([, place]) => place)), numbers = stages[0]?.dtype;
  const devices = new Set(stages.map((one) => one.device || one.gpu).filter(Boolean));
  $("machine").hidden = !model;
  $("machine-short").textContent = model ? [model.name, `a context of ${model.max_positions.toLocaleString("en")} tokens`, ...devices].join(" · ") : "";
  $("machine-words").textContent = model ? [`${count(model.layers, "layer")}${numbers ? `, ${numbers}` : ""}`,
    stages.length && `${count(stages.length, "stage")}${drafter ? " and a drafter" : ""}${places.size ? ` on ${[...places.values()].join("; ")}` : ""}`].filter(Boolean).join("; ") + "." : "";
  $("no-template").hidden = !model?.no_chat_template;
  if (model) set.max_tokens.max = model.max_positions - 1;
  if (!$("ring").hidden) draw(info, stages, drafter, steps);
}

// "AMD EPYC, 2 cores, 21.8 GiB, on node-1"
const placeOf = ({device, gpu, memory, host}) =>
  [device || gpu, memory && `${(memory / 2 ** 30).toFixed(1)} GiB`, host && (device || gpu ? `on ${host}` : host)].filter(Boolean).join(", ");
const inMs = (ms) => ms ? `${ms.toFixed(ms < 10 ? 2 : 1)} ms` : "–";

function draw(info, stages, drafter, steps) {
  const moving = steps.per_second > 0, ms = (stage) => steps.stages[stage] === undefined ? undefined : steps.stages[stage] * 1000;
  const least = stages.map((one, n) => 1000 * one.min_seconds <= (ms(n) ?? Infinity) ? 1000 * one.min_seconds : 0);  // a minimum above the mean is a measuring error
  $("ring").classList.toggle("moving", moving);
  $("ring").classList.remove("lost");
  $("ring").style.setProperty("--step-time", `${Math.min(2, Math.max(0.15, 4 / (steps.per_second || 1)))}s`);
  $("ring-words").textContent = `${count(stages.length, "stage")}${drafter ? " and a drafter" : ""}, ${steps.per_second.toFixed(1)} steps a second, ` +
    `${steps.tokens_per_step.toFixed(1)} tokens a step`;
  const most = Math.max(...steps.stages, 1e-9);
  const seats = stages.map((one, n) => seat(place(n, stages.length), width(stages.length), [
    `stage ${n}`, `layers ${one.layers.first}–${one.layers.last - 1}`, steps.stages[n] === undefined ? "" : inMs(ms(n))],
    moving ? (steps.stages[n] ?? 0) / most : 0));
  if (drafter) seats.push(seat([200, 212], 116, ["drafter", `${steps.rows_per_step.toFixed(1)} rows a step`, ""], 0));
  $("drawing").replaceChildren(
    svg("ellipse", {class: "track", cx: 200, cy: 125, rx: 150, ry: 85}),
    svg("ellipse", {class: "flow", cx: 200, cy: 125, rx: 150, ry: 85}),
    ...seats,
    words(200, 112, steps.per_second.toFixed(1), "big", "steps"), words(200, 128, "steps a second", "small"),
    words(200, 154, steps.tokens_per_step.toFixed(1), "big", "tokens"), words(200, 170, "tokens a step", "small"));
  const row = (tag, ...cells) => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  $("stages").replaceChildren(make("thead", {}, row("th", "stage", "layers", "weights", moving ? "a step now" : "newest step", "at least")),
    make("tbody", {}, ...stages.map((one, n) => row("td", [`${n}: ${one.name}`, one.host].filter(Boolean).join(", "),
      `${one.layers.first}–${one.layers.last - 1}`, one.weights ? `${(one.weights / 2 ** 20).toFixed(0)} MiB` : "–", inMs(ms(n)), inMs(least[n])))));
  const pace = steps.per_second * steps.tokens_per_step, whole = least.every(Boolean) && 1000 / least.reduce((sum, one) => sum + one, 0);
  $("reach").textContent = [
    whole && `At least: a step reads all weights once, as fast as each stage copies memory. A single answer without drafts can reach ${whole.toFixed(1)} tokens/s by that.`,
    pace && `Now ${pace.toFixed(1)} tokens/s are written${whole ? `, ${(pace / whole).toFixed(1)} times that` : ""}.`,
    info.pages && `${(100 * (1 - info.pages.free / info.pages.total)).toFixed(0)} % of the memory for contexts is in use.`].filter(Boolean).join(" ");
}

const place = (n, count) => {
  const angle = Math.PI * (1 + (n + .5) / count);
  return [200 + 150 * Math.cos(angle), 125 + 85 * Math.sin(angle)];
};
const width = (count) => Math.min(104, 300 / count);

function seat([x, y], wide, lines, heat) {
  const shown = wide < 60 ? [lines[0].replace("stage ", ""), "", lines[2]] : lines, tall = 58;
  const [left, top] = [Math.max(2, Math.min(398 - wide, x - wide / 2)), y - tall / 2], middle = left + wide / 2;
  return svg("g", {"data-seat": lines[0]}, svg("rect", {class: "seat", x: left, y: top, width: wide, height: tall, rx: 8}),
    svg("rect", {class: "heat", x: left + 8, y: top + tall - 7, width: Math.max(0, (wide - 16) * heat), height: 3, rx: 1.5}),
    ...shown.filter(Boolean).map((said, n, all) => words(middle, y + 2 + (n - (all.length - 1) / 2) * 14, said, n ? "small" : "")));
}

function svg(tag, attributes, ...children) {
  const one = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  one.append(...children);
  return one;
}

function words(x, y, said, kind, id = "") {
  return svg("text", {x, y, class: kind, ...(id ? {"data-is": id} : {})}, said);
}
