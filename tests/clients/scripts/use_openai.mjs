// The openai package of npm: chats, parsed answers, tools, responses, each whole and streamed.

import OpenAI from 'openai';
import { zodFunction, zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';
import { assert, BUNDLED, LABEL, REPORT, run, SCRIPTED, SENTENCE, SYSTEM, weather } from './checks.mjs';

const Weather = z.object({ city: z.enum(['Paris', 'Rome']), degrees: z.union([z.literal(10), z.literal(20)]) });
const messages = [{ role: 'system', content: SYSTEM }, { role: 'user', content: SENTENCE }];
const ask = [{ role: 'user', content: 'How is the weather in Paris?' }];
const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
const flat = { type: 'function', name: 'get_weather', parameters, strict: false };
const client = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });

export async function checkChat({ bundled }) {
  const answer = await client(bundled).chat.completions.create({ model: BUNDLED, messages });
  assert.equal(answer.choices[0].message.content, LABEL);
}

export async function checkChatStreamed({ bundled }) {
  const stream = client(bundled).chat.completions.stream({ model: BUNDLED, messages });
  let deltas = 0;
  stream.on('content', () => (deltas += 1));
  assert.equal(await stream.finalContent(), LABEL);
  assert(deltas > 2);
}

export async function checkParse({ bundled }) {
  const format = zodResponseFormat(Weather, 'weather');
  const answer = await client(bundled).chat.completions.parse({ model: BUNDLED, messages: ask, response_format: format });
  Weather.parse(answer.choices[0].message.parsed);
}

export async function checkParseTools({ bundled }) {
  const tools = [zodFunction({ name: 'get_weather', parameters: Weather })];
  const options = { model: BUNDLED, messages: ask, tools, tool_choice: 'required', parallel_tool_calls: false };
  const { message } = (await client(bundled).chat.completions.parse(options)).choices[0];
  Weather.parse(message.tool_calls[0].function.parsed_arguments);
}

export async function checkToolRunner({ scripted }) {
  const tool = { name: 'get_weather', parameters, parse: JSON.parse, function: weather, description: 'The weather' };
  for (const stream of [false, true]) {
    const runner = client(scripted).chat.completions.runTools({
      model: SCRIPTED,
      messages: [{ role: 'user', content: 'Weather in both cities? Please think.' }],
      tools: [{ type: 'function', function: tool }],
      stream,
    });
    assert.equal(await runner.finalContent(), `${REPORT}Rome.`);
  }
}

export async function checkResponses({ bundled }) {
  const api = client(bundled).responses;
  const whole = await api.create({ model: BUNDLED, instructions: SYSTEM, input: SENTENCE });
  assert.equal(whole.output_text, LABEL);
  const stream = api.stream({ model: BUNDLED, instructions: SYSTEM, input: SENTENCE });
  let text = '';
  for await (const event of stream) if (event.type === 'response.output_text.delta') text += event.delta;
  assert.equal(text, LABEL);
  assert.equal((await stream.finalResponse()).output_text, LABEL);
  assert.equal((await api.retrieve(whole.id)).output_text, LABEL);
}

export async function checkResponsesParse({ bundled }) {
  const options = { model: BUNDLED, input: 'Paris?', text: { format: zodTextFormat(Weather, 'weather') } };
  Weather.parse((await client(bundled).responses.parse(options)).output_parsed);
}

export async function checkResponsesTools({ scripted }) {
  const api = client(scripted).responses;
  const first = await api.create({ model: SCRIPTED, input: 'Weather in both cities?', tools: [flat] });
  const outputs = first.output
    .filter((item) => item.type === 'function_call')
    .map((item) => ({ type: 'function_call_output', call_id: item.call_id, output: weather(JSON.parse(item.arguments)) }));
  assert.equal(outputs.length, 2);
  const options = { model: SCRIPTED, input: outputs, tools: [flat], previous_response_id: first.id };
  assert.equal((await api.create(options)).output_text, `${REPORT}Rome.`);
}

export async function checkErrors({ bundled }) {
  const call = client(bundled).chat.completions.create({ model: BUNDLED, messages: ask, temperature: 9 });
  await assert.rejects(call, (error) => error.status === 400 && error.param === 'temperature');
}

await run([
  checkChat,
  checkChatStreamed,
  checkParse,
  checkParseTools,
  checkToolRunner,
  checkResponses,
  checkResponsesParse,
  checkResponsesTools,
  checkErrors,
]);
