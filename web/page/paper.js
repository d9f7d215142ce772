// SPDX-License-Identifier: Apache-2.0
//
// Room: attention of 4 queries and 4 keys in fractions, to redo with a pencil.
import {command} from './core.js';
import {element} from './dom.js';
import {player} from './player.js';

function matrix(name, rows, marked = () => false) {
  return element('table', {class: 'grid'}, element('caption', {}, name),
    element('tbody', {}, rows.map((row, i) => element('tr', {}, row.map((cell, j) => element('td', {class: marked(i, j) ? 'on' : null}, `${cell ?? '·'}`.replace('-', '−')))))));
}

const fraction = (value) => `${value ?? '−∞'}`.replace('-', '−');
const listed = (values) => values.map((value) => fraction(value ?? '·')).join(',  ');

/** The row's m before step `index`. */
const before = (steps, index) => steps.slice(0, index).reverse().find((s) => s.row === steps[index].row);

/** The formula of O after a step. fa1 keeps O divided by l at every step. */
const newO = (schedule) => (schedule === 'fa1' ? 'O = (rescale · old l · old O + Σ p v) / l' : 'O = rescale · old O + Σ p v');

function card(steps, index, shown, schedule) {
  const step = steps[index];
  const old = before(steps, index);
  const blank = element('span', {class: 'blank'}, ' ');
  const say = (value) => (shown ? value : blank.cloneNode(true));
  const line = (name, value) => element('div', {}, element('dt', {}, name), element('dd', {}, value));
  return element('section', {class: 'paper', 'aria-label': `Step ${index + 1}`},
    element('h2', {}, `Query ${step.row} meets keys ${step.keys[0]} to ${step.keys[1] - 1}`),
    element('dl', {}, line('s = q · k', listed(step.s)), line('old m', fraction(old?.m)), line('old l', fraction(old?.l ?? '0')), line('old O', old ? listed(old.o) : '0,  0'),
      line('m = max', say(fraction(step.m))), line('rescale = 2^(old m − m)', say(fraction(step.rescale))), line('p = 2^(s − m)', say(listed(step.p))),
      line('l = rescale · old l + Σ p', say(fraction(step.l))), line(newO(schedule), say(listed(step.o)))));
}

/** What a learner is asked in a step, in this order: its value, and what to think of when it is wrong. */
const ASKED = [
  {key: 'm', label: 'What is m now?', slip: 'm is the largest s of this row so far, those of earlier tiles too.'},
  {key: 'l', label: 'What is l now? (3/2, or 1.5)', slip: 'l = rescale · old l + Σ p, with rescale = 2^(old m − m).'},
  {key: 'o', label: 'What is O now? (2, 4)', slip: 'Each element is rescale · old O + Σ p v, of its column of V.'},
];

/** The number of "3/2", "-5/4" or "1.5"; NaN for anything else. */
function valueOf(text) {
  const [top, bottom = '1', ...more] = text.trim().replace('−', '-').split('/');
  return more.length > 0 || top.trim() === '' || bottom.trim() === '' ? NaN : Number(top) / Number(bottom);
}

const same = (typed, values) => typed.length === values.length && typed.every((text, i) => valueOf(text) === valueOf(`${values[i]}`));

/** Asks for m, then l, then O of a step. fa1's O is divided by l at once, as its formula says. */
function guess(step, schedule, solved) {
  const node = element('div');
  const next = (at) => {
    if (at === ASKED.length) { solved(); return; }
    const {key, label, slip} = ASKED[at];
    const values = [step[key]].flat();
    const id = `guess-${key}`;
    const input = element('input', {type: 'text', id, autocomplete: 'off'});
    const answer = element('p', {role: 'status'});
    const check = () => {
      const typed = input.value.replace(/[()]/g, '').split(',');
      if (same(typed, values)) { next(at + 1); node.querySelector('input')?.focus(); return; }
      answer.textContent = typed.length !== values.length || typed.some((text) => Number.isNaN(valueOf(text))) ? `Expected ${values.length === 1 ? 'a number' : `${values.length} numbers with a comma between them`}.`
        : `Not so: ${key === 'o' && schedule === 'fa1' ? 'fa1 divides by l in every step, too.' : slip}`;
    };
    const known = ASKED.slice(0, at).map((one) => `${one.key} = ${[step[one.key]].flat().map(fraction).join(', ')}`).join(', ');
    node.replaceChildren(...[known && element('p', {}, `Right: ${known}.`), element('form', {class: 'quiz', onsubmit: (event) => { event.preventDefault(); check(); }},
      element('label', {for: id}, label), input, element('button', {type: 'submit'}, 'Check'), element('button', {type: 'button', onclick: solved}, 'Show'), answer)].filter(Boolean));
  };
  next(0);
  return node;
}

