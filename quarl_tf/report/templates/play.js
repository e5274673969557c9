"use strict";
// Two policies play side by side: the operators of their flatbuffers, the environments, the page.
// Where there is no document, nothing starts: tests call the functions.

const f32 = Math.fround;
const clip = (x, low, high) => Math.min(Math.max(x, low), high);
// Halves away from zero.
const rounded = (x) => Math.sign(x) * Math.floor(Math.abs(x) + 0.5);
const code = (steps, zero) => clip(rounded(steps) + zero, -128, 127);

// ---- Operators, on batches of one, as LiteRT's reference kernels compute them ----

const ARRAYS = { float32: Float32Array, int8: Int8Array, int32: Int32Array };

const elementwise = (compute) => (out, a, b) => {
  const [m, n] = [a.values.length, b.values.length];
  out.values.forEach((_, i) => { out.values[i] = compute(a.values[i % m], b.values[i % n]); });
};

const KERNELS = {
  ADD: elementwise((a, b) => a + b),
  SUB: elementwise((a, b) => a - b),
  MUL: elementwise((a, b) => a * b),
  MINIMUM: elementwise(Math.min),
  MAXIMUM: elementwise(Math.max),
  RESHAPE: (out, x) => out.values.set(x.values),
  CONCATENATION(out, ...parts) {
    let place = 0;
    for (const { values } of parts) {
      out.values.set(values, place);
      place += values.length;
    }
  },
  QUANTIZE(out, x) {
    x.values.forEach((v, i) => { out.values[i] = code(f32(v / out.scales[0]), out.zero); });
  },
  DEQUANTIZE(out, x) {
    x.values.forEach((v, i) => { out.values[i] = x.scales[0] * (v - x.zero); });
  },
  TANH(out, x) {
    const [integer] = out.scales;
    x.values.forEach((v, i) => {
      const result = f32(Math.tanh(integer ? f32(x.scales[0] * (v - x.zero)) : v));
      out.values[i] = integer ? code(f32(result * f32(1 / integer)), out.zero) : result;
    });
  },
  FULLY_CONNECTED(out, x, kernel, bias) {
    const [integer] = out.scales, size = x.values.length, k = kernel.values, v = x.values;
    for (let c = 0, place = 0; c < out.values.length; c++) {
      let sum = bias ? bias.values[c] : 0;
      for (let i = 0; i < size; i++) sum += (v[i] - x.zero) * k[place++];
      if (integer) {
        const scale = kernel.scales[c % kernel.scales.length];
        sum = code(sum * (x.scales[0] * scale / integer), out.zero);
      }
      out.values[c] = out.relu ? Math.max(sum, out.zero) : sum;
    }
  },
};

/** Return a function from observations to greedy actions, of a flatbuffer as `play.py` has it. */
function policy(file) {
  const tensors = file.tensors.map(({ dtype, size, data, scales, zero }) => {
    const bytes = data && Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
    const values = data ? new ARRAYS[dtype](bytes.buffer) : new ARRAYS[dtype](size);
    return { values, scales, zero };
  });
  const operators = file.operators.map(({ name, inputs, output, relu }) => {
    tensors[output].relu = relu;
    return () => KERNELS[name](tensors[output], ...inputs.map((i) => tensors[i]));
  });
  const source = tensors[file.input].values, head = tensors[file.output].values;
  return (observation) => {
    source.set(observation);
    operators.forEach((compute) => compute());
    if (!file.low) return head.indexOf(Math.max(...head));
    return Array.from(head, (v, i) => clip(v, file.low[i], file.high[i]));
  };
}

// ---- Environments: constants and formulas are those of Gymnasium 1.3 and of airnav.py ----
//
// `step` takes a state and an action and returns the next state, the reward and whether it is over.
// `view` is what a picture shows, in the environment's units: left, right, bottom, top.

const remainder = (x, y) => x - y * Math.floor(x / y);
const wrapped = (angle) => remainder(angle + Math.PI, 2 * Math.PI) - Math.PI;
const along = (values, slopes, by) => values.map((value, i) => value + by * slopes[i]);
const spread = (count, from, to) =>
  Array.from({ length: count }, (_, i) => from + i * (to - from) / (count - 1));
