"use strict";
// Shows one answer on the page, from its events or as it was stored. While a planned answer is written, only the first
// unfinished section grows. Later sections show their heading and first lines until it is their turn, so that nothing
// moves above the line that the user reads.

// A line of a plan, in any form of plan: a number, then optionally a length, a label and needs, then the title.
const TITLE = /^\s*(\d{1,4})[.)]\s*(?:<[^>\n]*>\s*)*(?:\[[-\d, ]*\]\s*)?([^\s<\[].*)$/gm;
const STATES = {planned: "", waiting: "waits", writing: "writing", stop: "done", length: "cut at its limit", cancelled: "stopped",
  stopped: "stopped", failed: "failed", parent_failed: "left out: what it needs failed"};
const SENTENCE_END = /[.!?。！？][\s"'*”’)]*$/;
const OPEN = ["planned", "waiting", "writing"];  // states of an unfinished part
const READING = "reading the question";  // shown until the first text or a forecast arrives
const NOTHING_NEW = 1.05;  // tokens per step: below this, drafts are not mentioned

const newAnswer = () => ({role: "assistant", content: "", thoughts: "", parts: [], state: "writing", figures: null, note: ""});

// Ends an answer that was interrupted: removes points without text, and joins the others under their headings, as in a
// complete answer.
function cutShort(turn, state) {
  const textOf = (one) => one.runs.map(([text]) => text).join("").trim();
  turn.state = state;
  turn.parts = turn.parts.filter((one) => textOf(one) || !OPEN.includes(one.state));
  for (const one of turn.parts) if (OPEN.includes(one.state)) one.state = state;
  let headings = 0;
  turn.content = turn.parts.filter(textOf).map((one) => one.title ? `## ${++headings}. ${one.title}\n${textOf(one)}` : textOf(one)).join("\n\n");
}

// A section of the answer. Its record has the id: 0 for a direct answer or the introduction of a plan, otherwise that of a
// branch; a branch without a title is the closing. runs: a list of [text, tokens of its step].
class Part {
  constructor(record) {
    this.record = record;
    this.body = make("div", {class: "body", dir: "auto"});
    this.meta = make("p", {class: "meta"});
    this.head = make("h3");
    this.shown = false;  // whether the user opened the section before its turn
    this.number = record.id;  // in the heading, which Answer.turnOver counts; 0 for a section that has ended without text
    const now = make("button", {type: "button", class: "quiet now", title: "Show this section before its turn"}, "Read now");
    now.addEventListener("click", () => { this.shown = true; this.box.classList.remove("ahead"); });
    this.box = make("section", {class: "part", "data-branch": record.id}, ...(record.id ? [this.head, this.meta, now] : []), this.body);
    if (record.runs.length) render(this.body, record.runs);
    this.showState();
  }

  add(text, step) {
    const runs = this.record.runs, clean = text.replace(/\r\n?/g, "\n");
    if (runs.length && runs.at(-1)[1] === step && step < 2) runs.at(-1)[0] += clean; else runs.push([clean, step]);
    this.record.tokens += step;
    this.record.steps += 1;
    painter.add(this);
  }

  draw() {
    render(this.body, this.record.runs);
    this.showState();
  }

  mark(state) {
    this.record.state = state;
    this.showState();
  }

  showState() {
    const {id, title, state, tokens, steps, needs} = this.record;
    this.box.dataset.is = state;
    this.body.classList.toggle("cut", state === "length" && !SENTENCE_END.test(this.record.runs.at(-1)?.[0] ?? "."));
    this.head.textContent = title && this.number ? `${this.number}. ${title}` : title;
    this.head.hidden = !title;
    const pace = steps && tokens / steps > NOTHING_NEW ? ` · ${(tokens / steps).toFixed(1)} a step` : "";
    const after = state === "waiting" && needs.length ? ` for ${needs.join(", ")}` : "";
    this.meta.textContent = `${id && !title ? "closing · " : ""}${STATES[state] ?? state}${after}${tokens ? ` · ${count(tokens, "token")}${pace}` : ""}`;
  }
}

// Draws the parts that changed, at most once per animation frame.
const painter = {
  waiting: new Set(),
  asked: 0,
  add(part) {
    this.waiting.add(part);
    this.asked ||= requestAnimationFrame(() => { this.asked = 0; this.draw(); });
  },
  draw() {
    const follows = atTheEnd();
    for (const part of this.waiting) part.draw();
    this.waiting.clear();
    if (follows) scrollTo({top: document.body.scrollHeight});
  },
};
const atTheEnd = () => $("turns").dataset.follows === "yes" && !document.querySelector(".planned") && innerHeight + scrollY > document.body.scrollHeight - 80;

class Answer {
  // turn: the stored answer; one whose state is "writing" may have a beginning. actions: what the buttons do, {again(mode), retry(), more()}; a missing one has no button.
  // actions.live: whether the answer is being written now.
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.raw = "";
    this.parts = new Map();
    this.thoughts = make("p");
    this.thinking = make("details", {class: "thinking", hidden: ""}, make("summary", {}, "Thoughts"), this.thoughts);
    this.status = make("p", {class: "hint status"});
    this.list = make("div", {class: "parts"});
    this.ending = make("div", {class: "ending"});
    this.box = make("article", {class: "answer", "aria-label": "Answer"}, this.thinking, this.list, this.status, this.ending);
    if (turn.state === "writing" && !actions.live) cutShort(turn, "stopped");  // the page was closed while it was written
    if (turn.thoughts) this.think("");
    for (const part of turn.parts) this.show(part);
    this.showStatus(turn.mode === "sot" ? "planning" : READING);
    if (turn.state !== "writing") this.close(); else this.box.dataset.is = "writing";
  }

  show(record) {
    const part = new Part(record);
    this.parts.set(record.id, part);
    if (record.id) this.list.append(part.box); else this.list.prepend(part.box);
    this.turnOver();
    return part;
  }

  // Folds the sections after the first unfinished one, except those that the user opened. Numbers the headings as in the
  // answer's text: a section that has ended without text does not count.
  turnOver() {
    let ahead = false, headings = 0;
    for (const box of this.list.children) {
      const part = this.parts.get(Number(box.dataset.branch)), {title, runs, state} = part.record;
      part.number = title && (runs.length || OPEN.includes(state)) ? ++headings : 0;
      part.showState();
      box.classList.toggle("ahead", ahead && this.turn.state === "writing" && !part.shown);
      ahead ||= part.record.id > 0 && OPEN.includes(part.record.state);
    }
  }

  part(id, title = "", state = "writing") {
    if (this.parts.has(id)) return this.parts.get(id);
    const record = {id, title, needs: [], runs: [], tokens: 0, steps: 0, state};
    if (id) this.turn.parts.push(record); else this.turn.parts.unshift(record);
    if (id) this.list.classList.add("planned");
    return this.show(record);
  }

  receive(chunk, json) {
    const choice = chunk.choices[0], event = choice?.specsot, delta = choice?.delta ?? {content: choice?.text};
    this.reason = choice?.finish_reason ?? this.reason;
    if (chunk.usage) this.part(0).record.tokens += chunk.usage.completion_tokens;
    if (delta.reasoning_content ?? delta.reasoning) this.think(delta.reasoning_content ?? delta.reasoning);
    if (delta.content) {
      this.thinking.open = false;
      if (this.status.textContent.startsWith(READING)) this.showStatus("writing");
      this.turn.content += delta.content;
      if (event?.step_tokens || !this.turn.parts.some((one) => one.id)) this.part(0).add(delta.content, event?.step_tokens ?? 0);
    }
    if (event) this.on[event.event]?.call(this, event, json);
  }

  on = {
    started(event, json) {
      this.turn.seed = json.match(/"seed":(\d+)/)[1];  // a string, because a seed has more digits than a JavaScript number
      if (forecastText(event.forecast)) this.showStatus(`${READING}; ${forecastText(event.forecast)}`);
    },
    skeleton_text(event) {
      this.raw += event.text;
      for (const [, id, title] of this.raw.matchAll(TITLE)) {
        const part = this.part(Number(id), title, "planned");
        part.record.title = title;
        part.showState();
      }
      this.showStatus("planning");
    },
    planned(event) {
      const points = new Map(event.points.map((point) => [point.id, point]));
      for (const id of [...this.parts.keys()]) if (id && !points.has(id)) this.drop(id);
      if (!points.size) this.list.classList.remove("planned");
      for (const [id, point] of points) {
        const part = this.part(id);
        this.list.append(part.box);  // in the plan's order
        Object.assign(part.record, {title: point.title, needs: point.needs, state: "waiting"});
        part.showState();
      }
      this.turnOver();
      this.showStatus(points.size ? [`${count(points.size, "point")}`, forecastText(event.forecast)].filter(Boolean).join("; ") : "writing");
    },
    branch_started(event) {
      this.part(event.branch, event.title).mark("writing");
      this.turnOver();
    },
    branch_text(event) { this.part(event.branch).add(event.text, event.step_tokens); },
    branch_finished(event) {
      const part = this.part(event.branch);
      // A closing that concludes nothing is left out of the answer.
      if (part.record.title || part.record.runs.length) part.mark(event.reason); else this.drop(event.branch);
      this.turnOver();
    },
    finished(event) {
      this.turn.figures = event.statistics;
      this.turn.content = event.text ?? this.turn.content;
      this.joined(event);
      this.end(event.reason === "cancelled" ? "stopped" : event.reason);
    },
  };

  // Removes the branches if a last pass rewrote them into one text, which is the answer then.
  joined(event) {
    if (!event.statistics.polish_tokens || !this.parts.has(0)) return;
    for (const id of [...this.parts.keys()]) if (id) this.drop(id);
  }

  drop(id) {
    this.parts.get(id).box.remove();
    this.parts.delete(id);
    this.turn.parts = this.turn.parts.filter((one) => one.id !== id);
  }

  think(text) {
    this.turn.thoughts = (this.turn.thoughts ?? "") + text;
    this.thinking.open = !this.turn.content;
    this.thinking.hidden = false;
    this.thoughts.textContent = this.turn.thoughts;
  }

  showStatus(words) { this.status.textContent = words; }

  // state: stop, length, stopped, failed.
  end(state, error = null) {
    painter.draw();
    this.turn.state = state;
    if (error) this.turn.note = error.message;
    if (state === "stopped" || state === "failed") cutShort(this.turn, state);
    for (const [id, part] of [...this.parts]) if (!this.turn.parts.includes(part.record)) this.drop(id);
    for (const part of this.parts.values()) part.mark(OPEN.includes(part.record.state) ? state : part.record.state);
    this.close(error);
  }

  close(error = null) {
    const {turn} = this;
    this.box.dataset.is = turn.state;
    this.list.classList.remove("planned");
    this.turnOver();
    this.showStatus("");
    this.status.hidden = true;
    if (![...this.parts.keys()].some(Boolean) && this.parts.has(0)) this.parts.get(0).record.state = turn.state;
    // Tokens of a continuation are counted at its end alone.
    const ends = {stopped: turn.continued ? "Stopped here." : this.tokens ? `Stopped here, after ${count(this.tokens, "token")}.` : "Stopped before the answer began.", length: this.cut()}[turn.state];
    this.ending.replaceChildren(
      ...(ends ? [make("p", {class: "end"}, ends)] : []),
      ...(turn.state === "failed" ? [failure(turn.note, error, this.actions.retry)] : []),
      ...(turn.left ? [make("p", {class: "hint"}, turn.left)] : []),
      ...(turn.figures ? [figuresOf(turn, [...this.parts.values()].map((one) => one.record))] : []),
      this.buttons());
  }

  get tokens() { return this.turn.parts.reduce((sum, one) => sum + one.tokens, 0); }

  cut() {
    const short = this.turn.parts.filter((one) => one.id && one.state === "length").length;
    return short && short < this.turn.parts.length ? `${count(short, "point")} of ${this.turn.parts.length} cut at ${short === 1 ? "its" : "their"} share of the tokens.` :
      `Cut at ${count(this.turn.figures?.completion_tokens ?? this.tokens, "token")}, the limit in Settings.`;
  }

  buttons() {
    const {turn, actions} = this, planned = turn.parts.some((one) => one.id);
    const button = (label, act, title) => {
      const one = make("button", {type: "button", class: "quiet", title}, label);
      one.addEventListener("click", act);
      return one;
    };
    return make("div", {class: "actions"},
      ...(turn.content ? [copyButton(() => turn.content)] : []),
      ...(actions.more && turn.content && turn.state === "length" ? [button("Continue", actions.more, "Ask for the rest")] : []),
      ...(actions.again && turn.state !== "failed" ? [
        button("Again", () => actions.again(null), "Another answer to the same question"),
        button(planned ? "As one text" : "In points", () => actions.again(planned ? "direct" : "sot"), planned ? "The same question without a plan" : "The same question with a plan"),
      ] : []));
  }
}

// --- figures and errors ---

function forecastText(forecast) {
  const figure = (seconds) => seconds.toFixed(seconds < 5 ? 1 : 0);
  const known = ["direct", "planned"].filter((way) => (forecast?.[way] ?? null) !== null);
  return known.map((way) => {
    const low = forecast[`${way}_least`], high = forecast[`${way}_most`];
    return high > 1.5 * low ? `${way} ${figure(low)}-${figure(high)} s` : `${way} ~${figure(forecast[way])} s`;
  }).join(", ");
}

// Returns one line with the main figures, which unfolds to all others.
function figuresOf(turn, parts) {
  const figures = turn.figures, paused = figures.paused_share >= .5, drafted = figures.mean_accepted > NOTHING_NEW;
  const branches = parts.filter((one) => one.id);
  const alone = branches.reduce((sum, one) => sum + one.steps, 0);
  const line = [`${figures.seconds.toFixed(1)} s`, count(figures.merged_tokens, "token"), `${figures.tokens_per_second.toFixed(1)} tokens/s`];
  if (branches.length) line.push(`${count(branches.length, "branch", "branches")} in ${count(figures.steps, "step")}${alone > figures.steps ? `, ${alone.toLocaleString("en")} one after another` : ""}`);
  else line.push(count(figures.steps, "step"));
  if (paused) line.push("drafting paused: not profitable here");
  else if (drafted) line.push(`drafts: ${figures.mean_accepted.toFixed(1)} tokens a step`);
  const phases = Object.entries(figures.phases ?? {}).filter(([, seconds]) => seconds >= .05).map(([name, seconds]) => `${name.replaceAll("_", " ")} ${seconds.toFixed(1)} s`);
  const rows = {"why": figures.decision, "first text after": `${figures.seconds_to_first_token.toFixed(2)} s`, "time": phases.join(", "),
    "prompt": `${count(figures.prompt_tokens, "token")}, ${figures.cached_tokens.toLocaleString("en")} of them known already`,
    "plan and headings": count(figures.plan_tokens + figures.heading_tokens, "token"), "seed": turn.seed, "temperature": turn.temperature ? `${turn.temperature}, as 0 would write the same again` : ""};
  const legend = make("p", {class: "legend"}, "Tokens that one step brought: ", make("i", {}, "1"),
    ...[2, 3, 4].map((n) => make("i", {class: `step${n}`}, `${n}`)), make("i", {class: "step5"}, "5 or more"));
  const box = make("details", {class: "figures"}, make("summary", {}, line.join(" · ")),
    make("dl", {}, ...Object.entries(rows).filter(([, value]) => value).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, `${value}`)))),
    ...(drafted ? [legend] : []));
  box.addEventListener("toggle", () => box.scrollIntoView({block: "nearest"}));  // keep the unfolded rows above the input field
  return box;
}