function backwardOf(hand) {
  return element('section', {}, element('h2', {}, 'Backward, without the matrix'),
    element('p', {}, 'Only O and LSE were kept. P is made again from the scores: P = 2^(s − m) / l, D = dO · O, dS = P (dP − D).'),
    element('div', {class: 'grids'}, matrix('dO', hand.do), matrix('P again', hand.rows.map((row) => row.p)), matrix('dS', hand.rows.map((row) => row.ds)),
      matrix('dQ / ln 2 = dS K', hand.rows.map((row) => row.dq_over_ln2)), matrix('dK / ln 2 = dSᵀ Q', hand.dk_over_ln2), matrix('dV = Pᵀ dO', hand.dv)));
}

export const paper = {
  id: 'paper',
  title: 'On paper',
  question: 'Can you compute it with a pencil?',
  lead: 'The four queries and four keys of the lessons, in tiles of 2 × 2. The scale is ln 2, so every weight is a power of two and every result a fraction. Print it and use a pencil.',
  controls: [
    {name: 'schedule', label: 'Schedule', options: ['fa2', 'fa1', 'standard']}, {name: 'causal', label: 'Mask', options: [['none', 'none'], ['bottom-right', 'causal']]},
    {name: 'ask', label: 'Ask me for m, l and O', check: true}, {name: 'blank', label: 'Print with blanks', check: true},
  ],
  defaults: {schedule: 'fa2', causal: 'none', ask: '0', blank: '1', results: '0', step: '0'},
  draw(values, say, change) {
    const args = ['walk', '--by-hand', '--backward', '--schedule', values.schedule, '--causal', values.causal];
    const hand = command(args);
    const steps = hand.steps;
    const place = element('div', {class: 'graph'});
    const solved = new Set();
    const moved = (at) => {
      const index = Math.min(at, steps.length - 1);
      const step = steps[index];
      const open = values.ask !== '1' || solved.has(index);
      const touched = (i, j) => i === step.row && j >= step.keys[0] && j < step.keys[1];
      const scores = Array.from({length: 4}, (_, i) => Array.from({length: 4}, (_x, j) => {
        const met = steps.slice(0, index + 1).find((s) => s.row === i && j >= s.keys[0] && j < s.keys[1]);
        return met ? met.s[j - met.keys[0]] : null;
      }));
      place.replaceChildren(
        element('div', {class: 'grids'}, matrix('Q', hand.q, (i) => i === step.row), matrix('K', hand.k, (i) => i >= step.keys[0] && i < step.keys[1]), matrix('V', hand.v, (i) => i >= step.keys[0] && i < step.keys[1]), matrix('scores so far', scores, touched)),
        card(steps, index, open, values.schedule),
        ...(open ? [] : [guess(step, values.schedule, () => { solved.add(index); moved(index); place.querySelector('section')?.scrollIntoView({block: 'nearest'}); })]));
      say(`Step ${index + 1} of ${steps.length}: query ${step.row} meets keys ${step.keys[0]} to ${step.keys[1] - 1}. ${open ? `m = ${fraction(step.m)}, rescale = ${step.rescale}, l = ${step.l}, O = ${step.o.join(', ')}.` : 'What is m now?'}`);
      change({step: String(index)}, true);
    };
    const time = player({last: steps.length - 1, at: Number(values.step) || 0, pace: 1500, label: 'Steps on paper', moved});
    queueMicrotask(() => moved(time.at));
    const results = element('section', {class: 'results'}, element('h2', {}, 'Results'), element('div', {class: 'grids'}, matrix('l', hand.rows.map((row) => [row.l])), matrix('O', hand.rows.map((row) => row.o))));
    return [time.node, place,
      element('p', {}, element('button', {type: 'button', onclick: () => window.print()}, 'Print the worksheet')),
      element('details', {open: values.results === '1'}, element('summary', {}, 'The results, and the backward'), results, backwardOf(hand)),
      element('div', {class: 'print-only'}, element('h2', {}, `Attention by hand, ${values.schedule}`), element('div', {class: 'grids'}, matrix('Q', hand.q), matrix('K', hand.k), matrix('V', hand.v)), steps.map((_, index) => card(steps, index, values.blank !== '1', values.schedule))),
      element('p', {class: 'command'}, element('code', {}, `tessera ${args.map((arg) => (arg.includes(' ') ? `'${arg}'` : arg)).join(' ')}`))];
  },
};