const turned = ([x, y], angle) => {
  const cos = Math.cos(angle), sin = Math.sin(angle);
  return [x * cos - y * sin, x * sin + y * cos];
};
const minus = ([a, b], [c, d]) => [a - c, b - d];

const TASKS = {};

TASKS["CartPole-v1"] = {
  limit: 500, rate: 50, view: [-2.7, 2.7, -0.5, 1.6],
  observe: (state) => state,
  step([x, speed, angle, spin], action) {
    const cos = Math.cos(angle), sin = Math.sin(angle), force = action === 1 ? 10 : -10;
    const push = (force + 0.05 * (spin * spin) * sin) / 1.1;
    const turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * (cos * cos) / 1.1));
    const slopes = [speed, push - 0.05 * turn * cos / 1.1, spin, turn];
    const next = along([x, speed, angle, spin], slopes, 0.02);
    return [next, 1, Math.abs(next[0]) > 2.4 || Math.abs(next[2]) > 12 * 2 * Math.PI / 360];
  },
  draw(pen, [x, , angle], action) {
    pen.line([[-2.7, 0], [2.7, 0]], "line", 2);
    for (const end of [-2.4, 2.4]) pen.line([[end, -0.12], [end, 0.12]], "bad", 3);
    if (action !== undefined) pen.arrow([x, -0.28], action ? 0.45 : -0.45);
    for (const side of [-0.15, 0.15]) pen.disc([x + side, -0.06], 0.06, "soft");
    pen.area([[x - 0.28, 0], [x + 0.28, 0], [x + 0.28, 0.24], [x - 0.28, 0.24]], "ink");
    const tip = [x + Math.sin(angle), 0.24 + Math.cos(angle)];
    pen.line([[x, 0.24], tip], "link", 9);
    pen.disc([x, 0.24], 0.045, "card");
  },
};

TASKS["MountainCarContinuous-v0"] = {
  limit: 999, rate: 30, view: [-1.25, 0.65, -0.05, 1.2],
  observe: (state) => state,
  // In float32, as there.
  step([position, velocity], [push]) {
    const force = f32(f32(0.0015) * push), slope = f32(0.0025 * Math.cos(f32(3 * position)));
    velocity = f32(clip(f32(velocity + f32(force - slope)), -0.07, 0.07));
    position = f32(clip(f32(position + velocity), -1.2, 0.6));
    if (position === f32(-1.2) && velocity < 0) velocity = 0;
    const over = position >= f32(0.45) && velocity >= 0;
    return [[position, velocity], (over ? 100 : 0) - 0.1 * push * push, over];
  },
  draw(pen, [position], action) {
    const height = (x) => 0.45 * Math.sin(3 * x) + 0.55;
    const hill = spread(101, -1.25, 0.65).map((x) => [x, height(x)]);
    pen.area([[-1.25, -0.05], ...hill, [0.65, -0.05]], "line");
    pen.line(hill, "soft", 2);
    pen.line([[0.45, height(0.45)], [0.45, height(0.45) + 0.18]], "ink", 2);
    const flag = [[0.45, 0.18], [0.54, 0.15], [0.45, 0.12]];
    pen.area(flag.map(([x, y]) => [x, y + height(0.45)]), "good");
    const angle = Math.atan(1.35 * Math.cos(3 * position));
    const at = (point) => along([position, height(position)], turned(point, angle), 1);
    for (const side of [-0.045, 0.045]) pen.disc(at([side, 0.025]), 0.025, "soft");
    pen.area([[-0.08, 0.03], [0.08, 0.03], [0.05, 0.09], [-0.05, 0.09]].map(at), "link");
    if (action) pen.arrow(at([0, 0.17]), 0.2 * action[0]);
  },
};