const KIND = {
  400: "This question cannot be answered in this form.", 401: "The server asks for a token.", 404: "This server has no such model.",
  422: "The model's plan could not be used.", 429: "The server is busy: many questions wait already.",
  503: "The server cannot answer at the moment.", 504: "The answer took longer than it may.",
};

// Names of options in errors, and what the page calls them.
const NAMES = [[/\bmode sot\b/g, "Plan: always"], [/\bmodes auto and direct\b/g, "auto and never"], [/\bmax_tokens\b/g, "“Tokens, at most”"],
  [/\bspecsot\.max_parallel\b/g, "“Branches at once”"], [/\bspecsot\.finish_within_s\b/g, "“Seconds, at most”"]];
const inPageWords = (message) => NAMES.reduce((text, [name, shown]) => text.replace(name, shown), message);

// note: the message. error: the error that has just happened; null for a stored answer that failed.
function failure(note, error, retry) {
  const lost = error instanceof TypeError;
  const what = !error ? "This answer failed." : lost ? "The server cannot be reached. What was written so far stays." : KIND[error.status] ??
    (error.reported ? "The answer broke off." : "Something went wrong on the server.");
  const box = make("div", {class: "notice", role: "alert"}, make("p", {}, what, " ", make("span", {class: "why"}, lost ? "" : inPageWords(note))));
  if (retry) {
    const again = make("button", {type: "button", class: "retry"}, "Try again");
    again.addEventListener("click", () => retry());
    box.append(again);
  }
  return box;
}
