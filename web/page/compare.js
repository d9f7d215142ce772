// SPDX-License-Identifier: Apache-2.0
//
// Room: the same tokens by standard attention and by tiles, side by side. Bytes and times are those of the core's
// schedules; m, l and O of one query are those of its kernels.
import {ask, command} from './core.js';
import {bytes, element, figures, number} from './dom.js';
import {picture, rect, text} from './picture.js';
import {mayMove, player} from './player.js';
import {walkArguments} from './walk.js';

const LENGTH = 128, TILE = 32, QUERY = 100, STEPS = 100;
const STILL = '64';  // the moment that stands for the whole, where nothing may move: the tiles are done, standard is not
const STATES = {'store S': 'scores', 'store P': 'weights', 'O += P V': 'done'};
const SIDES = [['standard', 'Standard attention', 'Standard'], ['fa2', 'By tiles: FlashAttention-2', 'By tiles']];

const walkOf = (schedule) => command(walkArguments(
  {from: 'sample', causal: 'none', schedule, block_q: `${TILE}`, block_kv: `${TILE}`, row: `${QUERY}`})).steps;

/** The tiles of S that a step is about. */
function tilesOf([, , , , query, , key, end]) {
  const tiles = [];
  for (let k = key; k < end; k += TILE) tiles.push(`${query / TILE},${k / TILE}`);
  return tiles;
}

/** A schedule at a moment: the state of each tile of S, the tile in work, and the bytes moved so far. */
function at(lane, time) {
  const tiles = new Map();
  let now = null, moved = 0;
  for (const step of lane.steps) {
    const [operation, , begin, end] = step, l2 = step[10];
    if (begin >= time) continue;
    if (operation === 'S = Q K^T' || operation === 'O += P V') now = tilesOf(step)[0];
    else if (operation === 'load S') now = null;  // the softmax of whole rows
    if (end > time) continue;
    moved += l2;
    const stored = lane.schedule === 'standard' || operation === 'O += P V';
    if (stored && operation in STATES) tilesOf(step).forEach((tile) => tiles.set(tile, STATES[operation]));
  }
  return {tiles, now: time > lane.end_us ? null : now, moved};
}

function panel([schedule, title, short], state, x, y, size, nodes) {
  const count = LENGTH / TILE, cell = size / count;
  nodes.push(text(x, y - 10, size < 220 ? short : title, {class: `strong of-${schedule}`}));
  for (let i = 0; i < count; i += 1) {
    for (let j = 0; j < count; j += 1) {
      const what = state.tiles.get(`${i},${j}`);
      const stored = schedule === 'standard' && what && what !== 'done';
      nodes.push(rect(x + j * cell, y + i * cell, cell - 1, cell - 1,
        {class: stored ? `tile ${what === 'scores' ? 'partial' : 'full'}` : what ? 'tile done' : 'tile later'}));
    }
  }
  if (state.now) {
    const [i, j] = state.now.split(',').map(Number);
    nodes.push(rect(x + j * cell, y + i * cell, cell - 1, cell - 1, {class: 'tile full'}),
      rect(x + j * cell - 1, y + i * cell - 1, cell + 1, cell + 1, {class: 'here'}));
  }
}

function view(answer) {
  return (width) => {
    const narrow = width < 560, gap = narrow ? 16 : 60;
    const size = Math.min((width - gap) / 2, 320), left = (width - 2 * size - gap) / 2;
    const nodes = [];
    answer.sides.forEach(({side, state, most}, i) => {
      const x = left + i * (size + gap), y = 26;
      panel(side, state, x, y, size, nodes);
      nodes.push(rect(x, y + size + 10, size, 14, {class: 'lane'}),
        rect(x, y + size + 10, size * state.moved / most, 14, {class: i === 0 ? 'unit-memory' : 'unit-GEMMs'}),
        text(x, y + size + 46, bytes(Math.round(state.moved)), {class: 'strong counter'}),
        text(x, y + size + 64, narrow ? 'moved so far' : 'moved between the multiprocessor and memory'));
    });
    return {height: 26 + size + 72, nodes};
  };
}

