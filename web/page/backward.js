// SPDX-License-Identifier: Apache-2.0
//
// Room: the backward, which never stores the matrix. It shows parallel blocks of keys and where their dQ collide.
import {ask} from './core.js';
import {numbers} from './controls.js';
import {bytes, count, element, facts, number, short} from './dom.js';
import {picture, rect, text} from './picture.js';
import {MASKS} from './choices.js';
import {player} from './player.js';

function view(answer, state) {
  return (width) => {
    const left = 68, top = 46;
    const cell = Math.min((width - left - 8) / answer.columns, 420 / answer.rows, 44);
    const across = Math.max(0, (width - left - cell * answer.columns) / 2);
    const x = (j) => across + left + j * cell, y = (i) => top + i * cell;
    const nodes = [text(x(answer.columns / 2), 14, 'tiles of keys: dK, dV stay with a worker', {'text-anchor': 'middle'})];
    const done = new Map(), adds = new Array(answer.rows).fill(0);
    answer.rounds.slice(0, state.at).forEach((round, index) => round.tiles.forEach(([worker, i, j]) => {
      done.set(`${i},${j}`, {worker, now: index === state.at - 1});
      adds[i] += 1;
    }));
    const collisions = new Set(state.at > 0 ? answer.rounds[state.at - 1].collisions : []);
    for (let i = 0; i < answer.rows; i += 1) {
      for (let j = 0; j < answer.columns; j += 1) {
        const tile = done.get(`${i},${j}`);
        nodes.push(rect(x(j), y(i), cell - 1, cell - 1, {class: tile ? (tile.now ? `tile now${collisions.has(i) ? ' clash' : ''}` : 'tile done') : 'tile later'}));
        if (tile?.now && cell > 16) nodes.push(text(x(j) + cell / 2, y(i) + cell / 2 + 4, `${tile.worker + 1}`, {'text-anchor': 'middle', class: 'on'}));
      }
      if (cell >= 11) nodes.push(text(x(0) - 6, y(i) + cell / 2 + 4, collisions.has(i) ? `dQ${i} +${adds[i]} ✱` : `dQ${i} +${adds[i]}`, {'text-anchor': 'end', class: collisions.has(i) ? 'clash-text' : 'small'}));
    }
    const columns = new Map((state.at > 0 ? answer.rounds[state.at - 1].tiles : []).map(([worker, , j]) => [j, worker]));
    columns.forEach((worker, j) => { if (cell > 16) nodes.push(text(x(j) + cell / 2, top - 8, `w${worker + 1}`, {'text-anchor': 'middle', class: 'small'})); });
    return {height: y(answer.rows) + 6, nodes};
  };
}

export const backward = {
  id: 'backward',
  title: 'Backward',
  question: 'How do gradients come out when the weights were never stored?',
  lead: 'The forward stores no weights, only O and LSE = m + ln l, one number a row. Each tile makes its weights P again from Q, K and LSE. Then it adds Pᵀ dO to dV, dSᵀ Q to dK and dS K to dQ, the gradients of V, K and Q. A worker owns a block of keys, so its dK and dV are its own. dQ belongs to queries, and every worker adds to it.',
  controls: [
    {name: 'len', label: 'Length', options: ['256', '512', '1024', '2048']}, {name: 'head_dim', label: 'head_dim', options: ['64', '128', '256']},
    {name: 'block_q', label: 'Tile: queries', options: ['64', '128']}, {name: 'block_kv', label: 'Tile: keys', options: ['64', '128']},
    {name: 'causal', label: 'Mask', options: MASKS}, {name: 'workers', label: 'Workers', options: ['1', '2', '4', '8', '16']},
  ],
  defaults: {len: '1024', head_dim: '128', block_q: '128', block_kv: '128', causal: 'none', workers: '4', step: '3'},
  draw(values, say, change) {
    const sizes = numbers(values, 'len', 'head_dim', 'block_q', 'block_kv', 'workers');
    const answer = ask({ask: 'backward', ...values, ...sizes, len_q: sizes.len, len_kv: sizes.len, step: undefined});
    const state = {at: 0};
    const clashes = answer.rounds.filter((round) => round.collisions.length > 0).length;
    const fig = picture('backward', 'Which worker adds which tile', '', (width) => view(answer, state)(width));
    const sentence = element('p', {class: 'now'});
    const moved = (at) => {
      state.at = at;
      const round = at > 0 ? answer.rounds[at - 1] : {tiles: [], collisions: []};
      const shared = round.collisions.map((i) => `dQ${i}`).join(', ');
      sentence.textContent = at === 0 ? 'Before the first tile: dQ = 0 in slow memory.' : `Step ${at} of ${answer.rounds.length}: ${round.tiles.length} workers, each makes P again for its tile. ${shared ? `Two or more add to ${shared} at once: atomic adds, whose order is not fixed.` : 'No two add to the same dQ.'}`;
      fig.redraw(sentence.textContent);
      say(sentence.textContent);
      change({step: String(at)}, true);
    };
    const time = player({last: answer.rounds.length, at: Number(values.step) || 0, label: 'Steps of the backward', moved});
    queueMicrotask(() => moved(time.at));
    return [time.node, sentence, fig,
      element('p', {class: 'key'}, element('span', {class: 'swatch full'}), ' in work, with its worker’s number ', element('span', {class: 'swatch clash'}), ' adds to the dQ of another worker too ', element('span', {class: 'swatch done'}), ' added; dQ2 +4: four parts of the third dQ so far'),
      facts([
        ['steps with a collision', number('clashes', clashes, `${count(clashes)} of ${count(answer.rounds.length)}`)],
        ['FLOP', number('flop', answer.work.flop, short(answer.work.flop)), ` — the forward takes ${short(answer.forward_work.flop)}; S is made again, and five GEMMs instead of two`],
        ['exponentials', number('exps', answer.work.exps, short(answer.work.exps)), ' — as many as forward, a second time'],
        ['beyond the multiprocessor', number('l2', answer.work.l2, bytes(answer.work.l2)), ` — standard moves ${bytes(answer.standard_work.l2)}`],
        ['memory beside the tensors', number('workspace', answer.workspace, bytes(answer.workspace)), ` — standard keeps P and dS: ${bytes(answer.standard_workspace)}`],
      ]),
      element('p', {class: 'source'}, 'One head of fa2’s backward; workers take the next block of keys when they have ended one, a tile a step. tessera’s deterministic backward adds dQ in a fixed order (docs/decisions/deterministic-backward.md). The same in fractions: the room “On paper”.')];
  },
};