TASKS["Acrobot-v1"] = {
  limit: 500, rate: 15, view: [-3, 3, -2.2, 2.2],
  observe: ([a, b, ...speeds]) => [Math.cos(a), Math.sin(a), Math.cos(b), Math.sin(b), ...speeds],
  slopes([a, b, da, db], torque) {
    const { cos, sin } = Math;
    const d1 = 0.25 + 1.25 + cos(b) + 2, d2 = 0.25 + 0.5 * cos(b) + 1;
    const phi2 = 0.5 * 9.8 * cos(a + b - Math.PI / 2);
    const pull = 1.5 * 9.8 * cos(a - Math.PI / 2);
    const phi1 = -0.5 * db * db * sin(b) - db * da * sin(b) + pull + phi2;
    const numerator = torque + d2 / d1 * phi1 - 0.5 * da * da * sin(b) - phi2;
    const second = numerator / (1.25 - d2 * d2 / d1);
    return [da, db, -(d2 * second + phi1) / d1, second];
  },
  // One step of Runge and Kutta's fourth order.
  step(state, action) {
    const slopes = (at) => this.slopes(at, action - 1);
    const k1 = slopes(state), k2 = slopes(along(state, k1, 0.1));
    const k3 = slopes(along(state, k2, 0.1)), k4 = slopes(along(state, k3, 0.2));
    const mean = k1.map((k, i) => k + 2 * k2[i] + 2 * k3[i] + k4[i]);
    const [a, b, da, db] = along(state, mean, 0.2 / 6), { PI } = Math;
    const next = [wrapped(a), wrapped(b), clip(da, -4 * PI, 4 * PI), clip(db, -9 * PI, 9 * PI)];
    const over = -Math.cos(next[0]) - Math.cos(next[1] + next[0]) > 1;
    return [next, over ? 0 : -1, over];
  },
  draw(pen, [a, b]) {
    pen.line([[-3, 1], [3, 1]], "good", 2);
    const elbow = [Math.sin(a), -Math.cos(a)];
    const tip = [elbow[0] + Math.sin(a + b), elbow[1] - Math.cos(a + b)];
    pen.line([[0, 0], elbow], "ink", 11);
    pen.line([elbow, tip], "link", 11);
    for (const joint of [[0, 0], elbow]) pen.disc(joint, 0.06, "card");
  },
};

TASKS["Pendulum-v1"] = {
  limit: 200, rate: 20, view: [-2, 2, -1.45, 1.3],
  observe: ([angle, spin]) => [Math.cos(angle), Math.sin(angle), spin],
  step([angle, spin], [torque]) {
    const reward = -(wrapped(angle) ** 2 + 0.1 * spin * spin + 0.001 * torque * torque);
    const next = clip(spin + (15 * Math.sin(angle) + 3 * torque) * 0.05, -8, 8);
    return [[angle + 0.05 * next, next], reward, false];
  },
  // Angles grow to the left, as there.
  draw(pen, [angle], action) {
    pen.line([[0, 1.05], [0, 1.2]], "good", 4);
    pen.line([[0, 0], [-Math.sin(angle), Math.cos(angle)]], "link", 16);
    pen.disc([0, 0], 0.06, "ink");
    if (action) pen.arrow([0, -1.25], -0.4 * action[0]);
  },
};

const SPEEDS = [5, 4, 3, 2, 1], RATES = [108, 54, 27, 13.5, 6.75], SIDE = 30, RANGE = 20;
const RAYS = spread(64, -54, 54).map((degrees) => degrees * Math.PI / 180);
// Forward and right speeds, yaw rate.
const COMMANDS = [
  ...[[1, 0], [1, 1], [-0.5, 0]].flatMap(([a, b]) => SPEEDS.map((v) => [a * v, b * v, 0])),
  ...[1, -1].flatMap((sign) => RATES.map((rate) => [0, 0, sign * rate])),
];

