// Runs the checks of a client's script, as checks.py does: node use_NAME.mjs BUNDLED_URL SCRIPTED_URL.

import assert from 'node:assert/strict';

export { assert };
export const [BUNDLED, SCRIPTED] = ['headstart-intent', 'fake'];
export const REPORT = 'The weather report: 21 degrees in ';
export const SYSTEM =
  'You label what people ask of a home and travel assistant. Find the intent of the sentence and answer with one ' +
  'line of JSON: the name, the code that the list gives, and the slots. Copy each slot from the sentence word ' +
  'for word.\n' +
  'lights_off R8: darkness in a room. Slots: room (which room). Example: I want you to make it dark in the vekflous\n' +
  'call_person J1: to talk on the phone. Slots: person (who). Example: hey, start a call to Diana';
export const SENTENCE = 'Could you make it dark in the kitchen?';
export const LABEL = '{"name":"lights_off","code":"R8","slots":{"room":"kitchen"}}';

export const weather = ({ city }) => `21 degrees in ${city}.`;

export async function run(checks) {
  const [bundled, scripted] = process.argv.slice(2);
  for (const check of checks) {
    let error = null;
    try {
      await check({ bundled, scripted });
    } catch (caught) {
      error = String(caught?.stack ?? caught);
    }
    console.log(JSON.stringify({ check: check.name, error }));
  }
}
