// SPDX-License-Identifier: Apache-2.0
//
// Room: a device's roofline drawn step by step, the worksheet of a prediction, and FA's speedup by length.
import {ask, command} from './core.js';
import {count, element, facts, figures, number, short, table} from './dom.js';
import {line, picture, text} from './picture.js';
import {axes, curves, linearScale, logScale} from './plotted.js';
import {devices, MASKS, SCHEDULES} from './choices.js';
import {player} from './player.js';

const LENGTHS = ['512', '1024', '2048', '4096', '8192', '16384', '32768', '65536'];
const box = (width, height) => ({x: 52, y: 26, w: width - 52 - 66, h: height});

export function rooflineArguments(values) {
  return ['--device', values.device, '--heads', values.heads, '--head-dim', values.head_dim, '--causal', values.causal, '--pass', values.pass];
}

function drawn(figure, at) {
  return (width) => {
    const b = box(width, Math.min(380, width * 0.72));
    const x = logScale(figure.x.least, figure.x.most, b.x, b.x + b.w), y = logScale(figure.y.least, figure.y.most, b.y + b.h, b.y);
    const nodes = axes(b, x, y, {x: figure.x.label, y: figure.y.label});
    figure.guides.slice(0, at).forEach((guide, i) => {
      const [x1, y1] = [x(guide.from[0]), y(guide.from[1])], [x2, y2] = [x(guide.to[0]), y(guide.to[1])];
      nodes.push(line(x1, y1, x2, y2, {class: 'roof'}));
      const angle = Math.atan2(y2 - y1, x2 - x1) * 180 / Math.PI;
      const middle = i === 0 ? 0.5 : 0.55;
      const half = guide.label.length * 4.4;  // of the label's width
      const [tx, ty] = [Math.min(x1 + (x2 - x1) * middle, i === 0 ? Infinity : b.x + b.w - half), y1 + (y2 - y1) * middle - 7];
      nodes.push(text(tx, ty, guide.label, {'text-anchor': 'middle', class: 'strong', transform: Math.abs(angle) > 1 ? `rotate(${angle} ${tx} ${ty})` : null}));
    });
    const series = figure.series.slice(0, Math.max(0, at - figure.guides.length));
    return {height: b.y + b.h + 42, nodes: [...nodes, ...curves(series, x, y, b)]};
  };
}

function stage(figure, at) {
  if (at === 0) return 'Two axes: how much work each byte of memory brings, and how fast the work is done.';
  if (at === 1) return `Under the slope memory decides: ${figure.guides[0].label}. FLOP per byte times bytes a second.`;
  if (at === 2) return `A roof over all: ${figure.guides[1].label}. No kernel does more.`;
  if (at <= figure.guides.length) return `A lower roof, for kernels with an older instruction: ${figure.guides[at - 1].label}.`;
  const shown = figure.series[at - figure.guides.length - 1];
  const last = shown.points[shown.points.length - 1];
  return `${shown.name}, from length 512 to 65,536 along its line; at the end ${count(Number(last.x.toPrecision(3)))} FLOP per byte and ${figures(last.y, 3)} TFLOP/s.`;
}

function wins(rows) {
  return (width) => {
    const series = SCHEDULES.slice(1).map((name) => ({name, points: rows.map((row) => ({x: row.problem.len_kv, win: row.schedules.find((s) => s.schedule === name)?.win})).filter((p) => p.win).map((p) => ({x: p.x, y: p.win, note: `${name}, length ${count(p.x)}: ${figures(p.win, 3)}×`}))})).filter((s) => s.points.length > 0);
    const b = box(width, Math.min(280, width * 0.6));
    const all = series.flatMap((s) => s.points.map((p) => p.y));
    const x = logScale(Number(LENGTHS[0]), Number(LENGTHS[LENGTHS.length - 1]), b.x + 6, b.x + b.w - 6, 2), y = linearScale(0, Math.max(...all, 1) * 1.08, b.y + b.h, b.y);
    const nodes = axes(b, x, y, {x: 'length', y: 'times as fast as standard attention'}, {x: (v) => (v >= 1024 ? `${v / 1024}k` : `${v}`), y: (v) => figures(v, 3)});
    nodes.push(line(b.x, y(1), b.x + b.w, y(1), {class: 'roof'}));
    return {height: b.y + b.h + 42, nodes: [...nodes, ...curves(series, x, y, b)]};
  };
}

const range = ([begin, end]) => (end === 0 ? `from ${count(begin)} on` : `from ${count(begin)} to ${count(end - 1)}`);

