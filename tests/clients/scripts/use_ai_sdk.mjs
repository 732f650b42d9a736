// Vercel's AI SDK, the package ai, with four providers: OpenAI's responses and chats, openai-compatible, Anthropic.

import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { assert, BUNDLED, LABEL, REPORT, run, SCRIPTED, SENTENCE, SYSTEM, weather } from './checks.mjs';

const apiKey = 'none';
const Weather = z.strictObject({ city: z.enum(['Paris', 'Rome']), sunny: z.boolean() });
const tools = {
  get_weather: tool({
    description: 'The weather of a city',
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => weather(input),
  }),
};

const responses = (url, name) => createOpenAI({ baseURL: `${url}/v1`, apiKey }).responses(name);
const chat = (url, name) => createOpenAI({ baseURL: `${url}/v1`, apiKey }).chat(name);
const messages = (url, name) => createAnthropic({ baseURL: `${url}/v1`, apiKey })(name);
const compatible = (url, name) =>
  createOpenAICompatible({
    name: 'headstart',
    baseURL: `${url}/v1`,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  })(name);

async function text(model) {
  const options = { model, system: SYSTEM, prompt: SENTENCE, maxRetries: 0 };
  const whole = await generateText(options);
  assert.equal(whole.text, LABEL);
  assert(whole.usage.inputTokens > 0);
  const stream = streamText(options);
  const parts = [];
  for await (const part of stream.textStream) parts.push(part);
  assert.equal(parts.join(''), LABEL);
  assert(parts.length > 2);
  assert((await stream.usage).outputTokens > 2);
}

async function loop(model, { reasons = true, store = true } = {}) {
  const options = { model, tools, stopWhen: stepCountIs(4), maxRetries: 0, providerOptions: { openai: { store } } };
  const asked = [{ role: 'user', content: 'Weather in both cities? Please think, and say something first.' }];
  const done = await generateText({ ...options, messages: asked });
  assert.equal(done.text, `${REPORT}Rome.`);
  assert.deepEqual(done.steps[0].toolCalls.map((call) => call.input.city), ['Paris', 'Rome']);
  if (reasons) assert.equal(done.steps[0].reasoningText?.trim(), 'I look it up.');
  const history = [...asked, ...done.response.messages, { role: 'user', content: 'And in Paris?' }];
  assert((await generateText({ ...options, messages: history })).text.startsWith(REPORT));
  const stream = streamText({ ...options, messages: asked });
  await stream.consumeStream();
  assert((await stream.text).endsWith(`${REPORT}Rome.`));
  assert.equal((await stream.steps).length, 2);
}

async function schema(model) {
  const options = { model, prompt: 'Weather in Paris?', maxOutputTokens: 200, maxRetries: 0 };
  Weather.parse((await generateText({ ...options, output: Output.object({ schema: Weather }) })).output);
  const strict = { get_weather: tool({ description: 'The weather', inputSchema: Weather }) };
  const toolChoice = { type: 'tool', toolName: 'get_weather' };
  const { toolCalls } = await generateText({ ...options, tools: strict, toolChoice });
  Weather.parse(toolCalls[0].input);
}

export async function checkResponsesText({ bundled }) {
  await text(responses(bundled, BUNDLED));
}

export async function checkResponsesTools({ scripted }) {
  await loop(responses(scripted, SCRIPTED), { reasons: false }); // it shows summaries only
  await loop(responses(scripted, SCRIPTED), { reasons: false, store: false });
}

export async function checkResponsesSchema({ bundled }) {
  await schema(responses(bundled, BUNDLED));
}

export async function checkChatText({ bundled }) {
  await text(chat(bundled, BUNDLED));
}

export async function checkChatTools({ scripted }) {
  await loop(chat(scripted, SCRIPTED), { reasons: false }); // it has no reasoning in chats
}

export async function checkChatSchema({ bundled }) {
  await schema(chat(bundled, BUNDLED));
}

export async function checkCompatibleText({ bundled }) {
  await text(compatible(bundled, BUNDLED));
}

export async function checkCompatibleTools({ scripted }) {
  await loop(compatible(scripted, SCRIPTED));
}

export async function checkCompatibleSchema({ bundled }) {
  await schema(compatible(bundled, BUNDLED));
}

export async function checkMessagesText({ bundled }) {
  await text(messages(bundled, BUNDLED));
}

export async function checkMessagesTools({ scripted }) {
  await loop(messages(scripted, SCRIPTED));
}

export async function checkMessagesSchema({ bundled }) {
  await schema(messages(bundled, BUNDLED));
}

await run([
  checkResponsesText,
  checkResponsesTools,
  checkResponsesSchema,
  checkChatText,
  checkChatTools,
  checkChatSchema,
  checkCompatibleText,
  checkCompatibleTools,
  checkCompatibleSchema,
  checkMessagesText,
  checkMessagesTools,
  checkMessagesSchema,
]);
