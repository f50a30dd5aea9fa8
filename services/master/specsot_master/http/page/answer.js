"use strict";
// One answer on the page, from its events or as it was kept. While a plan is written, one section grows: the first that
// is not over. Those after it show their heading and first lines until it is their turn, so nothing moves above a reader.

// A plan's line, in any dialect: a number, then perhaps a length, a label and needs, then the title.
const TITLE = /^\s*(\d{1,4})[.)]\s*(?:<[^>\n]*>\s*)*(?:\[[-\d, ]*\]\s*)?([^\s<\[].*)$/gm;
const STATES = {planned: "", waiting: "waits", writing: "writing", stop: "done", length: "cut at its limit", cancelled: "stopped",
  stopped: "stopped", failed: "failed", parent_failed: "left out: what it needs failed"};
const SENTENCE_END = /[.!?。！？][\s"'*”’)]*$/;
const OPEN = ["planned", "waiting", "writing"];  // states of a part that is not over
const READING = "reading the question";  // until something is written or foreseen
const NOTHING_NEW = 1.05;  // tokens a step below which drafts brought nothing worth a word

const newAnswer = () => ({role: "assistant", content: "", thoughts: "", parts: [], state: "writing", figures: null, note: ""});

// An answer that did not come to its end is what is shown of it: points without a word go, texts are headed as in whole ones.
function cutShort(turn, state) {
  const textOf = (one) => one.runs.map(([text]) => text).join("").trim();
  turn.state = state;
  turn.parts = turn.parts.filter((one) => textOf(one) || !OPEN.includes(one.state));
  for (const one of turn.parts) if (OPEN.includes(one.state)) one.state = state;
  turn.content = turn.parts.filter(textOf).map((one) => one.title ? `## ${one.id}. ${one.title}\n${textOf(one)}` : textOf(one)).join("\n\n");
}

// A text of the answer: a branch; the closing, a branch without a title; or (id 0) a direct answer, which a plan may have cut to its introduction. runs: [text, tokens of its step].
class Part {
  constructor(told) {
    this.told = told;
    this.body = make("div", {class: "body", dir: "auto"});
    this.meta = make("p", {class: "meta"});
    this.head = make("h3");
    this.shown = false;  // whether the reader wants it before its turn
    const now = make("button", {type: "button", class: "quiet now", title: "Show this section before its turn"}, "Read now");
    now.addEventListener("click", () => { this.shown = true; this.box.classList.remove("ahead"); });
    this.box = make("section", {class: "part", "data-branch": told.id}, ...(told.id ? [this.head, this.meta, now] : []), this.body);
    if (told.runs.length) render(this.body, told.runs);
    this.tell();
  }

  add(text, step) {
    const runs = this.told.runs, clean = text.replace(/\r\n?/g, "\n");
    if (runs.length && runs.at(-1)[1] === step && step < 2) runs.at(-1)[0] += clean; else runs.push([clean, step]);
    this.told.tokens += step;
    this.told.steps += 1;
    painter.add(this);
  }

  draw() {
    render(this.body, this.told.runs);
    this.tell();
  }

  mark(state) {
    this.told.state = state;
    this.tell();
  }

  tell() {
    const {id, title, state, tokens, steps, needs} = this.told;
    this.box.dataset.is = state;
    this.body.classList.toggle("cut", state === "length" && !SENTENCE_END.test(this.told.runs.at(-1)?.[0] ?? "."));
    this.head.textContent = title ? `${id}. ${title}` : "";
    this.head.hidden = !title;
    const pace = steps && tokens / steps > NOTHING_NEW ? ` · ${(tokens / steps).toFixed(1)} a step` : "";
    const after = state === "waiting" && needs.length ? ` for ${needs.join(", ")}` : "";
    this.meta.textContent = `${id && !title ? "closing · " : ""}${STATES[state] ?? state}${after}${tokens ? ` · ${count(tokens, "token")}${pace}` : ""}`;
  }
}

// What changed is drawn once a frame, however many steps came.
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
  // hands: {again(mode), retry(), more()}: what its buttons do; none where they may not.
  constructor(turn, hands) {
    this.turn = turn;
    this.hands = hands;
    this.raw = "";
    this.parts = new Map();
    this.thoughts = make("p");
    this.thinking = make("details", {class: "thinking", hidden: ""}, make("summary", {}, "Thoughts"), this.thoughts);
    this.status = make("p", {class: "hint status"});
    this.list = make("div", {class: "parts"});
    this.ending = make("div", {class: "ending"});
    this.box = make("article", {class: "answer", "aria-label": "Answer"}, this.thinking, this.list, this.status, this.ending);
    if (turn.state === "writing" && !hands.live) cutShort(turn, "stopped");  // its window was closed
    if (turn.thoughts) this.think("");
    for (const part of turn.parts) this.show(part);
    this.say(turn.mode === "sot" ? "planning" : READING);
    if (turn.state !== "writing") this.close(); else this.box.dataset.is = "writing";
  }

  show(told) {
    const part = new Part(told);
    this.parts.set(told.id, part);
    if (told.id) this.list.append(part.box); else this.list.prepend(part.box);
    this.turnOver();
    return part;
  }

  // Fold the sections after the first that is not over, but for those that the reader asked for.
  turnOver() {
    let ahead = false;
    for (const box of this.list.children) {
      const part = this.parts.get(Number(box.dataset.branch));
      box.classList.toggle("ahead", ahead && this.turn.state === "writing" && !part.shown);
      ahead ||= part.told.id > 0 && OPEN.includes(part.told.state);
    }
  }

  part(id, title = "", state = "writing") {
    if (this.parts.has(id)) return this.parts.get(id);
    const told = {id, title, needs: [], runs: [], tokens: 0, steps: 0, state};
    if (id) this.turn.parts.push(told); else this.turn.parts.unshift(told);
    if (id) this.list.classList.add("planned");
    return this.show(told);
  }

  hear(chunk, said) {
    const choice = chunk.choices[0], event = choice?.specsot, delta = choice?.delta ?? {};
    if (delta.reasoning_content ?? delta.reasoning) this.think(delta.reasoning_content ?? delta.reasoning);
    if (delta.content) {
      this.thinking.open = false;
      if (this.status.textContent.startsWith(READING)) this.say("writing");
      this.turn.content += delta.content;
      if (event?.step_tokens || !this.turn.parts.some((one) => one.id)) this.part(0).add(delta.content, event?.step_tokens ?? 0);
    }
    if (event) this.on[event.event]?.call(this, event, said);
  }

  on = {
    started(event, said) {
      this.turn.seed = said.match(/"seed":(\d+)/)[1];  // as text: it has more digits than a number keeps
      if (foreseen(event.forecast)) this.say(`${READING}; ${foreseen(event.forecast)}`);
    },
    skeleton_text(event) {
      this.raw += event.text;
      for (const [, id, title] of this.raw.matchAll(TITLE)) {
        const part = this.part(Number(id), title, "planned");
        part.told.title = title;
        part.tell();
      }
      this.say("planning");
    },
    planned(event) {
      const points = new Map(event.points.map((point) => [point.id, point]));
      for (const id of [...this.parts.keys()]) if (id && !points.has(id)) this.drop(id);
      if (!points.size) this.list.classList.remove("planned");
      for (const [id, point] of points) {
        const part = this.part(id);
        this.list.append(part.box);  // in the plan's order
        Object.assign(part.told, {title: point.title, needs: point.needs, state: "waiting"});
        part.tell();
      }
      this.turnOver();
      this.say(points.size ? [`${count(points.size, "point")}`, foreseen(event.forecast)].filter(Boolean).join("; ") : "writing");
    },
    branch_started(event) {
      this.part(event.branch, event.title).mark("writing");
      this.turnOver();
    },
    branch_text(event) { this.part(event.branch).add(event.text, event.step_tokens); },
    branch_finished(event) {
      this.part(event.branch).mark(event.reason);
      this.turnOver();
    },
    finished(event) {
      this.turn.figures = event.statistics;
      this.turn.content = event.text ?? this.turn.content;
      this.joined(event);
      this.end(event.reason === "cancelled" ? "stopped" : event.reason);
    },
  };

  // Where a last turn joined the branches, its text is the answer, and they are what it was made of.
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

  say(words) { this.status.textContent = words; }

  // state: stop, length, stopped, failed.
  end(state, error = null) {
    painter.draw();
    this.turn.state = state;
    if (error) this.turn.note = error.message;
    if (state === "stopped" || state === "failed") cutShort(this.turn, state);
    for (const [id, part] of [...this.parts]) if (!this.turn.parts.includes(part.told)) this.drop(id);
    for (const part of this.parts.values()) part.mark(OPEN.includes(part.told.state) ? state : part.told.state);
    this.close(error);
  }

  close(error = null) {
    const {turn} = this;
    this.box.dataset.is = turn.state;
    this.list.classList.remove("planned");
    this.turnOver();
    this.say("");
    this.status.hidden = true;
    if (![...this.parts.keys()].some(Boolean) && this.parts.has(0)) this.parts.get(0).told.state = turn.state;
    const ends = {stopped: this.tokens ? `Stopped here, after ${count(this.tokens, "token")}.` : "Stopped before the answer began.", length: this.cut()}[turn.state];
    this.ending.replaceChildren(
      ...(ends ? [make("p", {class: "end"}, ends)] : []),
      ...(turn.state === "failed" ? [failure(turn.note, error, this.hands.retry)] : []),
      ...(turn.left ? [make("p", {class: "hint"}, turn.left)] : []),
      ...(turn.figures ? [figuresOf(turn, [...this.parts.values()].map((one) => one.told))] : []),
      this.actions());
  }

  get tokens() { return this.turn.parts.reduce((sum, one) => sum + one.tokens, 0); }

  cut() {
    const short = this.turn.parts.filter((one) => one.id && one.state === "length").length;
    return short && short < this.turn.parts.length ? `${count(short, "point")} of ${this.turn.parts.length} cut at ${short === 1 ? "its" : "their"} share of the tokens.` :
      `Cut at ${count(this.turn.figures?.completion_tokens ?? this.tokens, "token")}, the limit in Settings.`;
  }

  actions() {
    const {turn, hands} = this, planned = turn.parts.some((one) => one.id);
    const button = (label, act, title) => {
      const one = make("button", {type: "button", class: "quiet", title}, label);
      one.addEventListener("click", act);
      return one;
    };
    return make("div", {class: "actions"},
      ...(turn.content ? [copyButton(() => turn.content)] : []),
      ...(hands.more && turn.content && turn.state === "length" ? [button("Continue", hands.more, "Ask for the rest")] : []),
      ...(hands.again && turn.state !== "failed" ? [
        button("Again", () => hands.again(null), "Another answer to the same question"),
        button(planned ? "As one text" : "In points", () => hands.again(planned ? "direct" : "sot"), planned ? "The same question without a plan" : "The same question with a plan"),
      ] : []));
  }
}

// --- words about it ---

function foreseen(forecast) {
  const figure = (seconds) => seconds.toFixed(seconds < 5 ? 1 : 0);
  const told = ["direct", "planned"].filter((way) => (forecast?.[way] ?? null) !== null);
  return told.map((way) => {
    const least = forecast[`${way}_least`], most = forecast[`${way}_most`];
    return most > 1.5 * least ? `${way} ${figure(least)}-${figure(most)} s` : `${way} ~${figure(forecast[way])} s`;
  }).join(", ");
}

// One line with seconds; what else was measured is behind it.
function figuresOf(turn, parts) {
  const told = turn.figures, rests = told.paused_share >= .5, drafted = told.mean_accepted > NOTHING_NEW;
  const branches = parts.filter((one) => one.id);
  const alone = branches.reduce((sum, one) => sum + one.steps, 0);
  const line = [`${told.seconds.toFixed(1)} s`, count(told.merged_tokens, "token"), `${told.tokens_per_second.toFixed(1)} tokens/s`];
  if (branches.length) line.push(`${count(branches.length, "branch", "branches")} in ${count(told.steps, "step")}${alone > told.steps ? `, ${alone.toLocaleString("en")} one after another` : ""}`);
  else line.push(count(told.steps, "step"));
  if (rests) line.push("drafting rests: it does not pay here");
  else if (drafted) line.push(`drafts: ${told.mean_accepted.toFixed(1)} tokens a step`);
  const phases = Object.entries(told.phases ?? {}).filter(([, seconds]) => seconds >= .05).map(([name, seconds]) => `${name.replaceAll("_", " ")} ${seconds.toFixed(1)} s`);
  const rows = {"why": told.decision, "first text after": `${told.seconds_to_first_token.toFixed(2)} s`, "time": phases.join(", "),
    "prompt": `${count(told.prompt_tokens, "token")}, ${told.cached_tokens.toLocaleString("en")} of them known already`,
    "plan and headings": count(told.plan_tokens + told.heading_tokens, "token"), "seed": turn.seed, "temperature": turn.temperature ? `${turn.temperature}, as 0 would write the same again` : ""};
  const legend = make("p", {class: "legend"}, "Tokens that one step brought: ", make("i", {}, "1"),
    ...[2, 3, 4].map((n) => make("i", {class: `step${n}`}, `${n}`)), make("i", {class: "step5"}, "5 or more"));
  const box = make("details", {class: "figures"}, make("summary", {}, line.join(" · ")),
    make("dl", {}, ...Object.entries(rows).filter(([, value]) => value).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, `${value}`)))),
    ...(drafted ? [legend] : []));
  box.addEventListener("toggle", () => box.scrollIntoView({block: "nearest"}));  // what it unfolds is not below the field
  return box;
}