function predictions(row, extra) {
  return table(`Predicted at length ${count(row.problem.len_kv)}`, ['schedule', 'time', 'TFLOP/s', 'win', 'bound', 'DRAM', 'faster than standard'],
    row.schedules.map((s) => {
      if (s.refusal) return [s.schedule, '–', '–', '–', s.refusal, '–', '–'];
      const p = s.passes.reduce((a, b) => (b.ms > a.ms ? b : a));
      const key = (name) => `${s.schedule}.${name}`;
      return [s.schedule, element('span', {}, number(key('ms'), s.ms, `${figures(s.ms)} ms`)), number(key('tflops'), s.tflops, figures(s.tflops, 3)),
        s.win ? number(key('win'), s.win, `${figures(s.win, 3)}×`) : '–', `${p.bound}, ${Math.round(p.percent_of_bound)} %${s.fits ? '' : '; does not fit the memory'}`, `${short(p.bytes.dram)}B`,
        extra.limits[s.schedule]?.faster.map(range).join(', ') || '–'];
    }));
}

function worksheet(args, values) {
  const answer = command(['roofline', ...args, '--len', values.len, '--schedule', values.schedule, '--worksheet']);
  const passes = answer.rows[0].schedules[0].passes ?? [];
  return passes.map((p) => element('section', {}, element('h2', {}, `Worksheet: ${p.schedule} ${p.pass}, ${p.by}, length ${count(Number(values.len))}`),
    element('ol', {class: 'worksheet'}, p.worksheet.map((step) => element('li', {}, element('span', {}, step.what), element('code', {}, step.calculation))))));
}

export const roofline = {
  id: 'roofline',
  title: 'Roofline',
  question: 'How fast can attention be on this GPU?',
  lead: 'Draw it as one would by hand: a slope for the memory, a roof for the arithmetic. Standard attention sits under the slope; the tiles carry FlashAttention to the roof.',
  controls: [
    {name: 'device', label: 'Device', options: devices}, {name: 'len', label: 'Length', options: LENGTHS},
    {name: 'heads', label: 'Heads', text: true}, {name: 'head_dim', label: 'head_dim', options: ['64', '96', '128', '192', '256']},
    {name: 'causal', label: 'Mask', options: MASKS}, {name: 'pass', label: 'Pass', options: ['forward', 'backward', 'both']},
    {name: 'schedule', label: 'Worksheet of', options: SCHEDULES}, {name: 'share', label: 'Attention’s share of a model (0 to 1)', min: 0, max: 1, step: 0.05},
  ],
  defaults: {device: 'h200', len: '4096', heads: '16', head_dim: '128', causal: 'none', pass: 'forward', schedule: 'fa2', share: '0.4', step: '9'},
  draw(values, say, change) {
    const args = [...rooflineArguments(values), '--baseline', 'standard'];
    const all = command(['roofline', ...args, '--len', `${LENGTHS[0]}:${LENGTHS[LENGTHS.length - 1]}`]);
    const extra = ask({ask: 'roofline', args: [...args, '--len', LENGTHS.join(','), '--amdahl', values.share]});
    const index = LENGTHS.indexOf(values.len);
    const row = all.rows[index];
    const last = extra.figure.guides.length + extra.figure.series.length;
    const state = {at: Math.min(Number(values.step), last)};
    const sentence = element('p', {class: 'now'});
    const fig = picture('roofline', extra.figure.title, '', (width) => drawn(extra.figure, state.at)(width));
    const moved = (at) => {
      state.at = at;
      sentence.textContent = stage(extra.figure, at);
      fig.redraw(sentence.textContent);
      say(sentence.textContent);
      change({step: String(at)}, true);
    };
    const time = player({last, at: state.at, pace: 1400, label: 'Steps of the drawing', moved});
    queueMicrotask(() => moved(time.at));
    const win = extra.model_wins[index];
    return [fig, time.node, sentence,
      picture('win', 'FlashAttention’s win against length', `on ${values.device}`, wins(all.rows)),
      predictions(row, extra),
      facts([['a whole model', number('model_win', win, `${figures(win, 3)}× as fast`), ` when attention is ${Math.round(100 * values.share)} % of its time with standard`]]),
      ...worksheet(args, values),
      element('p', {class: 'command'}, element('code', {}, `tessera roofline ${args.join(' ')} --len ${values.len} --worksheet`)),
      element('p', {class: 'source'}, 'Predictions, not measurements: how far the model is from measurements stands in docs/model.md (tessera roofline --accuracy).')];
  },
};
