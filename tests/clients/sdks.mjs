// Node's clients, each in its own default mode: `node sdks.mjs URL MODEL GRPC PROTOS`. One line of JSON for each check.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";
import { generateObject, generateText, streamText, tool } from "ai";
import assert from "node:assert/strict";
import OpenAI from "openai";
import { z } from "zod";

const [url, model, address, protos] = process.argv.slice(2);
const messages = [{ role: "user", content: "What is the sky?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const city = z.object({ name: z.string(), population: z.number().int() });

async function check(client, what, run) {
  let state = "works", why = "";
  try {
    await run();
  } catch (error) {
    state = "fails";
    why = `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 300);
  }
  console.log(JSON.stringify({ client, what, state, why }));
}

const openai = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
await check("openai (node)", "models, chat, streamed, tools", async () => {
  assert((await openai.models.list()).data.some((one) => one.id === model));
  const asked = { model, messages, max_tokens: 80 };
  assert((await openai.chat.completions.create(asked)).choices[0].message.content);
  let text = "";
  for await (const one of await openai.chat.completions.create({ ...asked, stream: true }))
    text += one.choices[0]?.delta?.content ?? "";
  assert(text);
  const called = await openai.chat.completions.create({ ...asked, tools, tool_choice: "required" });
  assert(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city !== undefined);
  const run = openai.chat.completions.stream({ ...asked, tools, tool_choice: "required" });
  assert((await run.finalChatCompletion()).choices[0].message.tool_calls.length);
});
await check("openai (node)", "responses, streamed", async () => {
  const told = await openai.responses.create({ model, input: "What is the sky?", max_output_tokens: 24 });
  assert(told.output_text);
  const stream = openai.responses.stream({ model, input: "What is the sky?", max_output_tokens: 24 });
  assert((await stream.finalResponse()).output_text);
});
await check("openai (node)", "abort", async () => {
  const stream = await openai.chat.completions.create({ model, messages, max_tokens: 400, stream: true });
  for await (const _ of stream) {
    stream.controller.abort();
    break;
  }
});

const claude = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
await check("anthropic (node)", "messages, streamed, tools", async () => {
  const asked = { model, messages, max_tokens: 80 };
  assert((await claude.messages.create(asked)).content[0].text);
  assert((await claude.messages.stream(asked).finalMessage()).content[0].text);
  const offered = { tools: [{ name: "get_weather", input_schema: parameters }], tool_choice: { type: "any" } };
  const told = await claude.messages.stream({ ...asked, ...offered }).finalMessage();
  assert.equal(told.stop_reason, "tool_use");
  assert(told.content.some((one) => one.type === "tool_use" && one.input.city !== undefined));
});

const vercel = createOpenAICompatible({ name: "specsot", baseURL: url, supportsStructuredOutputs: true })(model);
await check("ai (Vercel)", "generateText, streamText, generateObject, tools", async () => {
  const asked = { model: vercel, prompt: "What is the sky?", maxOutputTokens: 80, maxRetries: 0 };
  assert((await generateText(asked)).text);
  assert(await streamText(asked).text);
  city.parse((await generateObject({ ...asked, schema: city })).object);
  const weather = tool({ inputSchema: z.object({ city: z.string() }), execute: async () => "sunny" });
  const called = await generateText({ ...asked, tools: { weather }, toolChoice: "required" });
  assert(called.toolCalls.length);
});

await check("@grpc/grpc-js", "Generate, cancel, deadline", async () => {
  const found = grpc.loadPackageDefinition(
    loader.loadSync("specsot/v1/master.proto", { includeDirs: [protos], enums: String, oneofs: true }),
  );
  const master = new found.specsot.v1.Master(address, grpc.credentials.createInsecure());
  const asked = { prompt: "What is the sky?", mode: "MODE_DIRECT", limits: { maxNewTokens: 24 } };
  const events = [];
  for await (const event of master.Generate(asked)) events.push(event);
  assert(events.at(-1).finished.text);
  const call = master.Generate({ ...asked, limits: { maxNewTokens: 400 } });
  const ended = await new Promise((resolve) => {
    call.on("data", () => call.cancel());
    call.on("error", (error) => resolve(error.code));
  });
  assert.equal(ended, grpc.status.CANCELLED);
  const late = master.Generate(asked, { deadline: Date.now() - 1 });
  late.on("data", () => {});
  assert.equal(await new Promise((resolve) => late.on("error", (error) => resolve(error.code))), 4);
  master.close();
});
