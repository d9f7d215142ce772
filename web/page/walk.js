// SPDX-License-Identifier: Apache-2.0
//
// Room: one query meets its keys, tile by tile, in the CPU kernel's own numbers.
import {command, keepFile, sample} from './core.js';
import {bytes, element, facts, figures, number, percent, shape, table} from './dom.js';
import {line, path, picture, rect, save, text} from './picture.js';
import {MASKS} from './choices.js';
import {player} from './player.js';

let own = [];  // paths of the reader's files, in the page's memory

function source(values) {
  if (values.from === 'own' && own.length > 0) return [...own, '--layout', values.layout];
  if (values.from === 'random') return ['--len', values.len, '--head-dim', '64'];
  return ['/sample.safetensors', '--layout', 'bhsd'];
}

export function walkArguments(values) {
  return ['walk', ...source(values), '--causal', values.causal, '--schedule', values.schedule, '--tile', `${values.block_q},${values.block_kv}`, '--row', values.row];
}

/** The steps that change O, the skipped tiles, and the softmax of `standard`. */
const shown = (trace) => trace.steps.filter((step) => step.tile === 'skipped' || step.estimate || step.step === 'softmax');
const keysOf = (step) => `keys ${step.keys[0]} to ${step.keys[1] - 1}`;

function sentenceOf(steps, at) {
  if (at === 0) return 'No key has been seen: m = −∞, l = 0, O = 0.';
  const step = steps[at - 1];
  if (step.tile === 'skipped') return `Skipped: ${keysOf(step)} are hidden from every query of the tile. Nothing is loaded.`;
  const what = step.step === 'finish' ? 'Finish: O is divided by l.' : step.step === 'merge' ? `The sums of ${keysOf(step)} are merged.` : step.step === 'softmax' ? 'All scores of the row are here: m and l at once.' : `${keysOf(step)} (${step.tile}).`;
  const before = [...steps.slice(0, at - 1)].reverse().find((s) => s.m !== undefined);
  const old = before ? before.m : '-inf';
  const m = step.m === undefined ? '' : step.m === old ? ` m stays ${figures(step.m)}` : ` m rises from ${figures(old)} to ${figures(step.m)}`;
  const scaled = step.rescale === undefined ? '' : `, what was summed is multiplied by ${figures(step.rescale)}`;
  const l = step.l === undefined ? '' : `, l = ${figures(step.l)}.`;
  const error = step.error === undefined ? '' : ` O is ${percent(step.error)} from the exact softmax.`;
  return `${what[0].toUpperCase()}${what.slice(1)}${m}${scaled}${l}${error}`;
}

function strip(steps, at, width, nodes) {
  const tiles = steps.filter((s) => !['finish', 'softmax', 'merge'].includes(s.step));
  const last = Math.max(...tiles.map((s) => s.keys[1]));
  const scale = width / last;
  tiles.forEach((step) => {
    const index = steps.indexOf(step) + 1;
    const x = step.keys[0] * scale, w = (step.keys[1] - step.keys[0]) * scale - 1;
    nodes.push(rect(x, 18, w, 24, {class: `tile ${step.tile} ${index > at ? 'later' : ''}`}));
    if (index === at) nodes.push(rect(x, 16, w, 28, {class: 'here'}));
  });
  nodes.push(text(0, 11, 'keys, tile by tile'));
}

/** A curve over the steps, with its formula, the values of its ends and a mark at each step. */
function curve(steps, at, {key, title, formula, log = false}, box, nodes) {
  const points = steps.map((s, i) => [i + 1, s[key]]).filter(([, v]) => typeof v === 'number' && (!log || v > 0));
  nodes.push(text(box.x, box.y - 22, title, {class: 'strong'}), text(box.x, box.y - 7, formula, {class: 'small'}), rect(box.x, box.y, box.w, box.h, {class: 'frame'}));
  if (points.length === 0) return;
  const f = log ? Math.log10 : (v) => v;
  const values = points.map(([, v]) => v).sort((a, b) => a - b);
  const low = values[0], high = values[values.length - 1];
  const y = (v) => box.y + box.h - 12 - (high > low ? (f(v) - f(low)) / (f(high) - f(low)) : 0.5) * (box.h - 24);
  const x = (i) => box.x + 56 + (i - 1) / Math.max(1, steps.length - 1) * (box.w - 72);
  for (const value of high > low ? [low, high] : [low]) {
    nodes.push(text(box.x + 46, y(value) + 4, log ? value.toExponential(0).replace('e+0', '').replace('-', '−') : figures(value, 3), {class: 'small', 'text-anchor': 'end'}), line(box.x + 49, y(value), box.x + box.w, y(value), {class: 'rule'}));
  }
  const seen = points.filter(([i]) => i <= at);
  if (seen.length > 0) {
    nodes.push(path(seen.map(([i, v]) => [x(i), y(v)]), {class: 'curve'}));
    seen.forEach(([i, v]) => nodes.push(shape('circle', {cx: x(i), cy: y(v), r: i === at ? 5 : 3, class: i === at ? 'dot here-dot' : 'dot'})));
  }
  nodes.push(text(box.x + box.w, box.y + box.h + 14, 'tiles of keys seen →', {class: 'small', 'text-anchor': 'end'}));
}

