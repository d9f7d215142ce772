// SPDX-License-Identifier: Apache-2.0
//
// Axes of a chart, and lines between points from the core.
import {line, path, rect, text} from './picture.js';
import {shape, short} from './dom.js';

/** A logarithmic scale from [least, most] to pixels, with its ticks. */
export function logScale(least, most, from, to, base = 10) {
  const f = (v) => Math.log(v) / Math.log(base);
  const scale = (v) => from + (f(v) - f(least)) / (f(most) - f(least)) * (to - from);
  scale.ticks = [];
  for (let power = Math.ceil(f(least) - 1e-9); power <= f(most) + 1e-9; power += 1) scale.ticks.push(base ** power);
  return scale;
}

export function linearScale(least, most, from, to) {
  const scale = (v) => from + (v - least) / (most - least) * (to - from);
  const rough = (most - least) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= rough);
  scale.ticks = [];
  for (let v = Math.ceil(least / step) * step; v <= most + step * 1e-6; v += step) scale.ticks.push(v);
  return scale;
}

export function axes(box, x, y, labels, tick = {x: short, y: short}) {
  const nodes = [rect(box.x, box.y, box.w, box.h, {class: 'frame'})];
  x.ticks.forEach((v, i) => {
    if (x.ticks.length > 8 && box.w < 420 && i % 2) return;
    nodes.push(line(x(v), box.y, x(v), box.y + box.h, {class: 'rule'}), text(x(v), box.y + box.h + 16, tick.x(v), {'text-anchor': 'middle'}));
  });
  y.ticks.forEach((v) => nodes.push(line(box.x, y(v), box.x + box.w, y(v), {class: 'rule'}), text(box.x - 6, y(v) + 4, tick.y(v), {'text-anchor': 'end'})));
  nodes.push(text(box.x + box.w / 2, box.y + box.h + 34, labels.x, {'text-anchor': 'middle'}), text(box.x, box.y - 8, labels.y));
  return nodes;
}

/** Draws lines with their names at the end; names that would overlap move apart. */
export function curves(series, x, y, box) {
  const nodes = [];
  const ends = [];
  for (const {name, points} of series) {
    if (points.length === 0) continue;
    const at = points.map((p) => [x(p.x), y(p.y)]);
    nodes.push(path(at, {class: `curve of-${name}`}));
    points.forEach((p, i) => nodes.push(shape('circle', {cx: at[i][0], cy: at[i][1], r: 3.2, class: `dot of-${name}`}, shape('title', {}, p.note ?? name))));
    ends.push({name, x: at[at.length - 1][0], y: at[at.length - 1][1]});
  }
  ends.sort((a, b) => a.y - b.y).forEach((end, i) => {
    if (i > 0 && end.y - ends[i - 1].y < 15) end.y = ends[i - 1].y + 15;
    const right = end.x > box.x + box.w - 62;
    nodes.push(text(right ? box.x + box.w + 6 : end.x + 8, Math.min(end.y, box.y + box.h) + 4, end.name, {class: `strong of-${end.name}`}));
  });
  return nodes;
}