TASKS["AirNav-v0"] = {
  limit: 750, rate: 15, view: [-31, 31, -31, 31],
  // In float32, as there.
  depths({ position: [x, y], heading, obstacles }) {
    const cos = f32(Math.cos(heading)), sin = f32(Math.sin(heading));
    const wall = (at, by) => f32(f32(SIDE - f32(f32(at) * Math.sign(by))) / Math.abs(by));
    const circles = obstacles.map(([ox, oy, radius]) => {
      const [a, b] = [f32(ox - x), f32(oy - y)];
      return [a, b, f32(f32(f32(radius) ** 2) - f32(f32(a * a) + f32(b * b)))];
    });
    return RAYS.map((angle) => {
      const [rx, ry] = [f32(Math.cos(angle)), f32(Math.sin(angle))];
      const dx = f32(f32(cos * rx) - f32(sin * ry)), dy = f32(f32(sin * rx) + f32(cos * ry));
      let depth = Math.min(RANGE, wall(x, dx), wall(y, dy));
      for (const [a, b, room] of circles) {
        const projection = f32(f32(a * dx) + f32(b * dy));
        const entry = f32(projection - f32(Math.sqrt(f32(f32(projection * projection) + room))));
        // No number where a ray passes by, negative where the obstacle lies behind.
        if (entry > 0) depth = Math.min(depth, entry);
      }
      return Math.max(depth, 0);
    });
  },
  observe(state) {
    const offset = minus(state.goal, state.position);
    const speeds = turned(state.velocity, -state.heading).map((v) => v / 5);
    const goal = [...turned(offset, -state.heading), Math.hypot(...offset)].map((v) => v / 30);
    return [...this.depths(state).map((depth) => depth / RANGE), ...speeds, ...goal];
  },
  step(state, action) {
    const [forward, right, rate] = COMMANDS[action], { position, goal, obstacles } = state;
    const target = turned([forward, right], state.heading);
    // A diagonal command is met halfway.
    const velocity = target.map((v, i) => (right > 0 ? (v + state.velocity[i]) / 2 : v));
    const path = velocity.map((v) => 0.2 * v), after = along(position, path, 1);
    const square = Math.max(path[0] ** 2 + path[1] ** 2, 1e-12);
    const hits = ([x, y, radius]) => {
      const offset = minus([x, y], position);
      const share = clip((offset[0] * path[0] + offset[1] * path[1]) / square, 0, 1);
      return Math.hypot(offset[0] - share * path[0], offset[1] - share * path[1]) - radius < 0.5;
    };
    const distance = Math.hypot(...minus(goal, after)), reached = distance < 3;
    const hit = obstacles.some(hits) || after.some((at) => Math.abs(at) > SIDE - 0.5);
    let reward = Math.hypot(...minus(goal, position)) - distance - 1;
    if (distance < 6) reward += (4 - Math.hypot(...velocity)) * 0.01875;
    const heading = wrapped(state.heading + 0.2 * rate * Math.PI / 180);
    const trail = [...(state.trail ?? [position]), after];
    const next = { ...state, position: after, velocity, heading, trail };
    return [next, reached ? 1000 : hit ? -100 : reward, reached || hit];
  },
  // North is up.
  draw(pen, state) {
    const at = ([x, y]) => [y, x], { position, heading, goal } = state;
    const away = (point, angle) => along(position, turned(point, heading + angle), 1);
    const ends = this.depths(state).map((depth, i) => away([depth, 0], RAYS[i]));
    pen.area([position, ...ends].map(at), "open-bg");
    const corners = [[-1, -1], [-1, 1], [1, 1], [1, -1], [-1, -1]];
    pen.line(corners.map(([x, y]) => [SIDE * x, SIDE * y]), "soft", 3);
    for (const [x, y, radius] of state.obstacles) pen.disc([y, x], radius, "soft");
    pen.disc(at(goal), 3, "good-bg");
    pen.disc(at(goal), 0.8, "good");
    if (state.trail) pen.line(state.trail.map(at), "link", 3);
    const arrow = [[1.8, 0], [-1, 1], [-0.4, 0], [-1, -1]];
    pen.area(arrow.map((point) => at(away(point, 0))), "bad");
  },
};

/** Act once and return the game after it. */
function advance(task, game) {
  const action = game.act(task.observe(game.state));
  const [state, reward, over] = task.step(game.state, action), steps = game.steps + 1;
  const total = game.total + reward;
  return { ...game, state, action, total, steps, over: over || steps >= task.limit };
}

// ---- The page ----