/** The bytes moved so far by this schedule and by standard attention, on one scale. */
function moved(steps, at, schedule, box, nodes) {
  const last = steps.filter((s) => s.bytes).pop()?.bytes;
  const now = steps.slice(0, at).filter((s) => s.bytes).pop()?.bytes ?? {schedule: 0, standard: 0};
  if (!last) return;
  const most = Math.max(last.schedule, last.standard, 1), label = 132;
  [[`${schedule} moved`, now.schedule, 'unit-GEMMs'], ['standard moved', now.standard, 'unit-memory']].forEach(([name, value, cls], i) => {
    const y = box.y + i * 20;
    nodes.push(text(box.x, y + 12, name), rect(box.x + label, y, box.w - label - 80, 14, {class: 'lane'}),
      rect(box.x + label, y, (box.w - label - 80) * value / most, 14, {class: cls}), text(box.x + box.w, y + 12, bytes(Math.round(value)), {class: 'strong', 'text-anchor': 'end'}));
  });
}

function bars(trace, step, box, nodes) {
  const columns = Math.min(trace.exact.o.length, box.w > 500 ? 32 : 16);
  const exact = trace.exact.o.slice(0, columns);
  const estimate = step?.estimate?.slice(0, columns) ?? exact.map(() => 0);
  const most = Math.max(...exact.map(Math.abs), ...estimate.map(Math.abs), 1e-30);
  const middle = box.y + box.h / 2, pitch = box.w / columns;
  const tall = (v) => Math.abs(v) / most * (box.h / 2 - 2);
  const bar = (v, i, inset, cls) => rect(box.x + i * pitch + inset, v >= 0 ? middle - tall(v) : middle, pitch - 2 * inset, Math.max(tall(v), 0.5), {class: cls});
  nodes.push(text(box.x, box.y - 6, `O / l so far (bars), exact O (outlines): ${columns} of ${trace.exact.o.length}`), line(box.x, middle, box.x + box.w, middle, {class: 'frame'}));
  estimate.forEach((v, i) => nodes.push(bar(v, i, pitch * 0.22, 'bar')));
  exact.forEach((v, i) => nodes.push(bar(v, i, pitch * 0.08, 'outline')));
}

const CURVES = [
  {key: 'm', title: 'm, the largest score so far', formula: 'm = max(old m, scores of the tile)'},
  {key: 'l', title: 'l, the sum of the weights', formula: 'l = rescale · old l + Σ 2^(s − m)'},
  {key: 'error', title: 'error of O so far', formula: 'of O / l against the exact softmax (log)', log: true},
];

function view(trace, steps, state, schedule) {
  return (width) => {
    const nodes = [];
    strip(steps, state.at, width, nodes);
    moved(steps, state.at, schedule, {x: 0, y: 60, w: width}, nodes);
    const narrow = width < 640, gap = 22, w = narrow ? width : (width - 2 * gap) / 3, h = narrow ? 84 : 120;
    CURVES.forEach((one, i) => curve(steps, state.at, one, {x: narrow ? 0 : i * (w + gap), y: 144 + (narrow ? i * (h + 56) : 0), w, h}, nodes));
    const y = 144 + (narrow ? 3 * (h + 56) : h + 56) - 10;
    const last = steps.slice(0, state.at).reverse().find((s) => s.estimate);
    bars(trace, last, {x: 0, y, w: width, h: 110}, nodes);
    return {height: y + 116, nodes};
  };
}

function numbersOf(trace, steps, at) {
  const seen = steps.slice(0, at);
  const value = (key) => seen.map((s) => s[key]).filter((v) => v !== undefined).pop();
  const step = at > 0 ? steps[at - 1] : undefined;
  const moved = step?.bytes ?? {schedule: 0, standard: 0};
  const shownValue = (key, fallback) => number(key, value(key) ?? null, figures(value(key) ?? fallback));
  return facts([
    ['m', shownValue('m', '-inf')], ['rescale', number('rescale', step?.rescale ?? null, step?.rescale === undefined ? '–' : figures(step.rescale))],
    ['l', shownValue('l', 0)], ['error of O', number('error', value('error') ?? null, value('error') === undefined ? '–' : percent(value('error')))],
    ['moved', number('bytes.schedule', moved.schedule, bytes(Math.round(moved.schedule)))], ['standard attention', number('bytes.standard', moved.standard, bytes(Math.round(moved.standard)))],
  ]);
}

