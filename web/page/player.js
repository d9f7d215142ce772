// SPDX-License-Identifier: Apache-2.0
//
// Moves forwards and backwards in time by buttons, slider and keys: arrows, Home, End; space plays.
import {element} from './dom.js';

let current = null;

function onKey(event) {
  if (!current || event.altKey || event.ctrlKey || event.metaKey) return;
  const inField = event.target.closest('input, select, textarea, [contenteditable]');
  if (inField) return;
  const moves = {ArrowRight: 1, ArrowLeft: -1};
  if (event.key in moves) current.go(current.at + moves[event.key] * current.stride);
  else if (event.key === 'Home') current.go(0);
  else if (event.key === 'End') current.go(current.last);
  else if (event.key === ' ' && !event.target.closest('button, a, summary')) current.toggle();
  else return;
  event.preventDefault();
}
document.addEventListener('keydown', onKey);

/** Detaches the keys from every room. */
export function stop() {
  if (current) current.pause();
  current = null;
}

/** False if the reader's system asks for less motion. */
export const mayMove = () => !matchMedia('(prefers-reduced-motion: reduce)').matches;

/** moved(at) draws; guard(to) may refuse a step forwards; an arrow key moves by `stride`, played in `pace` ms. With
 * `playing` it plays at once. */
export function player({last, at, stride = 1, pace = 700, label, moved, guard = () => true, playing = false}) {
  stop();
  let timer = 0;
  const self = {at: Math.min(at, last), last, stride};
  const slider = element('input', {type: 'range', min: 0, max: last, step: 1, value: self.at, 'aria-label': label, oninput: () => self.go(Number(slider.value))});
  const play = element('button', {type: 'button', class: 'play', onclick: () => self.toggle()}, 'Play');
  self.go = (to, byPlay = false) => {
    const goal = Math.max(0, Math.min(last, to));
    if (goal > self.at && !guard(goal)) { slider.value = self.at; self.pause(); return; }
    if (!byPlay) self.pause();
    self.at = goal;
    slider.value = goal;
    moved(goal);
  };
  self.pause = () => {
    clearInterval(timer);
    timer = 0;
    play.textContent = 'Play';
  };
  self.plays = () => timer !== 0;
  self.toggle = () => {
    if (timer) { self.pause(); return; }
    if (self.at >= last) self.go(0);
    play.textContent = 'Pause';
    timer = setInterval(() => {
      if (!play.isConnected || self.at >= last) { self.pause(); return; }
      self.go(self.at + stride, true);
      if (self.at >= last) self.pause();
    }, pace);
  };
  const button = (name, text, to) => element('button', {type: 'button', 'aria-label': name, title: name, onclick: () => self.go(to())}, text);
  self.node = element('div', {class: 'player', role: 'group', 'aria-label': label},
    button('To the start', '|◀', () => 0), button('Step back', '◀', () => self.at - stride), play,
    button('Step forward', '▶', () => self.at + stride), button('To the end', '▶|', () => last), slider);
  current = self;
  if (playing) self.toggle();
  return self;
}