/** Return what draws in an environment's units, with the page's colours. */
function penOn(canvas, [left, right, bottom, top]) {
  const style = getComputedStyle(canvas), context = canvas.getContext("2d");
  const width = canvas.clientWidth, ratio = devicePixelRatio, metre = width / (right - left);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round((top - bottom) * metre * ratio);
  context.scale(ratio, ratio);
  context.lineCap = context.lineJoin = "round";
  const colour = (name) => style.getPropertyValue(`--${name}`);
  const path = (points) => {
    context.beginPath();
    points.forEach(([x, y]) => context.lineTo((x - left) * metre, (top - y) * metre));
  };
  const pen = {
    area(points, name) {
      path(points);
      context.fillStyle = colour(name);
      context.fill();
    },
    // Widths are pixels of a picture of 540.
    line(points, name, thick) {
      path(points);
      context.strokeStyle = colour(name);
      context.lineWidth = thick * width / 540;
      context.stroke();
    },
    disc([x, y], radius, name) {
      context.beginPath();
      context.arc((x - left) * metre, (top - y) * metre, radius * metre, 0, 2 * Math.PI);
      context.fillStyle = colour(name);
      context.fill();
    },
    arrow([x, y], by) {
      const head = 0.012 * (right - left), tip = x + by, back = tip - Math.sign(by) * head;
      if (Math.abs(by) < head) return;
      pen.line([[x, y], [back, y]], "open", 4);
      pen.line([[back, y + head], [tip, y], [back, y - head]], "open", 4);
    },
  };
  return pen;
}

function play(root, data) {
  const task = TASKS[data.env], count = data.starts.length;
  const find = (name) => root.querySelector(name);
  const acts = data.policies.map(policy), arenas = [...root.querySelectorAll(".arena")];
  const number = (value) =>
    value.toLocaleString("en", { maximumFractionDigits: 1, signDisplay: "negative" })
      .replace("-", "\u2212");
  // Continuous actions are the same within what `tolerance` says.
  const same = (a, b) =>
    data.tolerance ? a.every((v, i) => Math.abs(v - b[i]) <= data.tolerance[i]) : a === b;
  let start = 0, running = false, due = 0, agreements, games;

  function show() {
    arenas.forEach((arena, i) => {
      const game = games[i], result = data.starts[start].returns[i];
      task.draw(penOn(arena.querySelector("canvas"), task.view), game.state, game.action);
      arena.querySelector(".return").textContent = number(game.total);
      const place = `${game.over ? "over at step" : "step"} ${game.steps}`;
      arena.querySelector("small").textContent = `${place}; evaluation: return ${number(result)}`;
    });
    const [{ steps }] = games, over = games.every((game) => game.over);
    find(".toggle").textContent = running ? "Pause" : over ? "Play again" : "Play";
    find(".start").textContent = `Start ${start + 1} of ${count}`;
    find(".agreed").textContent = steps ? `${agreements} of ${steps}` : "\u2013";
  }
  function reset() {
    const { state } = data.starts[start];
    games = acts.map((act) => ({ act, state, total: 0, steps: 0, over: false }));
    agreements = 0;
    show();
  }
  function tick() {
    const [{ act, state, over }] = games, observation = task.observe(state);
    if (!over) agreements += same(act(observation), acts[1](observation));
    games = games.map((game) => (game.over ? game : advance(task, game)));
    running = !games.every((game) => game.over);
  }
  function frame(now) {
    // What a hidden page missed is not made up for.
    due = Math.max(due, now - 100);
    for (; running && due <= now; due += 1000 / task.rate) tick();
    show();
    if (running) requestAnimationFrame(frame);
  }
  find(".toggle").onclick = () => {
    if (!running && games.every((game) => game.over)) reset();
    running = !running;
    show();
    if (running) requestAnimationFrame(frame);
  };
  find(".next").onclick = () => {
    start = (start + 1) % count;
    reset();
  };
  const [left, right, bottom, top] = task.view;
  root.style.setProperty("--shape", (right - left) / (top - bottom));
  new ResizeObserver(show).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  reset();
}

if (typeof document !== "undefined") {
  play(document.getElementById("play"), JSON.parse(document.getElementById("played").textContent));
}
