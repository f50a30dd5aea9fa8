"use strict";
// Renders Markdown as elements, with coloured code, and tokens tinted by the step that wrote them. The model's text only
// becomes text nodes, never HTML; the page's policy (require-trusted-types-for) forbids anything else.

const $ = (id) => document.getElementById(id);
const count = (number, word, more = `${word}s`) => `${number.toLocaleString("en")} ${number === 1 ? word : more}`;

function make(tag, attributes = {}, ...children) {
  const one = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) one.setAttribute(name, value);
  one.append(...children);
  return one;
}

// Renders Markdown into `box`. runs: a list of [text, tokens of its step], joined to the source. Blocks that have not
// changed keep their elements, so that a selection survives and nothing flickers.
function render(box, runs) {
  const text = runs.map(([piece]) => piece).join("");
  const tint = tinter(runs);
  let at = 0, n = 0;
  for (const block of marked.lexer(text)) {
    const made = block.type === "space" || block.type === "def" ? null : box.children[n];
    if (made !== null) {
      if (made?.source !== block.raw || made.at !== at) {
        const fresh = blockOf(block, at, tint);
        Object.assign(fresh, {source: block.raw, at});
        if (made) made.replaceWith(fresh); else box.append(fresh);
      }
      n += 1;
    }
    at += block.raw.length;
  }
  while (box.children.length > n) box.lastElementChild.remove();
}

// Returns the text at position `at` of the source as a fragment with one span per step that wrote a part of it.
function tinter(runs) {
  const ends = [];
  let end = 0;
  for (const [piece, step] of runs) ends.push([end += piece.length, step]);
  return (text, at) => {
    const out = document.createDocumentFragment();
    let from = 0, n = ends.findIndex(([until]) => until > at);
    while (from < text.length && n >= 0 && n < ends.length) {
      const to = Math.min(text.length, ends[n][0] - at), step = ends[n][1];
      if (to > from) out.append(step > 1 ? make("span", {class: `step${Math.min(step, 5)}`, title: `${step} tokens in one step`}, text.slice(from, to)) : text.slice(from, to));
      from = Math.max(from, to);
      n += 1;
    }
    if (from < text.length) out.append(text.slice(from));
    return out;
  };
}

