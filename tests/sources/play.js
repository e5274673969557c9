/* What the tests of a page's script call, and a function of browsers that the engine lacks. */
const atob = (text) =>
  Array.from(Uint8Array.fromBase64(text), (byte) => String.fromCharCode(byte)).join("");

const computed = (files, observations) => files.map((file) => observations.map(policy(file)));

const stepped = (env, cases) => cases.map(([state, action]) => {
  const [next, reward, over] = TASKS[env].step(state, action);
  return { next, reward, over, observation: TASKS[env].observe(next) };
});

const played = ({ env, policies, starts }) => policies.map((file) => starts.map(({ state }) => {
  let game = { act: policy(file), state, total: 0, steps: 0, over: false };
  while (!game.over) game = advance(TASKS[env], game);
  return [game.total, game.steps];
}));
