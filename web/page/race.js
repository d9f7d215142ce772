// SPDX-License-Identifier: Apache-2.0
//
// Room: the four schedules on one problem, side by side in time.
import {ask} from './core.js';
import {numbers} from './controls.js';
import {bytes, count, element, number, shape, short, table} from './dom.js';
import {line, picture, rect, text} from './picture.js';
import {gpus, MASKS} from './choices.js';
import {player} from './player.js';

const UNITS = [['memory', 'memory'], ['GEMMs', 'GEMMs'], ['exps', 'exponentials']];
const COUNTED = {dram: 9, l2: 10, shared: 11, flop: 12, exps: 13};  // indices into a step
const STRIDES = 200;

/** Running sums of the core's numbers, over the steps in the order of their ends. */
function running(lane) {
  const steps = [...lane.steps].sort((a, b) => a[3] - b[3]);
  const sums = [Object.fromEntries(Object.keys(COUNTED).map((name) => [name, 0]))];
  for (const step of steps) sums.push(Object.fromEntries(Object.entries(COUNTED).map(([name, at]) => [name, sums[sums.length - 1][name] + step[at]])));
  return {ends: steps.map((s) => s[3]), sums};
}

function at(run, time) {
  let low = 0, high = run.ends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.ends[middle] <= time) low = middle + 1; else high = middle;
  }
  return run.sums[low];
}

/** Draws the boxes of a unit up to `time`, as one path. */
function boxes(lane, unit, time, scale, y, height) {
  let d = '';
  for (const step of lane.steps) {
    if (step[1] !== unit || step[2] >= time) continue;
    const x = step[2] * scale, w = Math.max(0.35, (Math.min(step[3], time) - step[2]) * scale - 0.25);
    d += `M${x.toFixed(2)} ${y}h${w.toFixed(2)}v${height}h${(-w).toFixed(2)}z`;
  }
  return shape('path', {d, class: `unit-${unit}`});
}

function view(answer, state) {
  return (width) => {
    const left = width < 560 ? 4 : 96;
    const scale = (width - left - 4) / state.end;
    const nodes = [];
    const pitch = 98;
    answer.lanes.forEach((lane, i) => {
      const y = 24 + i * pitch;
      nodes.push(text(left, y - 6, lane.schedule, {class: `strong of-${lane.schedule}`}));
      const group = shape('g', {transform: `translate(${left} 0)`});
      UNITS.forEach(([unit, name], u) => {
        const top = y + u * 20;
        if (left > 4) nodes.push(text(left - 6, top + 13, name, {'text-anchor': 'end', class: 'small'}));
        group.append(rect(0, top, state.end * scale, 16, {class: 'lane'}), boxes(lane, unit, state.time, scale, top, 16));
      });
      const done = lane.end_us <= state.time + 1e-12;
      if (done) group.append(line(lane.end_us * scale, y - 4, lane.end_us * scale, y + 60, {class: 'limit'}));
      nodes.push(group);
      if (done) nodes.push(text(Math.min(left + lane.end_us * scale, width - 4), y + 74, `${lane.end_us.toPrecision(3)} µs`, {'text-anchor': left + lane.end_us * scale > width / 2 ? 'end' : 'start', class: 'strong'}));
    });
    const x = left + state.time * scale;
    nodes.push(line(x, 8, x, 22 + answer.lanes.length * pitch - 22, {class: 'now-line'}));
    return {height: 22 + answer.lanes.length * pitch, nodes};
  };
}

function counters(answer, runs, time) {
  const rows = answer.lanes.map((lane, i) => {
    const now = at(runs[i], time);
    const key = (name) => `${lane.schedule}.${name}`;
    const cells = [['dram', bytes], ['l2', bytes], ['shared', bytes], ['flop', short], ['exps', short]].map(([name, show]) => number(key(name), now[name], show(now[name])));
    const waits = (unit) => `${Math.round(100 * (1 - lane.busy_us[unit] / lane.end_us))} %`;
    return [lane.schedule, ...cells, waits('memory'), waits('GEMMs'), waits('exps')];
  });
  return table('Moved and computed so far; how much of the whole time each unit waits', ['schedule', 'DRAM', 'L2', 'shared memory', 'FLOP', 'exponentials', 'memory waits', 'GEMMs wait', 'exponentials wait'], rows);
}

export const race = {
  id: 'race',
  title: 'Race',
  question: 'What did FlashAttention-1, -2 and -3 change?',
  lead: 'The same sums, four orders. Standard attention writes the matrix of scores out and reads it back. FA1 keeps tiles near but carries O to and fro. FA2 turns the loops round: O stays. FA3 starts the next GEMMs while the exponentials run.',
  controls: [
    {name: 'len', label: 'Length', options: ['256', '512', '1024', '2048', '4096']}, {name: 'head_dim', label: 'head_dim', options: ['64', '128', '256']},
    {name: 'block_q', label: 'Tile: queries', options: ['64', '128', '192', '256']}, {name: 'block_kv', label: 'Tile: keys', options: ['64', '96', '128', '176', '256']},
    {name: 'causal', label: 'Mask', options: MASKS}, {name: 'device', label: 'Device', options: gpus},
  ],
  defaults: {len: '1024', head_dim: '128', block_q: '128', block_kv: '128', causal: 'none', device: 'h200', step: '120'},
  draw(values, say, change) {
    const sizes = numbers(values, 'len', 'head_dim', 'block_q', 'block_kv');
    const answer = ask({ask: 'race', ...values, ...sizes, len_q: sizes.len, len_kv: sizes.len, step: undefined});
    const runs = answer.lanes.map(running);
    const state = {end: Math.max(...answer.lanes.map((lane) => lane.end_us)), time: 0};
    const fig = picture('race', `One head on one multiprocessor of ${answer.title}`, '', (width) => view(answer, state)(width));
    const list = element('div'), now = element('p', {class: 'now'});
    const moved = (step) => {
      state.time = step === STRIDES ? state.end : state.end * step / STRIDES;
      const done = answer.lanes.filter((lane) => lane.end_us <= state.time + 1e-12).map((lane) => `${lane.schedule} (${lane.end_us.toPrecision(3)} µs)`);
      const waits = answer.lanes.filter((lane) => lane.end_us > state.time + 1e-12).map((lane) => lane.schedule);
      const sentence = `At ${state.time.toPrecision(3)} µs ${done.length ? `these are done: ${done.join(', ')}.` : 'none is done.'}${done.length && waits.length ? ` Still at work: ${waits.join(', ')}.` : ''}`;
      now.textContent = sentence;
      fig.redraw(sentence);
      list.replaceChildren(counters(answer, runs, state.time));
      if (step % 20 === 0) say(sentence);
      change({step: String(step)}, true);
    };
    const time = player({last: STRIDES, at: Number(values.step) || 0, pace: 60, stride: 1, label: 'Time', moved});
    queueMicrotask(() => moved(time.at));
    return [time.node, now, fig, element('p', {class: 'key'}, UNITS.map(([unit, name]) => [element('span', {class: `swatch unit-${unit}`}), ` ${name} `])), list,
      element('p', {class: 'source'}, `A picture, not a prediction: every unit at its full rate, one of ${count(answer.cores)} multiprocessors with its share of the memory’s rate. Loads run one tile ahead. In the room Roofline the model says what real kernels take. FA3’s order needs Hopper’s wgmma; on other devices it shows what it would be.`)];
  },
};