/** Asks "will m rise?" before a step is shown; the core's own m decides. */
function question(steps, quiz) {
  const node = element('div', {class: 'quiz', role: 'group', 'aria-label': 'Predict'});
  node.ask = (to, go) => {
    const before = steps.slice(0, to - 1).map((s) => s.m).filter((m) => typeof m === 'number').pop();
    const next = steps[to - 1];
    if (typeof next?.m !== 'number' || next.step === 'finish' || before === undefined || quiz.answered >= to) return true;
    const judge = (rises) => () => {
      const right = rises === (next.m > before);
      quiz.answered = to;
      quiz.asked += 1;
      quiz.right += right ? 1 : 0;
      node.replaceChildren(element('p', {role: 'status'}, `${right ? 'Right' : 'Not so'}: m ${next.m > before ? 'rose' : 'stayed'}. ${quiz.right} of ${quiz.asked}.`));
      go();
    };
    node.replaceChildren(element('p', {}, `m is ${figures(before)}. The next tile has ${keysOf(next)}. Will m rise?`),
      element('button', {type: 'button', onclick: judge(true)}, 'It rises'), element('button', {type: 'button', onclick: judge(false)}, 'It stays'));
    node.querySelector('button').focus();
    return false;
  };
  return node;
}

async function takeFiles(files, values, change) {
  own = [];
  for (const file of files) own.push(keepFile(file.name, new Uint8Array(await file.arrayBuffer())));
  change({from: 'own', row: '0', step: '6'});
}

function drop(values, change) {
  const input = element('input', {type: 'file', multiple: true, accept: '.npy,.safetensors', id: 'own-files', onchange: () => takeFiles(input.files, values, change)});
  const zone = element('div', {class: 'drop', ondragover: (event) => event.preventDefault(), ondrop: (event) => { event.preventDefault(); takeFiles(event.dataTransfer.files, values, change); }},
    element('label', {for: 'own-files'}, 'Your own tensors: q, k, v in one .safetensors, or q.npy, k.npy, v.npy. They stay in this page.'), input);
  return zone;
}

export const walk = {
  id: 'walk',
  title: 'Walk',
  question: 'How can a softmax be summed before its maximum is known?',
  lead: 'One query meets its keys, a tile at a time. It keeps three things: m, the largest score so far; l, the sum of the weights; O, the weighted sum of values. When m rises, what was summed is scaled down. Nothing is approximated.',
  controls: [
    {name: 'from', label: 'Numbers', options: [['sample', 'a real model'], ['random', 'random'], ['own', 'my files']]},
    {name: 'schedule', label: 'Schedule', options: ['fa2', 'fa1', 'standard']}, {name: 'causal', label: 'Mask', options: MASKS},
    {name: 'block_q', label: 'Tile: queries', options: ['16', '32', '64']}, {name: 'block_kv', label: 'Tile: keys', options: ['16', '32', '64']},
    {name: 'row', label: 'Query', min: 0, max: 1048575}, {name: 'len', label: 'Length', min: 1, max: 2048, when: (values) => values.from === 'random'},
    {name: 'layout', label: 'Layout', options: ['bshd', 'bhsd'], when: (values) => values.from === 'own'}, {name: 'ask', label: 'Ask me first', check: true},
  ],
  defaults: {from: 'sample', schedule: 'fa2', causal: 'bottom-right', block_q: '16', block_kv: '16', row: '100', len: '128', layout: 'bshd', ask: '0', step: '6'},
  draw(values, say, change) {
    const files = drop(values, change);
    if (values.from === 'own' && own.length === 0) return [files, element('p', {class: 'note'}, 'Choose files, or drop them here.')];
    const trace = command(walkArguments(values));
    const steps = shown(trace);
    const state = {at: Math.min(Number(values.step) || 0, steps.length)};
    const fig = picture('walk', `Query ${values.row}`, '', view(trace, steps, state, values.schedule));
    const list = element('div');
    const now = element('p', {class: 'now'});
    const quiz = question(steps, {asked: 0, right: 0, answered: state.at});
    const moved = (at) => {
      state.at = at;
      const sentence = sentenceOf(steps, at);
      fig.redraw(sentence);
      now.textContent = sentence;
      list.replaceChildren(numbersOf(trace, steps, at));
      say(sentence);
      change({step: String(at)}, true);
    };
    const time = player({last: steps.length, at: state.at, label: 'Steps of the walk', moved, guard: (to) => values.ask !== '1' || quiz.ask(Math.min(to, steps.length), () => time.go(to))});
    queueMicrotask(() => moved(time.at));
    const rows = steps.map((s) => [s.step === 'finish' ? 'finish' : `${s.keys[0]}–${s.keys[1] - 1}`, s.tile, ...['m', 'rescale', 'l', 'error'].map((key) => (s[key] === undefined ? '' : figures(s[key])))]);
    return [time.node, now, quiz, fig, list,
      element('details', {}, element('summary', {}, 'All steps'), table('All steps of the walk', ['keys', 'tile', 'm', 'rescale', 'l', 'error'], rows)),
      element('p', {class: 'command'}, element('code', {}, `tessera ${walkArguments(values).join(' ').replaceAll('/own/', '').replace('/sample', 'sample')}`), ' ',
        values.from === 'sample' ? element('button', {type: 'button', onclick: () => save('sample.safetensors', new Blob([sample()]))}, 'Save the sample') : ''),
      element('p', {class: 'source'}, `The numbers are those of ${trace.plan.kernel}, run in this page (${trace.plan.target}, fp32); the exact row is the definition in fp64. The command on your processor rounds otherwise in the last digits, since WebAssembly has no fused multiply-add.`),
      files];
  },
};
