"use strict";
// Stores settings, the theme and conversations in this browser. They leave it only as part of a question.

const TALK = "specsot.talk.", SETTINGS = "specsot.settings", THEME = "specsot.theme";
const memory = new Map();  // used if the browser stores nothing, as in private windows

const shelf = {
  get(key) { try { return localStorage.getItem(key) ?? memory.get(key) ?? null; } catch { return memory.get(key) ?? null; } },
  keys() { try { return [...new Set([...Object.keys(localStorage), ...memory.keys()])]; } catch { return [...memory.keys()]; } },
  remove(key) { memory.delete(key); try { localStorage.removeItem(key); } catch { /* it was not there */ } },
  set(key, text) {
    for (;;) {
      try { localStorage.setItem(key, text); memory.delete(key); return; } catch (error) {
        const oldest = error.name === "QuotaExceededError" && talks().map((one) => TALK + one.id).filter((one) => one !== key).at(-1);
        if (!oldest) { memory.set(key, text); return; }
        shelf.remove(oldest);  // storage is full: remove the oldest conversation
      }
    }
  },
};

function read(key) {
  try { return JSON.parse(shelf.get(key)); } catch { return null; }
}

// A conversation: {id, when, title, turns: [{role: "user", content} | the turn of answer.js]}. Newest first.
const talks = () => shelf.keys().filter((key) => key.startsWith(TALK)).map(read).filter((one) => one?.turns).sort((a, b) => b.when - a.when);
const newTalk = () => ({id: `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`, when: Date.now(), title: "", turns: []});

function keepTalk(talk) {
  if (!talk.turns.length) return;
  talk.when = Date.now();
  talk.title ||= talk.turns[0].content.replace(/\s+/g, " ").slice(0, 80);
  shelf.set(TALK + talk.id, JSON.stringify(talk));
}

const asMarkdown = (talk) => talk.turns.map((turn) => turn.role === "user" ? `**${turn.content}**\n` : `${turn.content}\n`).join("\n");