/** What one query keeps after the tiles that its block of queries has seen. */
function rowOf(steps, seen) {
  const last = steps.slice(0, seen).reverse().find((step) => step.estimate);
  return last ? `m = ${figures(last.m)}, l = ${figures(last.l)}, O / l = (${digits(last.estimate)}, …)` : 'nothing yet';
}

const digits = (values) => values.slice(0, 3).map((v) => figures(Number(v.toFixed(4)), 6)).join(', ');

export const compare = {
  id: 'compare',
  title: 'Compare',
  question: 'What does FlashAttention do differently?',
  lead: 'The same 128 tokens, the same sums, the same result. Standard attention writes the whole table of scores to memory and reads it back. FlashAttention takes one tile at a time, keeps m, l and one row of O for each query, and never stores the table.',
  controls: [],
  defaults: {step: STILL},
  draw(values, say, change) {
    const race = ask({ask: 'race', len: LENGTH, len_q: LENGTH, len_kv: LENGTH, head_dim: 64, block_q: TILE, block_kv: TILE, causal: 'none', device: 'h200'});
    const lanes = SIDES.map(([schedule]) => race.lanes.find((lane) => lane.schedule === schedule));
    const walks = {standard: walkOf('standard'), fa2: walkOf('fa2')};
    const most = Math.max(...lanes.map((lane) => lane.work.l2));
    const end = Math.max(...lanes.map((lane) => lane.end_us));
    const answer = {sides: SIDES.map((side) => ({side, state: {tiles: new Map(), now: null, moved: 0}, most}))};
    const fig = picture('compare', `One head of ${LENGTH} tokens in tiles of ${TILE} by ${TILE}`, '', (width) => view(answer)(width));
    const now = element('p', {class: 'now'});
    const moved = (step) => {
      const moment = step === STEPS ? end + 1e-9 : end * step / STEPS;
      answer.sides.forEach((one, i) => { one.state = at(lanes[i], moment); });
      const [standard, tiled] = answer.sides.map((one) => one.state);
      const row = Math.floor(QUERY / TILE);
      const seen = [...tiled.tiles.keys()].filter((cell) => cell.startsWith(`${row},`)).length;
      const all = LENGTH / TILE;
      const over = [standard, tiled].map((s) => [...s.tiles.values()].filter((v) => v === 'done').length === all * all);
      const last = walks.standard.filter((s) => s.estimate).pop();
      const sentence = over[0] && over[1]
        ? `Both are done, with the same digits: O of query ${QUERY} begins (${digits(last.estimate)}) on the left and (${digits(walks.fa2.filter((s) => s.estimate).pop().estimate)}) on the right. Standard attention moved ${bytes(Math.round(standard.moved))}, tiles moved ${bytes(Math.round(tiled.moved))}.`
        : `${over[1] ? 'The tiles are done' : 'Both are at work'}: standard attention has moved ${bytes(Math.round(standard.moved))}, tiles ${bytes(Math.round(tiled.moved))}. Query ${QUERY}, by tiles, keeps: ${rowOf(walks.fa2, seen)}.`;
      fig.redraw(sentence);
      now.replaceChildren(sentence, number('moved.standard', standard.moved, ''), number('moved.fa2', tiled.moved, ''));
      if (step === STEPS || (step % 10 === 0 && !time.plays())) say(sentence);
      change({step: String(step)}, true);
    };
    const playing = values.step === STILL && mayMove();  // the room as it is opened; a link to a moment stands still
    const time = player({last: STEPS, at: playing ? 0 : Number(values.step) || 0, pace: 90, label: 'Time', moved, playing});
    queueMicrotask(() => moved(time.at));
    return [time.node, now, fig,
      element('p', {class: 'key'}, element('span', {class: 'swatch partial'}), ' scores lie in memory ', element('span', {class: 'swatch full'}), ' weights lie in memory ', element('span', {class: 'swatch done'}), ' added to O, and nothing else stored ', element('span', {class: 'swatch skipped'}), ' not computed yet; outlined: the tile in work'),
      element('p', {class: 'source'}, `Bytes and order are those of tessera’s schedules in bf16, on one multiprocessor of ${race.title} with its share of the memory’s rate; the digits are those of its kernels in fp32, run in this page on a head of a real model.`)];
  },
};
