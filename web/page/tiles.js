// SPDX-License-Identifier: Apache-2.0
//
// Room: the matrix of scores cut into tiles, whether a tile fits in fast memory, and the tiles that the mask skips.
import {ask} from './core.js';
import {numbers} from './controls.js';
import {bytes, count, element, facts, number, percent, shape} from './dom.js';
import {picture, rect, text} from './picture.js';
import {devices, MASKS} from './choices.js';

const SIZES = ['16', '32', '64', '80', '96', '128', '176', '192', '256'];

function map(answer) {
  return (width) => {
    const side = Math.min(width, 560);
    const top = 26, left = 26;
    const cell = Math.min((side - left) / answer.columns, (side - left) / Math.max(answer.rows, 1));
    const across = (width - left - cell * answer.columns) / 2;
    const gap = cell > 8 ? 1 : 0;
    const kinds = {f: 'full', p: 'partial', s: 'skipped'};
    const nodes = [text(across + left + cell * answer.columns / 2, 16, 'keys →', {'text-anchor': 'middle'}),
      shape('text', {transform: `translate(${across + 16} ${top + cell * answer.rows / 2}) rotate(-90)`, 'text-anchor': 'middle'}, '← queries')];
    answer.map.forEach((row, i) => [...row].forEach((kind, j) => {
      const x = across + left + j * cell, y = top + i * cell;
      nodes.push(rect(x, y, cell - gap, cell - gap, {class: `tile ${kinds[kind]}`}));
      if (kind === 'p' && cell > 10) nodes.push(shape('path', {class: 'hatch', d: `M${x} ${y}L${x + cell - gap} ${y + cell - gap}`}));
    }));
    return {height: top + cell * answer.rows + 6, nodes};
  };
}

function scratchpad(answer) {
  return (width) => {
    const {near, scratchpad: pad} = answer;
    const parts = [['Q', near.q], ['K', near.k], ['V', near.v], ...(pad.gpu ? [] : [['S', near.scores], ['O, m, l', near.o]])];
    const most = Math.max(pad.held, pad.bytes) * 1.06;
    const scale = width / most;
    const nodes = [];
    let x = 0;
    parts.forEach(([name, size], index) => {
      nodes.push(rect(x * scale, 24, size * scale - 1, 34, {class: `part part-${index}`}));
      if (size * scale > 26) nodes.push(text((x + size / 2) * scale, 46, name, {'text-anchor': 'middle', class: 'on'}));
      x += size;
    });
    const end = pad.bytes * scale;
    nodes.push(shape('line', {x1: end, x2: end, y1: 14, y2: 68, class: pad.fits ? 'limit' : 'limit over'}));
    const right = end > width / 2;
    nodes.push(text(right ? end - 4 : end + 4, 12, `${bytes(pad.bytes)} of ${pad.device}`, {'text-anchor': right ? 'end' : 'start'}));
    return {height: 74, nodes};
  };
}

export const tiles = {
  id: 'tiles',
  title: 'Tiles',
  question: 'How do the scores fit into fast memory?',
  lead: 'The N × N matrix of scores never has to exist. Cut it into tiles until one fits the scratchpad, and leave out those that the mask hides.',
  controls: [
    {name: 'len_q', label: 'Queries', min: 1, max: 1048576}, {name: 'len_kv', label: 'Keys', min: 1, max: 1048576},
    {name: 'head_dim', label: 'head_dim', options: ['32', '64', '96', '128', '192', '256']},
    {name: 'dtype', label: 'dtype', options: ['bf16', 'fp16', 'fp32']},
    {name: 'causal', label: 'Mask', options: MASKS}, {name: 'window', label: 'Window (left,right)', text: true},
    {name: 'block_q', label: 'Tile: queries', options: SIZES}, {name: 'block_kv', label: 'Tile: keys', options: SIZES},
    {name: 'device', label: 'Scratchpad of', options: devices},
  ],
  defaults: {len_q: '1024', len_kv: '1024', head_dim: '128', dtype: 'bf16', causal: 'bottom-right', window: '', block_q: '128', block_kv: '128', device: 'h200'},
  draw(values, say) {
    const answer = ask({ask: 'tiles', ...values, ...numbers(values, 'len_q', 'len_kv', 'head_dim', 'block_q', 'block_kv')});
    const {tiles: t, scratchpad: pad, near} = answer;
    const all = t.full + t.partial + t.skipped;
    const sentence = `${count(all)} tiles: ${count(t.full)} full, ${count(t.partial)} partial, ${count(t.skipped)} skipped. ${percent(answer.wasted)} of what is computed is hidden by the mask. ${bytes(pad.held)} of ${bytes(pad.bytes)}: ${pad.fits ? 'it fits' : 'it does not fit'}.`;
    say(sentence);
    const key = element('p', {class: 'key'}, element('span', {class: 'swatch full'}), ' full: no mask code ', element('span', {class: 'swatch partial'}), ' partial: the mask cuts it ', element('span', {class: 'swatch skipped'}), ' skipped: never loaded');
    const drawn = answer.map ? picture('tiles', 'Tiles of the scores', sentence, map(answer)) : element('p', {class: 'note'}, 'More than 4096 tiles: only counted, not drawn.');
    return [
      element('p', {class: 'now'}, sentence), drawn, key,
      picture('scratchpad', pad.gpu ? 'What one tile takes of shared memory' : 'What one tile takes of a core’s cache', sentence, scratchpad(answer)),
      facts([
        ['full', number('tiles.full', t.full, count(t.full))],
        ['partial', number('tiles.partial', t.partial, count(t.partial))],
        ['skipped', number('tiles.skipped', t.skipped, count(t.skipped))],
        ['scores seen', number('pairs', answer.pairs, count(answer.pairs))],
        ['computed in vain', number('wasted', answer.wasted, percent(answer.wasted)), ` of ${count(answer.elements)}`],
        ['held near', number('held', pad.held, bytes(pad.held)), pad.fits ? ' — fits' : ' — does not fit', pad.gpu ? ` (S and O, ${bytes(near.sums)} in fp32, stay in registers)` : ''],
        ['without tiles', `a block of queries would need whole rows: ${bytes(answer.whole_rows.scores)} of scores`],
        ['FLOP', number('flop', answer.work.flop, count(answer.work.flop))],
      ]),
      element('p', {class: 'source'}, `One head, forward. Tiles are loaded once each; kernels that load ahead hold K and V twice. Scratchpad: ${pad.source}.`),
    ];
  },
};