const KIND = {
  400: "This question cannot be answered in this form.", 401: "The server asks for a token.", 404: "This server has no such model.",
  422: "The model's plan could not be used.", 429: "The server is busy: many questions wait already.",
  503: "The server cannot answer at the moment.", 504: "The answer took longer than it may.",
};

// What options are called here.
const HERE = [[/\bmode sot\b/g, "Plan: always"], [/\bmodes auto and direct\b/g, "auto and never"], [/\bmax_tokens\b/g, "“Tokens, at most”"],
  [/\bspecsot\.max_parallel\b/g, "“Branches at once”"], [/\bspecsot\.finish_within_s\b/g, "“Seconds, at most”"]];
const inOurWords = (message) => HERE.reduce((text, [word, here]) => text.replace(word, here), message);

// error: what went wrong just now; without it, `note` says what went wrong in an answer that was kept.
function failure(note, error, retry) {
  const lost = error instanceof TypeError;
  const what = !error ? "This answer failed." : lost ? "The server cannot be reached. What was written so far stays." : KIND[error.status] ??
    (error.told ? "The answer broke off." : "Something went wrong on the server.");
  const box = make("div", {class: "notice", role: "alert"}, make("p", {}, what, " ", make("span", {class: "why"}, lost ? "" : inOurWords(note))));
  if (retry) {
    const again = make("button", {type: "button", class: "retry"}, "Try again");
    again.addEventListener("click", () => retry());
    box.append(again);
  }
  return box;
}