const BLOCKS = {
  heading: (token, at, tint) => inlineOf("h" + Math.min(6, token.depth + 2), token, at, tint),
  paragraph: (token, at, tint) => inlineOf("p", token, at, tint),
  text: (token, at, tint) => inlineOf("div", token, at, tint),
  blockquote: (token, at, tint) => within(make("blockquote"), token.tokens, token.raw, at, tint, blockOf),
  hr: () => make("hr"),
  code: (token) => codeBox(token.text, token.lang ?? ""),
  table(token, at, tint) {
    let from = 0;
    const cell = (tag) => (one) => {
      const found = token.raw.indexOf(one.text, from);
      if (found >= 0) from = found + one.text.length;
      return within(make(tag, {class: one.align}), one.tokens, one.text, at + Math.max(found, 0), tint, pieceOf);
    };
    const head = make("tr", {}, ...token.header.map(cell("th")));
    const rows = token.rows.map((row) => make("tr", {}, ...row.map(cell("td"))));
    return make("div", {class: "scroll", tabindex: "0"}, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  },
  list(token, at, tint) {
    const items = within(make(token.ordered ? "ol" : "ul", {start: token.ordered ? token.start : null}), token.items, token.raw, at, tint,
      (item, there) => within(make("li"), item.tokens, item.raw, there, tint, blockOf));
    return items;
  },
};

const blockOf = (token, at, tint) => BLOCKS[token.type]?.(token, at, tint) ??
  (token.type === "checkbox" ? pieceOf(token, at, tint) : make("p", {}, tint(token.raw.trim(), at)));

const inlineOf = (tag, token, at, tint) =>
  token.tokens ? within(make(tag), token.tokens, token.raw, at, tint, pieceOf) : make(tag, {}, tint(token.text, at));

// Renders Markdown tokens into `box`. The text of each is searched in the source from the end of the previous one on.
function within(box, tokens, raw, at, tint, elementOf) {
  let from = 0;
  for (const token of tokens) {
    const found = raw.indexOf(token.raw, from);
    if (found >= 0) from = found;
    if (token.type !== "space") box.append(elementOf(token, at + from, tint));
    from += token.raw.length;
  }
  return box;
}

const SIGNS = {lt: "<", gt: ">", amp: "&", quot: '"', "#39": "'", nbsp: "\u00a0"};
const INLINE = {
  strong: "strong", em: "em", del: "s", codespan: "code",
};

function pieceOf(token, at, tint) {
  if (token.type === "br") return make("br");
  if (token.type === "checkbox") return token.checked ? "☑ " : "☐ ";
  if (token.type === "codespan") return make("code", {}, tint(token.text, at + token.raw.indexOf(token.text)));
  if (token.type === "link" || token.type === "image") return linkOf(token, at, tint);
  if (INLINE[token.type]) return inlineOf(INLINE[token.type], token, at, tint);
  if (token.tokens) return within(document.createDocumentFragment(), token.tokens, token.raw, at, tint, pieceOf);
  const text = token.type === "escape" ? token.text : token.raw.replace(/&(lt|gt|amp|quot|#39|nbsp);/g, (_, sign) => SIGNS[sign]);
  return tint(text, at);
}

// Returns a link to a web page or a mail address. Images become links, because the page loads nothing from other servers.
function linkOf(token, at, tint) {
  const leads = /^(https?:|mailto:)/i.test(token.href);
  const box = make(leads ? "a" : "span", leads ? {href: token.href, target: "_blank", rel: "noopener noreferrer"} : {});
  if (token.type === "link") return within(box, token.tokens, token.raw, at, tint, pieceOf);
  box.append(token.text || token.href);
  return box;
}

// --- code ---

const KEYWORDS = new Set(("abstract and as assert async await begin bool boolean break case catch char class const continue def default " +
  "defer del delete do double elif else elsif end enum except export extends extern false False finally float fn for foreach from func " +
  "function global go if impl implements import in include inline instanceof int interface is lambda let local long match mod module mut " +
  "namespace new nil None nonlocal not null nullptr of or package pass private protected pub public raise return self short signed sizeof " +
  "static struct super switch template then this throw true True try type typedef typeof union unless unsigned until use using val var " +
  "virtual void volatile when where while with yield echo fi done esac SELECT FROM WHERE INSERT INTO VALUES UPDATE SET JOIN LEFT RIGHT INNER ON " +
  "GROUP BY ORDER LIMIT CREATE TABLE AND OR NOT NULL AS").split(" "));
const COMMENTS = [
  [/^(py|python\d?|sh|bash|zsh|shell|console|rb|ruby|r|ya?ml|toml|ini|conf|perl|pl|make|makefile|docker|dockerfile|nim|elixir|julia|jl)$/i, "#[^\\n]*"],
  [/^(sql|lua|hs|haskell|ada|elm)$/i, "--[^\\n]*"],
  [/^(html|xml|svg|markdown|md)$/i, "<!--[^]*?(?:-->|$)"],
  [/./, "\\/\\/[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)"],
  [/^$/, "(?<=^|[\\s;{])(?:#\\s|\\/\\/)[^\\n]*|\\/\\*[^]*?(?:\\*\\/|$)"],
];
const STRINGS = `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'|\`(?:\\\\.|[^\`\\\\])*\`?`;

function coloured(code, language) {
  const comment = COMMENTS.find(([names]) => names.test(language))[1];
  const signs = new RegExp(`(${comment})|(${STRINGS})|\\b(\\d[\\w.]*)\\b|([A-Za-z_]\\w*)(\\s*\\()?`, "gm");
  const out = document.createDocumentFragment();
  let at = 0;
  for (const found of code.matchAll(signs)) {
    const [whole, comment, string, number, word, called] = found;
    const kind = comment ? "comment" : string ? "string" : number ? "number" : KEYWORDS.has(word) ? "keyword" : called ? "called" : null;
    if (!kind) continue;
    const text = word ?? whole;
    out.append(code.slice(at, found.index), make("span", {class: `code-${kind}`}, text));
    at = found.index + text.length;
  }
  out.append(code.slice(at));
  return out;
}

function codeBox(code, info) {
  const language = info.split(/[\s{]/)[0];
  const bar = make("figcaption", {}, make("span", {}, language || "text"), copyButton(() => code));
  return make("figure", {class: "code"}, bar, make("pre", {tabindex: "0"}, make("code", {}, coloured(code, language))));
}

function copyButton(textOf, label = "Copy") {
  const button = make("button", {type: "button", class: "quiet"}, label);
  button.addEventListener("click", async () => {
    button.textContent = await copied(textOf()) ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

// Without TLS, browsers offer navigator.clipboard only on localhost. Otherwise the text is copied by execCommand.
async function copied(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* below */ }
  const field = make("textarea", {class: "unseen"});
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
